-- +goose Up

-- What the watchdog was told, by event: the newest of each row, no more of it than it judges by. A lower version is discarded, so that a replay changes
-- nothing.
CREATE TABLE recovery.watch_workspace (
    workspace_id           uuid        PRIMARY KEY,
    version                bigint      NOT NULL,
    tenant_id              uuid        NOT NULL,
    tenant                 text        NOT NULL,
    name                   text        NOT NULL,
    state                  text        NOT NULL CHECK (state IN ('provisioning', 'active', 'failed', 'stuck', 'cancelling', 'recreating',
        'decommissioning', 'decommissioned')),
    state_at               timestamptz NOT NULL,
    epoch                  bigint      NOT NULL,
    run_id                 text        NOT NULL,
    node_id                uuid,
    placement              text        NOT NULL,
    register_failures      integer     NOT NULL,
    register_failing_since timestamptz,
    last_error_code        text        NOT NULL,
    last_error             text        NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX watch_workspace_active ON recovery.watch_workspace (node_id) WHERE state = 'active';
CREATE INDEX watch_workspace_failing ON recovery.watch_workspace (workspace_id) WHERE register_failures > 0;

-- Runs that are worth a look: stalled, undone, ended badly, or a recovery themselves. One that simply goes well has no row.
CREATE TABLE recovery.watch_run (
    run_id       text        PRIMARY KEY,
    version      bigint      NOT NULL,
    workspace_id uuid        NOT NULL,
    tenant_id    uuid        NOT NULL,
    kind         text        NOT NULL,
    state        text        NOT NULL CHECK (state IN ('pending', 'running', 'waiting', 'compensating', 'succeeded', 'failed', 'stuck')),
    phase        text        NOT NULL,
    step         text        NOT NULL, -- at which it is, or failed
    stalled      boolean     NOT NULL,
    stuck_reason text        NOT NULL,
    attempt      integer     NOT NULL, -- that is stalled, and its version: progress clears it
    attempt_ver  bigint      NOT NULL,
    requester    text        NOT NULL,
    parent_run   text        NOT NULL,
    cancel_by    text        NOT NULL,
    error_code   text        NOT NULL,
    error        text        NOT NULL,
    error_layer  text        NOT NULL,
    created_at   timestamptz NOT NULL,
    finished_at  timestamptz,
    seen_at      timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 70);
CREATE INDEX watch_run_stalled ON recovery.watch_run (run_id) WHERE stalled;
CREATE INDEX watch_run_workspace ON recovery.watch_run (workspace_id, created_at);
CREATE INDEX watch_run_finished ON recovery.watch_run (finished_at);

CREATE TABLE recovery.watch_instance (
    workspace_id uuid        NOT NULL,
    epoch        bigint      NOT NULL,
    version      bigint      NOT NULL,
    instance_id  uuid        NOT NULL,
    state        text        NOT NULL CHECK (state IN ('prepared', 'launching', 'live', 'ending', 'ended')),
    placement    text        NOT NULL,
    node_id      uuid,
    started_at   timestamptz,
    PRIMARY KEY (workspace_id, epoch)
);

-- Sessions as their replicas told of them; of those that are over the newest of each node is kept.
CREATE TABLE recovery.watch_session (
    session_id   uuid        PRIMARY KEY,
    version      bigint      NOT NULL,
    node_id      uuid        NOT NULL,
    replica_id   uuid,
    generation   bigint      NOT NULL,
    serving      boolean     NOT NULL,
    since        timestamptz NOT NULL, -- of serving as it is
    close_reason text        NOT NULL
);
CREATE INDEX watch_session_node ON recovery.watch_session (node_id, generation DESC);
CREATE TABLE recovery.watch_replica (
    replica_id uuid        PRIMARY KEY,
    beat_at    timestamptz NOT NULL,
    leaving    boolean     NOT NULL
) WITH (fillfactor = 50);
-- Since when somebody has listened to agents without a gap: silence before that is no evidence.
CREATE TABLE recovery.watch_listening (
    singleton boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    since     timestamptz NOT NULL,
    beat_at   timestamptz NOT NULL
) WITH (fillfactor = 10);

-- Steps at which runs failed or stalled, for what many have in common.
CREATE TABLE recovery.class_sighting (
    step         text        NOT NULL,
    error_code   text        NOT NULL,
    run_id       text        NOT NULL,
    workspace_id uuid        NOT NULL,
    tenant_id    uuid        NOT NULL,
    error_layer  text        NOT NULL,
    seen_at      timestamptz NOT NULL,
    PRIMARY KEY (step, error_code, run_id)
);
CREATE INDEX class_sighting_age ON recovery.class_sighting (seen_at);

-- One recovery of one workspace. The partial index is the promise of one at a time.
CREATE TABLE recovery.recovery_record (
    record_id        uuid        PRIMARY KEY,
    workspace_id     uuid        NOT NULL,
    workspace        text        NOT NULL,
    tenant_id        uuid        NOT NULL,
    trigger          text        NOT NULL CHECK (trigger IN ('stalled', 'session_lost', 'register_failing', 'manual')),
    outcome          text        NOT NULL CHECK (outcome IN ('open', 'recovered', 'failed', 'withheld')),
    step             text        NOT NULL,
    error_code       text        NOT NULL,
    cause            text        NOT NULL,
    what_worked      text        NOT NULL DEFAULT '',
    operation_id     text        NOT NULL DEFAULT '',
    withheld_because text        NOT NULL DEFAULT '',
    withheld_by      text        NOT NULL DEFAULT '', -- what must change: `brake`, a bucket, `lifecycle`, `identity`, `machine`, `person`
    next_at          timestamptz,
    detected_at      timestamptz NOT NULL,
    started_at       timestamptz,
    ended_at         timestamptz,
    user_impact      text        NOT NULL,
    attempts         integer     NOT NULL DEFAULT 0,
    correlation_id   text        NOT NULL,
    version          bigint      NOT NULL DEFAULT 1,
    -- What is needed to go on with it, and not shown.
    unit             text        NOT NULL, -- the box or machine whose failure it is
    placement        text        NOT NULL,
    node_id          uuid,
    run_id           text        NOT NULL, -- of the workspace when it was detected
    asked            integer     NOT NULL DEFAULT 0, -- attempts whose request was written down before it was sent
    answered         integer     NOT NULL DEFAULT 0, -- attempts whose answer is known
    asked_epoch      bigint      NOT NULL DEFAULT 0, -- of the box that the last request is about
    following        boolean     NOT NULL DEFAULT false, -- operation_id is under way
    by_person        boolean     NOT NULL DEFAULT false, -- a person has taken over: nothing is asked any more
    refusals         integer     NOT NULL DEFAULT 0, -- in a row
    last_failure     text        NOT NULL DEFAULT '', -- step and code of the last operation that failed
    CHECK (answered <= asked AND asked <= answered + 1),
    CHECK ((ended_at IS NULL) = (outcome IN ('open', 'withheld')))
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX recovery_record_one_open ON recovery.recovery_record (workspace_id) WHERE ended_at IS NULL;
CREATE INDEX recovery_record_detected ON recovery.recovery_record (detected_at);
CREATE INDEX recovery_record_run ON recovery.recovery_record (operation_id) WHERE operation_id <> '';

CREATE TABLE recovery.incident (
    incident_id   uuid        PRIMARY KEY,
    kind          text        NOT NULL CHECK (kind IN ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable')),
    key           text        NOT NULL, -- what makes two of a kind the same
    severity      text        NOT NULL CHECK (severity IN ('p0', 'p1', 'p2')),
    summary       text        NOT NULL,
    step          text        NOT NULL DEFAULT '',
    error_code    text        NOT NULL DEFAULT '',
    tenant_ids    text[]      NOT NULL DEFAULT '{}',
    workspace_ids text[]      NOT NULL DEFAULT '{}',
    node_ids      text[]      NOT NULL DEFAULT '{}',
    owner_layer   text        NOT NULL DEFAULT '',
    next_action   text        NOT NULL,
    opened_at     timestamptz NOT NULL,
    last_seen_at  timestamptz NOT NULL,
    closed_at     timestamptz,
    closed_by     text        NOT NULL DEFAULT '',
    count         bigint      NOT NULL DEFAULT 1,
    version       bigint      NOT NULL DEFAULT 1
);
CREATE UNIQUE INDEX incident_one_open ON recovery.incident (kind, key) WHERE closed_at IS NULL;
CREATE INDEX incident_opened ON recovery.incident (opened_at) WHERE kind = 'machine_unreachable';

CREATE TABLE recovery.brake (
    singleton      boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    engaged        boolean     NOT NULL DEFAULT false,
    reason         text        NOT NULL DEFAULT '',
    affected       integer     NOT NULL DEFAULT 0,
    fleet          integer     NOT NULL DEFAULT 0,
    most           integer     NOT NULL DEFAULT 2,
    since          timestamptz,
    incident_id    text        NOT NULL DEFAULT '',
    released_by    text        NOT NULL DEFAULT '',
    release_reason text        NOT NULL DEFAULT '',
    released_at    timestamptz,
    calm_since     timestamptz, -- while engaged: since when no more is affected than it allows
    version        bigint      NOT NULL DEFAULT 0
);
INSERT INTO recovery.brake DEFAULT VALUES;

-- Token buckets of recreations: tokens as they were at `at`; what has flowed in since is added by whoever looks.
CREATE TABLE recovery.churn_bucket (
    scope  text             NOT NULL CHECK (scope IN ('workspace', 'placement')),
    key    text             NOT NULL,
    tokens double precision NOT NULL,
    at     timestamptz      NOT NULL,
    PRIMARY KEY (scope, key)
);

-- Who acts. What it does is safe without this row: it keeps two from doing the same work.
CREATE TABLE recovery.watchdog_lease (
    singleton boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    holder    text        NOT NULL DEFAULT '',
    until     timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 10);
INSERT INTO recovery.watchdog_lease DEFAULT VALUES;

-- +goose Down
DROP TABLE recovery.watchdog_lease, recovery.churn_bucket, recovery.brake, recovery.incident, recovery.recovery_record, recovery.class_sighting,
    recovery.watch_listening, recovery.watch_replica, recovery.watch_session, recovery.watch_instance, recovery.watch_run, recovery.watch_workspace;
