-- +goose Up

-- The gate of a node: no row, no dispatch. fence_epoch and admitted are recovery's word, session_epoch is raised by nodeapi's, cordoned is ours and
-- about placement only.
CREATE TABLE lifecycle.node_gate (
    node_id          uuid        PRIMARY KEY,
    node_instance_id uuid,
    name             text        NOT NULL DEFAULT '',
    fence_epoch      bigint      NOT NULL,
    admitted         boolean     NOT NULL,
    retired          boolean     NOT NULL DEFAULT false,
    session_epoch    bigint      NOT NULL DEFAULT 0,
    session_id       uuid,
    session_open     boolean     NOT NULL DEFAULT false,
    replica_id       uuid,
    session_ready_at timestamptz,
    ledger_id        uuid,
    cordoned         boolean     NOT NULL DEFAULT false,
    cordon_reason    text        NOT NULL DEFAULT '',
    cordoned_by      text        NOT NULL DEFAULT '',
    -- A launched box serves one (workspace, epoch); a machine has no instance.
    instance_id      uuid,
    workspace_id     uuid,
    epoch            bigint      NOT NULL DEFAULT 0,
    slots            integer     NOT NULL DEFAULT 0 CHECK (slots >= 0),
    task_types       text[]      NOT NULL DEFAULT '{}',
    host             jsonb       NOT NULL DEFAULT '{}',
    version          bigint      NOT NULL DEFAULT 1
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);

CREATE INDEX node_gate_placeable ON lifecycle.node_gate (name) WHERE admitted AND NOT cordoned AND instance_id IS NULL;
CREATE INDEX node_gate_replica ON lifecycle.node_gate (replica_id) WHERE session_open;

-- When each nodeapi replica was last heard of: a session of a silent replica counts as gone.
CREATE TABLE lifecycle.replica_seen (
    replica_id uuid        PRIMARY KEY,
    beat_at    timestamptz NOT NULL,
    leaving    boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50);

-- Domains, where other tables have CHECK constraints: a constraint of a table is parsed anew by every statement that writes to it, which was a third
-- of what queueing a task cost; those of a domain are kept.
CREATE DOMAIN lifecycle.task_type AS text CHECK (VALUE IN ('probe.noop', 'workload.deploy', 'workload.start', 'workload.stop', 'workload.restart',
    'workload.remove', 'workload.status', 'storage.allocate', 'storage.release', 'terminal.open', 'node.self_update', 'recovery_token.rotate',
    'verifier.rotate', 'diagnostics.collect'));
CREATE DOMAIN lifecycle.task_state AS text CHECK (VALUE IN ('queued', 'dispatched', 'delivered', 'running', 'succeeded', 'failed', 'expired', 'cancelled',
    'superseded', 'outcome_unknown'));
CREATE DOMAIN lifecycle.attempts AS integer CHECK (VALUE >= 0);

CREATE TABLE lifecycle.task (
    task_id             uuid        PRIMARY KEY,
    type                lifecycle.task_type  NOT NULL,
    node_id             uuid        NOT NULL,
    workspace_id        uuid,
    tenant_id           uuid,
    run_id              uuid,
    epoch               bigint      NOT NULL DEFAULT 0,
    op_seq              bigint      NOT NULL DEFAULT 0,
    state               lifecycle.task_state NOT NULL,
    attempt             lifecycle.attempts   NOT NULL DEFAULT 0,
    idem_key            text        NOT NULL UNIQUE,
    payload             bytea       NOT NULL,
    session_epoch       bigint      NOT NULL DEFAULT 0,
    session_id          uuid,
    ledger_id           uuid,
    created_at          timestamptz NOT NULL DEFAULT mesh.clock(),
    not_before          timestamptz NOT NULL DEFAULT mesh.clock(),
    expires_at          timestamptz NOT NULL,
    state_at            timestamptz NOT NULL DEFAULT mesh.clock(),
    offered_at          timestamptz,
    reason              text        NOT NULL DEFAULT '',
    error               text        NOT NULL DEFAULT '',
    output              bytea       NOT NULL DEFAULT '',
    note                text        NOT NULL DEFAULT '',
    late_evidence       integer     NOT NULL DEFAULT 0,
    cancel_requested_at timestamptz,
    cancel_reason       text        NOT NULL DEFAULT '',
    correlation_id      text        NOT NULL DEFAULT '',
    created_by          text        NOT NULL DEFAULT '',
    version             bigint      NOT NULL DEFAULT 1,
    -- Indexes ask for this and never for the state: a task that moves from one open state to the next then writes none of them.
    open                boolean     NOT NULL GENERATED ALWAYS AS (state IN ('queued', 'dispatched', 'delivered', 'running')) STORED
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- What a lease picks from, what is reconciled at a session, what is offered again, and what the sweeps look at. There is no other index that holds every
-- open task: after a quiet moment the planner believes that there are none, finds any such index as good as this one, and a lease then reads all open
-- tasks for each node.
CREATE INDEX task_open ON lifecycle.task (node_id, task_id) WHERE open;
CREATE INDEX task_cancelling ON lifecycle.task (task_id) WHERE cancel_requested_at IS NOT NULL AND open;
CREATE INDEX task_of_run ON lifecycle.task (run_id) WHERE run_id IS NOT NULL;

-- Reports that came after a task's end, or from a node whose gate was shut.
CREATE TABLE lifecycle.late_evidence (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id       uuid        NOT NULL,
    attempt       integer     NOT NULL,
    node_id       uuid        NOT NULL,
    session_epoch bigint      NOT NULL,
    state         text        NOT NULL,
    detail        text        NOT NULL DEFAULT '',
    received_at   timestamptz NOT NULL DEFAULT mesh.clock(),
    UNIQUE (task_id, attempt, session_epoch, state)
);

-- +goose Down
DROP TABLE lifecycle.late_evidence;
DROP TABLE lifecycle.task;
DROP DOMAIN lifecycle.task_type;
DROP DOMAIN lifecycle.task_state;
DROP DOMAIN lifecycle.attempts;
DROP TABLE lifecycle.replica_seen;
DROP TABLE lifecycle.node_gate;
