-- +goose Up

-- What a sweep holds for broken: one open row for each (kind, subject).
CREATE TABLE lifecycle.finding (
    finding_id    uuid        PRIMARY KEY,
    kind          text        NOT NULL CHECK (kind IN ('node_occupied_without_allocation', 'allocation_without_occupancy', 'instance_without_row',
                                  'claim_without_resource', 'resource_without_claim', 'successive_provisions', 'row_changed_outside')),
    severity      text        NOT NULL CHECK (severity IN ('p0', 'p1', 'p2')),
    subject_type  text        NOT NULL CHECK (subject_type <> ''),
    subject_id    text        NOT NULL CHECK (subject_id <> ''),
    -- The look that sees it: only a later one of its own, and a whole one, resolves it.
    source        text        NOT NULL,
    tenant_id     uuid,
    workspace_id  uuid,
    node_id       uuid,
    allocation_id uuid,
    summary       text        NOT NULL CHECK (summary <> ''),
    next_action   text        NOT NULL CHECK (next_action <> ''),
    before        jsonb       NOT NULL DEFAULT '{}',
    after         jsonb       NOT NULL DEFAULT '{}',
    cordoned      boolean     NOT NULL DEFAULT false,
    first_seen_at timestamptz NOT NULL DEFAULT mesh.clock(),
    last_seen_at  timestamptz NOT NULL DEFAULT mesh.clock(),
    resolved_at   timestamptz,
    count         bigint      NOT NULL DEFAULT 1,
    version       bigint      NOT NULL DEFAULT 1
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX finding_open ON lifecycle.finding (kind, subject_type, subject_id) WHERE resolved_at IS NULL;
CREATE INDEX finding_of_node ON lifecycle.finding (node_id) WHERE resolved_at IS NULL AND cordoned;

-- What was seen and is not yet a finding: it needs a second look, and to be older than work under way takes to commit.
CREATE TABLE lifecycle.suspicion (
    kind         text        NOT NULL,
    subject_type text        NOT NULL,
    subject_id   text        NOT NULL,
    source       text        NOT NULL,
    since        timestamptz NOT NULL DEFAULT mesh.clock(),
    looks        integer     NOT NULL DEFAULT 1,
    PRIMARY KEY (kind, subject_type, subject_id)
);

-- What the event log last said of a row that sagas own. The guard alone writes it, behind the writers, from the log.
CREATE TABLE lifecycle.row_witness (
    row_type    text        NOT NULL CHECK (row_type IN ('workspace', 'run', 'allocation')),
    row_id      uuid        NOT NULL,
    version     bigint      NOT NULL,
    payload     jsonb       NOT NULL,
    over_at     timestamptz,          -- when its life ended, by the log
    agreed_xmin text        NOT NULL DEFAULT '', -- the transaction of the row that was last found to agree
    breach      jsonb,                -- a break within the log itself
    breach_at   timestamptz,
    PRIMARY KEY (row_type, row_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX row_witness_over ON lifecycle.row_witness (over_at) WHERE over_at IS NOT NULL;
CREATE INDEX row_witness_breach ON lifecycle.row_witness (breach_at) WHERE breach_at IS NOT NULL;

-- What the agent on a node last said of the workloads of a workspace. Untrusted evidence.
CREATE TABLE lifecycle.observed_workload (
    workspace_id uuid        NOT NULL,
    node_id      uuid        NOT NULL,
    payload      jsonb       NOT NULL,
    observed_at  timestamptz NOT NULL, -- by the database's clock, when it was written down
    PRIMARY KEY (workspace_id, node_id)
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE lifecycle.observed_workload;
DROP TABLE lifecycle.row_witness;
DROP TABLE lifecycle.suspicion;
DROP TABLE lifecycle.finding;
