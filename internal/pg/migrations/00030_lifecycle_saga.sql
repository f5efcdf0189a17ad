-- +goose Up

CREATE TABLE lifecycle.tenant (
    id                  uuid        PRIMARY KEY,
    name                text        NOT NULL UNIQUE CHECK (name <> ''),
    quota_workspaces    integer     NOT NULL DEFAULT 0 CHECK (quota_workspaces >= 0),
    quota_gpus          integer     NOT NULL DEFAULT 0 CHECK (quota_gpus >= 0),
    quota_storage_bytes bigint      NOT NULL DEFAULT 0 CHECK (quota_storage_bytes >= 0),
    created_at          timestamptz NOT NULL DEFAULT mesh.clock(),
    version             bigint      NOT NULL DEFAULT 1
);

-- Lock order, everywhere: a run's row before its workspace's row.
CREATE TABLE lifecycle.workspace (
    id                 uuid        PRIMARY KEY,
    tenant_id          uuid        NOT NULL REFERENCES lifecycle.tenant (id),
    name               text        NOT NULL CHECK (name <> ''),
    spec               jsonb       NOT NULL DEFAULT '{}',
    spec_digest        text        NOT NULL DEFAULT '',
    desired_state      text        NOT NULL DEFAULT 'active' CHECK (desired_state IN ('active', 'decommissioned')),
    state              text        NOT NULL CHECK (state IN ('provisioning', 'active', 'failed', 'stuck', 'cancelling',
                                       'recreating', 'decommissioning', 'decommissioned')),
    epoch              bigint      NOT NULL DEFAULT 0,
    -- One per (step, direction, attempt). Drawing one is not a change that is announced: version stays.
    op_seq             bigint      NOT NULL DEFAULT 0,
    run_id             uuid,
    last_error_code    text        NOT NULL DEFAULT '',
    last_error         text        NOT NULL DEFAULT '',
    register_failures  integer     NOT NULL DEFAULT 0,
    retry_used         integer     NOT NULL DEFAULT 0,
    retry_window_start timestamptz,
    reset_done         boolean     NOT NULL DEFAULT false,
    node_id            uuid,
    node_name          text        NOT NULL DEFAULT '',
    endpoints          jsonb       NOT NULL DEFAULT '[]',
    created_by         text        NOT NULL DEFAULT '',
    created_at         timestamptz NOT NULL DEFAULT mesh.clock(),
    state_at           timestamptz NOT NULL DEFAULT mesh.clock(),
    version            bigint      NOT NULL DEFAULT 1
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01);

-- A name is free again once its workspace is decommissioned.
CREATE UNIQUE INDEX workspace_name ON lifecycle.workspace (tenant_id, name) WHERE state <> 'decommissioned';

CREATE TABLE lifecycle.saga_run (
    id                  uuid        PRIMARY KEY,
    workspace_id        uuid        NOT NULL REFERENCES lifecycle.workspace (id),
    tenant_id           uuid        NOT NULL,
    kind                text        NOT NULL CHECK (kind IN ('create', 'retry', 'recreate', 'decommission', 'retry_release', 'force_release')),
    definition          text        NOT NULL,
    def_version         integer     NOT NULL,
    round               integer     NOT NULL DEFAULT 1,
    parent_run_id       uuid,
    correlation_id      text        NOT NULL DEFAULT '',
    requester           text        NOT NULL DEFAULT '',
    step_names          text[]      NOT NULL CHECK (cardinality(step_names) > 0),
    input               jsonb       NOT NULL DEFAULT '{}',
    epoch               bigint      NOT NULL,
    state               text        NOT NULL CHECK (state IN ('pending', 'running', 'waiting', 'compensating', 'succeeded',
                                        'failed', 'stuck')),
    phase               text        NOT NULL DEFAULT 'do' CHECK (phase IN ('do', 'undo')),
    step                integer     NOT NULL DEFAULT 0 CHECK (step >= 0),
    -- Failed and lost attempts at this step in this phase since it was entered or an operator said "again".
    attempts            integer     NOT NULL DEFAULT 0,
    losses              integer     NOT NULL DEFAULT 0,
    tried_since         timestamptz NOT NULL DEFAULT mesh.clock(),
    -- Lease: held iff owner is set. next_at is lease_until while it is held, so one column decides who may lease.
    fence               bigint      NOT NULL DEFAULT 0,
    owner               text        CHECK (owner <> ''),
    lease_until         timestamptz,
    heartbeat_at        timestamptz,
    progress_at         timestamptz,
    signal              bigint      NOT NULL DEFAULT 0,
    wakeable            boolean     NOT NULL DEFAULT true,
    next_at             timestamptz NOT NULL DEFAULT mesh.clock(),
    deadline_at         timestamptz,
    cancel_requested_at timestamptz,
    cancel_by           text        NOT NULL DEFAULT '',
    cancel_reason       text        NOT NULL DEFAULT '',
    stuck_reason        text        NOT NULL DEFAULT '',
    why_waiting         text        NOT NULL DEFAULT '',
    error_code          text        NOT NULL DEFAULT '',
    error               text        NOT NULL DEFAULT '',
    error_layer         text        NOT NULL DEFAULT '',
    error_step          integer     NOT NULL DEFAULT -1,
    created_at          timestamptz NOT NULL DEFAULT mesh.clock(),
    finished_at         timestamptz,
    archived_at         timestamptz,
    version             bigint      NOT NULL DEFAULT 1,
    -- A live run always says what it waits for.
    CONSTRAINT live_says_why CHECK (state IN ('succeeded', 'failed') OR why_waiting <> ''),
    CONSTRAINT stuck_says_why CHECK (state <> 'stuck' OR stuck_reason <> ''),
    CONSTRAINT lease_is_whole CHECK ((owner IS NULL) = (lease_until IS NULL)),
    CONSTRAINT ended_is_dated CHECK ((state IN ('succeeded', 'failed')) = (finished_at IS NOT NULL))
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.01);

-- The truth of single-flight. `stuck` still owns its workspace.
CREATE UNIQUE INDEX saga_run_live ON lifecycle.saga_run (workspace_id)
    WHERE state IN ('pending', 'running', 'waiting', 'compensating', 'stuck');
-- The scan for a lease.
CREATE INDEX saga_run_runnable ON lifecycle.saga_run (next_at) WHERE state IN ('pending', 'running', 'waiting', 'compensating');
CREATE INDEX saga_run_history ON lifecycle.saga_run (workspace_id, created_at);

-- The timeline, as it is shown.
CREATE TABLE lifecycle.saga_step (
    run_id       uuid        NOT NULL,
    step         integer     NOT NULL,
    name         text        NOT NULL,
    dir          text        NOT NULL CHECK (dir IN ('do', 'undo')),
    attempt      integer     NOT NULL,
    workspace_id uuid        NOT NULL,
    tenant_id    uuid        NOT NULL,
    fence        bigint      NOT NULL,
    op_seq       bigint      NOT NULL,
    state        text        NOT NULL CHECK (state IN ('running', 'waiting', 'succeeded', 'failed', 'cancelled', 'lost', 'abandoned')),
    idem_key     text        NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT mesh.clock(),
    heartbeat_at timestamptz,
    progress_at  timestamptz,
    progress     jsonb       NOT NULL DEFAULT '{}',
    deadline_at  timestamptz,
    stall_after  interval    NOT NULL,
    stalled      boolean     NOT NULL DEFAULT false,
    finished_at  timestamptz,
    outcome      text        NOT NULL DEFAULT '',
    why_waiting  text        NOT NULL DEFAULT '',
    error_code   text        NOT NULL DEFAULT '',
    error        text        NOT NULL DEFAULT '',
    error_layer  text        NOT NULL DEFAULT '',
    cause        text        NOT NULL DEFAULT '', -- under the error, redacted; for operators
    output       jsonb,
    version      bigint      NOT NULL DEFAULT 1,
    PRIMARY KEY (run_id, step, dir, attempt)
    -- No index on the state: closing an attempt then stays on its page. Open attempts are found through their live runs.
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01);

-- What undo works from, and the ledger of orphans.
CREATE TABLE lifecycle.resource_claim (
    id                 uuid        PRIMARY KEY,
    workspace_id       uuid        NOT NULL,
    tenant_id          uuid        NOT NULL,
    run_id             uuid        NOT NULL,
    step               integer     NOT NULL,
    kind               text        NOT NULL CHECK (kind <> ''),
    scope              text        NOT NULL CHECK (scope IN ('node_local', 'shared')),
    deterministic_name text        NOT NULL CHECK (deterministic_name <> ''),
    external_ref       text        NOT NULL DEFAULT '',
    epoch              bigint      NOT NULL,
    node_id            uuid,
    intent_at          timestamptz NOT NULL DEFAULT mesh.clock(),
    confirmed_at       timestamptz,
    released_at        timestamptz,
    orphaned_at        timestamptz,
    orphaned_by        text        NOT NULL DEFAULT '',
    orphan_reason      text        NOT NULL DEFAULT '',
    last_seen_at       timestamptz,
    version            bigint      NOT NULL DEFAULT 1
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01);

-- One live claim a resource: whoever means to make it again adopts the claim.
CREATE UNIQUE INDEX resource_claim_live ON lifecycle.resource_claim (workspace_id, kind, deterministic_name)
    WHERE released_at IS NULL AND orphaned_at IS NULL;
CREATE INDEX resource_claim_orphan ON lifecycle.resource_claim (orphaned_at) WHERE orphaned_at IS NOT NULL AND released_at IS NULL;

-- The same key gets the same answer for ever.
CREATE TABLE lifecycle.operation_key (
    tenant_id  uuid        NOT NULL,
    key        text        NOT NULL CHECK (key <> ''),
    digest     text        NOT NULL,
    run_id     uuid        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT mesh.clock(),
    PRIMARY KEY (tenant_id, key)
);

-- +goose Down
DROP TABLE lifecycle.operation_key;
DROP TABLE lifecycle.resource_claim;
DROP TABLE lifecycle.saga_step;
DROP TABLE lifecycle.saga_run;
DROP TABLE lifecycle.workspace;
DROP TABLE lifecycle.tenant;
