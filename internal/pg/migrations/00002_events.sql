-- +goose Up

CREATE SCHEMA events;

-- seq is drawn at INSERT, inside the transaction of the state change and after its row update: two events of one
-- aggregate carry their seq in the order of their commits. Between aggregates seq says nothing, and it has holes and
-- late comers: nobody reads by it. pos is given after the commit, one number after the other, by one sequencer at a time.
CREATE TABLE events.event (
    seq               bigint      GENERATED ALWAYS AS IDENTITY,
    id                uuid        PRIMARY KEY,
    source            text        NOT NULL DEFAULT current_user,
    kind              text        NOT NULL CHECK (kind <> ''),
    aggregate_type    text        NOT NULL CHECK (aggregate_type <> ''),
    aggregate_id      text        NOT NULL CHECK (aggregate_id <> ''),
    aggregate_version bigint      NOT NULL,
    payload           jsonb       NOT NULL,
    correlation_id    text,
    tenant_id         text,
    workspace_id      text,
    workflow_id       text,
    allocation_id     text,
    task_id           text,
    node_id           text,
    node_instance_id  text,
    created_at        timestamptz NOT NULL DEFAULT mesh.clock(),
    pos               bigint      UNIQUE
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_analyze_scale_factor = 0.02);

-- What the sequencer scans. Every row passes through this index once, so its dead entries are most of it.
CREATE UNIQUE INDEX event_unnumbered ON events.event (seq) WHERE pos IS NULL;

-- Rights are held twice: by the columns granted, and by row policies that hold for the owner as well.
ALTER TABLE events.event ENABLE ROW LEVEL SECURITY;
ALTER TABLE events.event FORCE ROW LEVEL SECURITY;

GRANT USAGE ON SCHEMA events TO nodeapi, lifecycle, recovery, readmodel, sequencer;
GRANT SELECT ON events.event TO nodeapi, lifecycle, recovery, readmodel, sequencer;
-- source is insertable so that a foreign one is refused by name rather than ignored; seq, created_at and pos are not.
GRANT INSERT (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, correlation_id, tenant_id,
    workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id)
    ON events.event TO nodeapi, lifecycle, recovery, readmodel;
GRANT UPDATE (pos) ON events.event TO sequencer;

CREATE POLICY readable ON events.event FOR SELECT TO nodeapi, lifecycle, recovery, readmodel, sequencer USING (true);
CREATE POLICY own_source ON events.event FOR INSERT TO nodeapi, lifecycle, recovery, readmodel
    WITH CHECK (source = current_user::text);
-- A number is given once.
CREATE POLICY number_once ON events.event FOR UPDATE TO sequencer USING (pos IS NULL) WITH CHECK (pos IS NOT NULL);

-- +goose Down
DROP SCHEMA events CASCADE;
