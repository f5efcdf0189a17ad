-- +goose NO TRANSACTION
-- +goose Up

-- What an event belongs to is stored as uuids of 16 bytes, where all of it is uuids, and in the columns of text otherwise, as before: of the twelve kilobytes
-- that a saga wrote to the log of the database a twelfth was hyphens and hexadecimal digits. Rows of earlier builds stay as they are, and replicas of the
-- build before go on to append.
ALTER TABLE events.event ADD COLUMN IF NOT EXISTS correlation_uuid uuid, ADD COLUMN IF NOT EXISTS tenant_uuid uuid,
    ADD COLUMN IF NOT EXISTS workspace_uuid uuid, ADD COLUMN IF NOT EXISTS workflow_uuid uuid, ADD COLUMN IF NOT EXISTS allocation_uuid uuid,
    ADD COLUMN IF NOT EXISTS task_uuid uuid, ADD COLUMN IF NOT EXISTS node_uuid uuid, ADD COLUMN IF NOT EXISTS node_instance_uuid uuid;
GRANT INSERT (correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid, node_instance_uuid)
    ON events.event TO nodeapi, lifecycle, recovery, readmodel;

-- An event that no caller waits for has no id, and no place in the index of ids. Who looks for an id finds it by either index.
ALTER TABLE events.event ALTER COLUMN id DROP NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS events.event_token;
CREATE UNIQUE INDEX CONCURRENTLY event_token ON events.event (id) WHERE id IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS events.event_id;
ALTER TABLE readmodel.parked_event ALTER COLUMN event_id DROP NOT NULL;
ALTER TABLE recovery.parked_event ALTER COLUMN event_id DROP NOT NULL;
ALTER TABLE lifecycle.parked_event ALTER COLUMN event_id DROP NOT NULL;
ALTER TABLE nodeapi.parked_event ALTER COLUMN event_id DROP NOT NULL;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION events.refuse_reader() RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION 'this session does not read events that are stored as this one is' USING ERRCODE = 'feature_not_supported',
        HINT = 'Replace replicas of the earlier build. In a session of your own: SET events.format = ''protobuf, uuids''.';
END $$;
-- +goose StatementEnd
-- A reader of an earlier build would take such an event for one that belongs to nothing, and one whose kind says what its message is for one without. It waits for its replacement, as with bodies (00107).
ALTER POLICY readable ON events.event TO nodeapi, lifecycle, recovery, readmodel
    USING (CASE WHEN current_setting('events.format', true) = 'protobuf, uuids' THEN true
        WHEN coalesce(correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid, node_instance_uuid) IS NULL
            AND (body IS NULL OR id IS NOT NULL AND (body_type <> '' OR body = '') AND current_setting('events.format', true) = 'protobuf') THEN true
        ELSE events.refuse_reader() END);

-- +goose Down
ALTER POLICY readable ON events.event TO nodeapi, lifecycle, recovery, readmodel
    USING (CASE WHEN body IS NULL THEN true WHEN current_setting('events.format', true) = 'protobuf' THEN true ELSE events.refuse_reader() END);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION events.refuse_reader() RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION 'this session does not read events whose body is protobuf' USING ERRCODE = 'feature_not_supported',
        HINT = 'Replace replicas of the earlier build. In a session of your own: SET events.format = ''protobuf''.';
END $$;
-- +goose StatementEnd
-- The build before knows neither a task by its aggregate nor a message by its kind (internal/events/types.go).
ALTER TABLE events.event NO FORCE ROW LEVEL SECURITY;
UPDATE events.event SET id = coalesce(id, gen_random_uuid()), correlation_id = coalesce(correlation_uuid::text, correlation_id),
    tenant_id = coalesce(tenant_uuid::text, tenant_id), workspace_id = coalesce(workspace_uuid::text, workspace_id),
    workflow_id = coalesce(workflow_uuid::text, workflow_id), allocation_id = coalesce(allocation_uuid::text, allocation_id),
    task_id = coalesce(task_uuid::text, task_id, CASE aggregate_type WHEN 'task' THEN aggregate_id END),
    node_id = coalesce(node_uuid::text, node_id), node_instance_id = coalesce(node_instance_uuid::text, node_instance_id),
    body_type = CASE WHEN body_type <> '' OR body = '' OR body IS NULL THEN body_type ELSE coalesce(CASE kind
        WHEN 'allocation.changed' THEN 'gpuaas.lifecycle.v1.Allocation'
        WHEN 'claim.changed' THEN 'gpuaas.lifecycle.v1.Claim'
        WHEN 'gate.changed' THEN 'gpuaas.lifecycle.v1.NodeGate'
        WHEN 'instance.changed' THEN 'gpuaas.lifecycle.v1.Instance'
        WHEN 'run.changed' THEN 'gpuaas.lifecycle.v1.Run'
        WHEN 'session.changed' THEN 'gpuaas.node.v1.SessionChanged'
        WHEN 'step.changed' THEN 'gpuaas.lifecycle.v1.StepAttempt'
        WHEN 'task.changed' THEN 'gpuaas.lifecycle.v1.TaskChanged'
        WHEN 'workload.observed' THEN 'gpuaas.node.v1.Observation'
        WHEN 'workspace.changed' THEN 'gpuaas.lifecycle.v1.Workspace' END, body_type) END
WHERE id IS NULL OR aggregate_type = 'task' AND task_id IS NULL OR body_type = '' AND body <> '' OR coalesce(correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid,
    node_instance_uuid) IS NOT NULL;
ALTER TABLE events.event FORCE ROW LEVEL SECURITY;
UPDATE readmodel.parked_event SET event_id = gen_random_uuid() WHERE event_id IS NULL;
UPDATE recovery.parked_event SET event_id = gen_random_uuid() WHERE event_id IS NULL;
UPDATE lifecycle.parked_event SET event_id = gen_random_uuid() WHERE event_id IS NULL;
UPDATE nodeapi.parked_event SET event_id = gen_random_uuid() WHERE event_id IS NULL;
ALTER TABLE readmodel.parked_event ALTER COLUMN event_id SET NOT NULL;
ALTER TABLE recovery.parked_event ALTER COLUMN event_id SET NOT NULL;
ALTER TABLE lifecycle.parked_event ALTER COLUMN event_id SET NOT NULL;
ALTER TABLE nodeapi.parked_event ALTER COLUMN event_id SET NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS events.event_id;
CREATE UNIQUE INDEX CONCURRENTLY event_id ON events.event (id);
DROP INDEX CONCURRENTLY IF EXISTS events.event_token;
ALTER TABLE events.event ALTER COLUMN id SET NOT NULL;
ALTER TABLE events.event DROP COLUMN correlation_uuid, DROP COLUMN tenant_uuid, DROP COLUMN workspace_uuid, DROP COLUMN workflow_uuid,
    DROP COLUMN allocation_uuid, DROP COLUMN task_uuid, DROP COLUMN node_uuid, DROP COLUMN node_instance_uuid;
