-- +goose Up

-- The audit log in its one order: row n says what entry n was, and by its hash what all rows before it were. One consumer makes it from the events
-- `audit.recorded` in the order of their positions; made again from the log it comes out the same.
--
-- What is filtered by is derived from the text that the hash is made over: nobody can change the one without the other.
CREATE TABLE readmodel.audit (
    number        bigint PRIMARY KEY CHECK (number > 0),
    pos           bigint NOT NULL UNIQUE,
    event_id      uuid   NOT NULL UNIQUE,
    source        text   NOT NULL,
    entry         text   NOT NULL, -- canonical JSON
    previous_hash bytea  NOT NULL CHECK (octet_length(previous_hash) = 32),
    hash          bytea  NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    action        text   GENERATED ALWAYS AS (COALESCE(entry::jsonb->>'action', '')) STORED,
    tenant_id     text   GENERATED ALWAYS AS (COALESCE(entry::jsonb->>'tenant_id', '')) STORED,
    workspace_id  text   GENERATED ALWAYS AS (COALESCE(entry::jsonb->>'workspace_id', '')) STORED,
    node_id       text   GENERATED ALWAYS AS (COALESCE(entry::jsonb->>'node_id', '')) STORED
);
CREATE INDEX audit_by_workspace ON readmodel.audit (workspace_id, number DESC) WHERE workspace_id <> '';
CREATE INDEX audit_by_node ON readmodel.audit (node_id, number DESC) WHERE node_id <> '';
CREATE INDEX audit_by_tenant ON readmodel.audit (tenant_id, number DESC) WHERE tenant_id <> '';
CREATE INDEX audit_by_action ON readmodel.audit (action text_pattern_ops, number DESC);

-- Where the log ends: rows that are cut off its end are missed here.
CREATE TABLE readmodel.audit_head (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    number    bigint  NOT NULL DEFAULT 0,
    hash      bytea   NOT NULL DEFAULT decode(repeat('00', 32), 'hex') CHECK (octet_length(hash) = 32)
) WITH (fillfactor = 50);
INSERT INTO readmodel.audit_head DEFAULT VALUES;

-- Rows are added and never changed; only the schema's owner can do otherwise, and is found out.
REVOKE UPDATE, DELETE, TRUNCATE ON readmodel.audit FROM readmodel;
REVOKE INSERT, DELETE, TRUNCATE ON readmodel.audit_head FROM readmodel;

-- +goose Down
DROP TABLE readmodel.audit_head;
DROP TABLE readmodel.audit;
