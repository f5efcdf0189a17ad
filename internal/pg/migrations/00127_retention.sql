-- +goose Up

-- +goose StatementBegin
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'mesh_retention') THEN
        RAISE EXCEPTION 'there is no role mesh_retention' USING ERRCODE = 'undefined_object',
            HINT = 'Run `gpuaas migrate up` with the file of its configuration: it makes the roles first.';
    END IF;
END $$;
-- +goose StatementEnd

-- What each cut of each service has done: gpuaas retention status.
CREATE TABLE mesh.retention (
    service    text        NOT NULL,
    cut        text        NOT NULL,
    policy_key text        NOT NULL,
    total      bigint      NOT NULL DEFAULT 0, -- rows cut since the row was made
    last_cut   bigint      NOT NULL DEFAULT 0, -- rows cut by the last walk
    began_at   timestamptz NOT NULL,           -- the last walk
    done_at    timestamptz,                    -- the last walk that came to its end
    oldest_at  timestamptz,                    -- the oldest row that is left, whatever keeps it
    failure    text        NOT NULL DEFAULT '', -- of the last walk
    PRIMARY KEY (service, cut)
) WITH (fillfactor = 50);
GRANT SELECT, INSERT, UPDATE ON mesh.retention TO nodeapi, lifecycle, recovery, readmodel;
ALTER TABLE mesh.retention ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON mesh.retention FOR SELECT USING (true);
CREATE POLICY own_row ON mesh.retention FOR INSERT WITH CHECK (service = current_user::text);
CREATE POLICY own_change ON mesh.retention FOR UPDATE USING (service = current_user::text);

-- The lowest id that is drawn at a time: ids begin with their milliseconds, so that a walk over a primary key ends where rows are younger.
-- +goose StatementBegin
CREATE FUNCTION mesh.first_id(at timestamptz) RETURNS uuid LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT (lpad(to_hex(greatest(floor(extract(epoch FROM at) * 1000), 0)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;
-- When an id was drawn.
CREATE FUNCTION mesh.id_time(id uuid) RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT to_timestamp(('x' || lpad(left(replace(id::text, '-', ''), 12), 16, '0'))::bit(64)::bigint / 1000.0)
$$;
-- +goose StatementEnd
GRANT USAGE ON SCHEMA mesh TO mesh_retention;
GRANT SELECT ON mesh.era TO mesh_retention;
GRANT EXECUTE ON FUNCTION mesh.rolled_back() TO mesh_retention;

-- The term of a gate begins when its node is retired.
ALTER TABLE lifecycle.node_gate ADD COLUMN retired_at timestamptz;
UPDATE lifecycle.node_gate SET retired_at = mesh.clock() WHERE retired;

-- A key answers from its own row once its run is cut.
ALTER TABLE lifecycle.operation_key ADD COLUMN workspace_id uuid, ADD COLUMN kind text, ADD COLUMN epoch bigint;
UPDATE lifecycle.operation_key k SET workspace_id = r.workspace_id, kind = r.kind, epoch = r.epoch FROM lifecycle.saga_run r WHERE r.id = k.run_id;
CREATE INDEX operation_key_age ON lifecycle.operation_key (created_at);

-- Evidence is added by triggers and never changed; the cut of what is settled alone takes it away.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.evidence_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_user = 'mesh_retention' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'evidence is added by triggers and never changed' USING ERRCODE = 'insufficient_privilege';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_tasks(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.task_id AS id FROM lifecycle.task t
        WHERE t.task_id > lowest AND t.task_id < mesh.first_id(until) ORDER BY t.task_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.task t WHERE t.task_id = ANY (seen) AND NOT t.open AND t.state_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.id = t.run_id AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING t.task_id AS id),
    late AS (DELETE FROM lifecycle.late_evidence e USING gone g WHERE e.task_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_claims(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.id AS id FROM lifecycle.resource_claim t
        WHERE t.id > lowest AND t.id < mesh.first_id(until) ORDER BY t.id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.resource_claim t WHERE t.id = ANY (seen) AND t.released_at < until AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.workspace_id = t.workspace_id
            AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING t.id AS id),
    tries AS (DELETE FROM lifecycle.orphan_try o USING gone g WHERE o.claim_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_runs(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.id AS id FROM lifecycle.saga_run t
        WHERE t.id > lowest AND t.id < mesh.first_id(until) ORDER BY t.id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.saga_run t WHERE t.id = ANY (seen) AND t.state IN ('succeeded', 'failed') AND t.finished_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.id = t.workspace_id AND w.run_id = t.id AND w.state <> 'decommissioned')
            AND NOT EXISTS (SELECT FROM lifecycle.resource_claim c WHERE c.workspace_id = t.workspace_id AND c.run_id = t.id
                AND c.released_at IS NULL)
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.workspace_id = t.workspace_id
            AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING t.id AS id),
    steps AS (DELETE FROM lifecycle.saga_step s USING gone g WHERE s.run_id = g.id),
    pauses AS (DELETE FROM lifecycle.run_pause p USING gone g WHERE p.run_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_allocations(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.allocation_id AS id FROM lifecycle.allocation t
        WHERE t.allocation_id > lowest AND t.allocation_id < mesh.first_id(until) ORDER BY t.allocation_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.allocation t WHERE t.allocation_id = ANY (seen) AND t.state = 'released' AND t.state_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.id = t.workspace_id
            AND w.state <> 'decommissioned' AND w.epoch <= t.epoch)
            AND NOT EXISTS (SELECT FROM lifecycle.gpu_hold h WHERE h.allocation_id = t.allocation_id) AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.workspace_id = t.workspace_id
            AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING t.allocation_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_instances(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.instance_id AS id FROM lifecycle.instance t
        WHERE t.instance_id > lowest AND t.instance_id < mesh.first_id(until) ORDER BY t.instance_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.instance t WHERE t.instance_id = ANY (seen) AND t.state = 'ended' AND t.ended_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.id = t.workspace_id
            AND w.state <> 'decommissioned' AND w.epoch <= t.epoch) AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.workspace_id = t.workspace_id
            AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING t.instance_id AS id),
    woken AS (DELETE FROM lifecycle.woken_instance w USING gone g WHERE w.instance_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_unaccounted(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.instance_id AS id FROM lifecycle.unaccounted_instance t
        WHERE t.instance_id > lowest AND t.instance_id < mesh.first_id(until) ORDER BY t.instance_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.unaccounted_instance t WHERE t.instance_id = ANY (seen) AND t.state = 'ended' AND t.ended_at < until
        RETURNING t.instance_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_findings(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.finding_id AS id FROM lifecycle.finding t
        WHERE t.finding_id > lowest AND t.finding_id < mesh.first_id(until) ORDER BY t.finding_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.finding t WHERE t.finding_id = ANY (seen) AND t.resolved_at < until
        RETURNING t.finding_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_workspaces(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.id AS id FROM lifecycle.workspace t
        WHERE t.id > lowest AND t.id < mesh.first_id(until) ORDER BY t.id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.workspace t WHERE t.id = ANY (seen) AND t.state = 'decommissioned' AND t.state_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run x WHERE x.workspace_id = t.id)
            AND NOT EXISTS (SELECT FROM lifecycle.allocation x WHERE x.workspace_id = t.id)
            AND NOT EXISTS (SELECT FROM lifecycle.instance x WHERE x.workspace_id = t.id)
            AND NOT EXISTS (SELECT FROM lifecycle.resource_claim x WHERE x.workspace_id = t.id AND x.released_at IS NULL)
            AND NOT EXISTS (SELECT FROM lifecycle.static_placement x WHERE x.workspace_id = t.id AND x.ended_at IS NULL)
            AND NOT EXISTS (SELECT FROM lifecycle.finding x WHERE x.workspace_id = t.id AND x.resolved_at IS NULL)
        RETURNING t.id AS id),
    handles AS (DELETE FROM lifecycle.workspace_handle h USING gone g WHERE h.workspace_id = g.id),
    slots AS (DELETE FROM lifecycle.static_placement s USING gone g WHERE s.workspace_id = g.id),
    reports AS (DELETE FROM lifecycle.observed_workload o USING gone g WHERE o.workspace_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_gates(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.node_id AS id FROM lifecycle.node_gate t
        WHERE t.node_id > lowest AND t.node_id < mesh.first_id(until) ORDER BY t.node_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM lifecycle.node_gate t WHERE t.node_id = ANY (seen) AND t.retired AND NOT t.session_open AND coalesce(t.session_ready_at < until, true)
            AND t.retired_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.task x WHERE x.node_id = t.node_id AND x.open)
            AND NOT EXISTS (SELECT FROM lifecycle.allocation x WHERE x.node_id = t.node_id AND x.state <> 'released')
            AND NOT EXISTS (SELECT FROM lifecycle.resource_claim x WHERE x.node_id = t.node_id AND x.orphaned_at IS NOT NULL
                AND x.released_at IS NULL)
        RETURNING t.node_id AS id),
    rooms AS (DELETE FROM lifecycle.node_room r USING gone g WHERE r.node_id = g.id),
    said AS (DELETE FROM lifecycle.observed_workload o USING gone g WHERE o.node_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- Keys of operations by their age: none of them rises with time.
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_operation_keys(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH over AS (
        SELECT k.tenant_id, k.key FROM lifecycle.operation_key k WHERE k.created_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.id = k.run_id AND l.state NOT IN ('succeeded', 'failed'))
        ORDER BY k.created_at LIMIT most
    ), gone AS (
        DELETE FROM lifecycle.operation_key k USING over o
        WHERE k.tenant_id = o.tenant_id AND k.key = o.key AND k.created_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.id = k.run_id AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd

-- Evidence of changes by hand that is settled, with its findings' term.
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_evidence(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH over AS (
        SELECT s.evidence_id AS id FROM lifecycle.row_evidence_settled s WHERE s.settled_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.finding f WHERE f.resolved_at IS NULL AND s.evidence_id = ANY (f.evidence))
        ORDER BY s.evidence_id LIMIT most
    ), settled AS (
        DELETE FROM lifecycle.row_evidence_settled s USING over o WHERE s.evidence_id = o.id
    ), gone AS (
        DELETE FROM lifecycle.row_evidence e USING over o WHERE e.evidence_id = o.id RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd

-- The functions belong to a role that may delete from these tables, read what decides, and do nothing else.
GRANT USAGE ON SCHEMA lifecycle TO mesh_retention;
GRANT SELECT, DELETE ON lifecycle.allocation, lifecycle.finding, lifecycle.instance, lifecycle.late_evidence, lifecycle.node_gate, lifecycle.node_room, lifecycle.observed_workload, lifecycle.operation_key, lifecycle.orphan_try, lifecycle.resource_claim, lifecycle.row_evidence, lifecycle.row_evidence_settled, lifecycle.run_pause, lifecycle.saga_run, lifecycle.saga_step, lifecycle.static_placement, lifecycle.task, lifecycle.unaccounted_instance, lifecycle.woken_instance, lifecycle.workspace, lifecycle.workspace_handle TO mesh_retention;
GRANT SELECT ON lifecycle.gpu_hold TO mesh_retention;
GRANT CREATE ON SCHEMA lifecycle TO mesh_retention;
-- +goose StatementBegin
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'lifecycle'::regnamespace AND p.proname LIKE 'cut\_%' LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO lifecycle', f);
        EXECUTE format('ALTER FUNCTION %s OWNER TO mesh_retention', f);
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE CREATE ON SCHEMA lifecycle FROM mesh_retention;
-- A row that does not fit its seal leaves evidence when it is cut, as at any other write.
GRANT INSERT ON lifecycle.row_evidence TO mesh_retention;
GRANT EXECUTE ON FUNCTION lifecycle.leave_evidence(text, text, jsonb, jsonb) TO mesh_retention;
GRANT UPDATE ON lifecycle.node_room TO mesh_retention;

-- +goose Down
ALTER TABLE lifecycle.node_gate DROP COLUMN retired_at;
DROP FUNCTION lifecycle.cut_tasks(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_claims(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_runs(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_allocations(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_instances(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_unaccounted(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_findings(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_workspaces(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_gates(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer);
DROP FUNCTION lifecycle.cut_evidence(interval, uuid, integer);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.evidence_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'evidence is added by triggers and never changed' USING ERRCODE = 'insufficient_privilege';
END $$;
-- +goose StatementEnd
REVOKE ALL ON ALL TABLES IN SCHEMA lifecycle FROM mesh_retention;
REVOKE ALL ON FUNCTION lifecycle.leave_evidence(text, text, jsonb, jsonb) FROM mesh_retention;
REVOKE ALL ON SCHEMA lifecycle FROM mesh_retention;
DROP INDEX lifecycle.operation_key_age;
ALTER TABLE lifecycle.operation_key DROP COLUMN epoch, DROP COLUMN kind, DROP COLUMN workspace_id;
REVOKE ALL ON FUNCTION mesh.rolled_back() FROM mesh_retention;
REVOKE ALL ON mesh.era FROM mesh_retention;
REVOKE ALL ON SCHEMA mesh FROM mesh_retention;
DROP FUNCTION mesh.id_time(uuid);
DROP FUNCTION mesh.first_id(timestamptz);
DROP TABLE mesh.retention;
