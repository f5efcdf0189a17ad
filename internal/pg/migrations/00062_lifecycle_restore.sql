-- +goose Up

-- Instances that a placement lists and that this database cannot account for: of a workspace or an epoch that it does not know. They are shown, and an
-- operator ends them; no sweep does.
CREATE TABLE lifecycle.unaccounted_instance (
    instance_id  uuid        PRIMARY KEY,
    workspace_id uuid        NOT NULL, -- as the placement lists it: there may be no such workspace
    epoch        bigint      NOT NULL,
    state        text        NOT NULL CHECK (state IN ('live', 'ended')),
    placement    text        NOT NULL CHECK (placement IN ('static', 'process', 'docker')),
    provider_id  text        NOT NULL CHECK (provider_id <> ''),
    started_at   timestamptz,
    seen_at      timestamptz NOT NULL DEFAULT mesh.clock(),
    ended_at     timestamptz,
    end_reason   text        NOT NULL DEFAULT '',
    version      bigint      NOT NULL DEFAULT 1,
    UNIQUE (placement, workspace_id, epoch),
    CONSTRAINT ended_is_dated CHECK ((state = 'ended') = (ended_at IS NOT NULL))
);

-- Runs that stand still while rollback mode is set, and for how long they have stood still in all: their deadlines move on by it.
CREATE TABLE lifecycle.run_pause (
    run_id uuid        PRIMARY KEY,
    since  timestamptz,                           -- NULL: it goes on
    total  interval    NOT NULL DEFAULT '0'
);
CREATE INDEX run_pause_open ON lifecycle.run_pause (run_id) WHERE since IS NOT NULL;

-- Where the launch log of a placement stood when it was last compared with this database. A log that is another one, or shorter, is older than the
-- database; what the log has and the database has not means that the database is.
CREATE TABLE lifecycle.launch_log (
    placement    text        PRIMARY KEY CHECK (placement <> ''),
    log_id       uuid        NOT NULL,
    seq          bigint      NOT NULL,           -- the number of the last line that was seen
    era          bigint      NOT NULL,           -- of the database then: a later one means that a restore was declared or accepted since
    reported     boolean     NOT NULL DEFAULT false, -- differences were reported, and are accepted when rollback mode ends
    accepted_seq bigint      NOT NULL DEFAULT 0, -- what differs up to this line is known
    accepted_at  timestamptz                     -- what differs in rows up to this moment is known
);

-- +goose Down
DROP TABLE lifecycle.launch_log;
DROP TABLE lifecycle.run_pause;
DROP TABLE lifecycle.unaccounted_instance;
