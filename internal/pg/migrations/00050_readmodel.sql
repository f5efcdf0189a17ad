-- +goose Up

-- Projections of the event log: one row an aggregate, its latest payload as it came, and beside it what is filtered and sorted by. Everything here can
-- be made again from event 0, but for people's sessions.

CREATE TABLE readmodel.node (
    node_id   uuid   PRIMARY KEY,
    version   bigint NOT NULL,
    name      text   NOT NULL,
    state     text   NOT NULL CHECK (state IN ('pending', 'active', 'held', 'quarantined', 'fenced', 'retired')),
    tenant_id uuid,
    body      jsonb  NOT NULL
);
CREATE INDEX node_by_name ON readmodel.node (name, node_id);
CREATE INDEX node_by_tenant ON readmodel.node (tenant_id) WHERE tenant_id IS NOT NULL;

-- The newest few of each node.
CREATE TABLE readmodel.session (
    session_id uuid        PRIMARY KEY,
    version    bigint      NOT NULL,
    node_id    uuid        NOT NULL,
    replica_id uuid,
    generation bigint      NOT NULL,
    state      text        NOT NULL CHECK (state IN ('opening', 'admitted', 'draining', 'closed')),
    serving    boolean     NOT NULL, -- admitted or draining, and not late
    since      timestamptz NOT NULL, -- of serving as it is
    body       jsonb       NOT NULL
);
CREATE INDEX session_by_node ON readmodel.session (node_id, generation DESC, version DESC, session_id DESC);
CREATE INDEX session_by_replica ON readmodel.session (replica_id);

CREATE TABLE readmodel.replica (
    replica_id uuid        PRIMARY KEY,
    version    bigint      NOT NULL,
    started_at timestamptz NOT NULL,
    beat_at    timestamptz NOT NULL,
    leaving    boolean     NOT NULL,
    body       jsonb       NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE readmodel.gate (
    node_id uuid   PRIMARY KEY,
    version bigint NOT NULL,
    body    jsonb  NOT NULL
);

CREATE TABLE readmodel.tenant (
    tenant_id uuid   PRIMARY KEY,
    version   bigint NOT NULL,
    name      text   NOT NULL,
    body      jsonb  NOT NULL
);
CREATE INDEX tenant_by_name ON readmodel.tenant (name, tenant_id);

CREATE TABLE readmodel.workspace (
    workspace_id uuid   PRIMARY KEY,
    version      bigint NOT NULL,
    tenant_id    uuid   NOT NULL,
    tenant       text   NOT NULL,
    name         text   NOT NULL,
    state        text   NOT NULL CHECK (state IN ('provisioning', 'active', 'failed', 'stuck', 'cancelling', 'recreating',
        'decommissioning', 'decommissioned')),
    node_id      uuid, -- where it runs
    body         jsonb  NOT NULL
);
CREATE INDEX workspace_by_node ON readmodel.workspace (node_id) WHERE state <> 'decommissioned';
CREATE INDEX workspace_by_tenant ON readmodel.workspace (tenant, name, workspace_id);
CREATE INDEX workspace_by_name ON readmodel.workspace (name, workspace_id);
CREATE INDEX workspace_by_tenant_id ON readmodel.workspace (tenant_id);

CREATE TABLE readmodel.run (
    run_id       uuid    PRIMARY KEY,
    version      bigint  NOT NULL,
    workspace_id uuid    NOT NULL,
    tenant_id    uuid,
    live         boolean NOT NULL,
    body         jsonb   NOT NULL
);
CREATE INDEX run_by_workspace ON readmodel.run (workspace_id, run_id DESC);
CREATE INDEX run_live ON readmodel.run (run_id) WHERE live;

CREATE TABLE readmodel.step (
    run_id       uuid    NOT NULL,
    step         integer NOT NULL,
    direction    text    NOT NULL CHECK (direction IN ('do', 'undo')),
    attempt      integer NOT NULL,
    version      bigint  NOT NULL,
    workspace_id uuid    NOT NULL,
    stalled      boolean NOT NULL, -- and still open
    body         jsonb   NOT NULL,
    PRIMARY KEY (run_id, step, direction, attempt)
);

CREATE TABLE readmodel.allocation (
    allocation_id uuid   PRIMARY KEY,
    version       bigint NOT NULL,
    workspace_id  uuid   NOT NULL,
    tenant_id     uuid,
    body          jsonb  NOT NULL
);
CREATE INDEX allocation_by_workspace ON readmodel.allocation (workspace_id);
-- What a node's page counts: the holds that stand.
CREATE INDEX allocation_by_node ON readmodel.allocation ((body->>'node_id')) WHERE body->>'state' <> 'ALLOCATION_STATE_RELEASED';

CREATE TABLE readmodel.instance (
    instance_id  uuid    PRIMARY KEY,
    version      bigint  NOT NULL,
    workspace_id uuid    NOT NULL,
    tenant_id    uuid,
    live         boolean NOT NULL,
    body         jsonb   NOT NULL
);
CREATE INDEX instance_by_workspace ON readmodel.instance (workspace_id);
CREATE INDEX instance_live ON readmodel.instance (instance_id) WHERE live;

CREATE TABLE readmodel.claim (
    claim_id     uuid    PRIMARY KEY,
    version      bigint  NOT NULL,
    workspace_id uuid    NOT NULL,
    tenant_id    uuid,
    released     boolean NOT NULL,
    orphaned     boolean NOT NULL,
    body         jsonb   NOT NULL
);
CREATE INDEX claim_by_workspace ON readmodel.claim (workspace_id);
CREATE INDEX claim_orphaned ON readmodel.claim (claim_id) WHERE orphaned AND NOT released;

CREATE TABLE readmodel.task (
    task_id      uuid        PRIMARY KEY,
    version      bigint      NOT NULL,
    node_id      uuid        NOT NULL,
    workspace_id uuid,
    tenant_id    uuid,
    state        text        NOT NULL CHECK (state IN ('queued', 'dispatched', 'delivered', 'running', 'succeeded', 'failed', 'expired',
        'cancelled', 'superseded', 'outcome_unknown')),
    expires_at   timestamptz,
    body         jsonb       NOT NULL
);
CREATE INDEX task_by_node ON readmodel.task (node_id, task_id DESC);
CREATE INDEX task_by_workspace ON readmodel.task (workspace_id, task_id DESC);
CREATE INDEX task_open ON readmodel.task (task_id) WHERE state IN ('queued', 'dispatched', 'delivered', 'running');

-- As each change of the task brought them: n counts within one change.
CREATE TABLE readmodel.task_transition (
    task_id uuid    NOT NULL,
    version bigint  NOT NULL,
    n       integer NOT NULL,
    body    jsonb   NOT NULL,
    PRIMARY KEY (task_id, version, n)
);

-- What an agent last said of a workspace's workloads: untrusted evidence.
CREATE TABLE readmodel.observation (
    workspace_id uuid   PRIMARY KEY,
    version      bigint NOT NULL,
    node_id      uuid,
    body         jsonb  NOT NULL
);

-- Where a rebuild is made for comparison. A rebuild rolls back: these are always empty.
CREATE UNLOGGED TABLE readmodel.scratch_node (LIKE readmodel.node INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_session (LIKE readmodel.session INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_replica (LIKE readmodel.replica INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_gate (LIKE readmodel.gate INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_tenant (LIKE readmodel.tenant INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_workspace (LIKE readmodel.workspace INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_run (LIKE readmodel.run INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_step (LIKE readmodel.step INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_allocation (LIKE readmodel.allocation INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_instance (LIKE readmodel.instance INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_claim (LIKE readmodel.claim INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_task (LIKE readmodel.task INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_task_transition (LIKE readmodel.task_transition INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_observation (LIKE readmodel.observation INCLUDING ALL);

-- Sessions of people. The token itself is nowhere.
CREATE TABLE readmodel.person_session (
    session_id   uuid        PRIMARY KEY,
    token_sha256 bytea       NOT NULL CHECK (octet_length(token_sha256) = 32),
    subject      text        NOT NULL CHECK (subject <> ''),
    tenant_id    uuid,
    roles        text[]      NOT NULL CHECK (cardinality(roles) > 0),
    created_at   timestamptz NOT NULL DEFAULT mesh.clock(),
    expires_at   timestamptz NOT NULL,
    revoked_at   timestamptz,
    revoked_by   text,
    -- A tenant's person without a tenant would be one who sees everything.
    CHECK (tenant_id IS NOT NULL OR NOT ('tenant' = ANY (roles)))
);
CREATE INDEX person_session_by_subject ON readmodel.person_session (subject) WHERE revoked_at IS NULL;
CREATE INDEX person_session_expired ON readmodel.person_session (expires_at);

-- +goose Down
DROP TABLE readmodel.person_session;
DROP TABLE readmodel.scratch_node, readmodel.scratch_session, readmodel.scratch_replica, readmodel.scratch_gate, readmodel.scratch_tenant,
    readmodel.scratch_workspace, readmodel.scratch_run, readmodel.scratch_step, readmodel.scratch_allocation, readmodel.scratch_instance,
    readmodel.scratch_claim, readmodel.scratch_task, readmodel.scratch_task_transition, readmodel.scratch_observation;
DROP TABLE readmodel.node, readmodel.session, readmodel.replica, readmodel.gate, readmodel.tenant, readmodel.workspace, readmodel.run,
    readmodel.step, readmodel.allocation, readmodel.instance, readmodel.claim, readmodel.task, readmodel.task_transition, readmodel.observation;
