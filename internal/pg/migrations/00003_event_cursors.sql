-- +goose Up

-- A consumer's place in the event log and the events it could not apply, in the schema of the service it belongs to:
-- the cursor moves in the transaction that applies.

CREATE TABLE nodeapi.event_cursor (
    name       text        PRIMARY KEY CHECK (name <> ''),
    pos        bigint      NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 50);
CREATE TABLE nodeapi.parked_event (
    consumer  text        NOT NULL,
    pos       bigint      NOT NULL,
    event_id  uuid        NOT NULL,
    kind      text        NOT NULL,
    error     text        NOT NULL,
    attempts  integer     NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT mesh.clock(),
    PRIMARY KEY (consumer, pos)
);

CREATE TABLE lifecycle.event_cursor (
    name       text        PRIMARY KEY CHECK (name <> ''),
    pos        bigint      NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 50);
CREATE TABLE lifecycle.parked_event (
    consumer  text        NOT NULL,
    pos       bigint      NOT NULL,
    event_id  uuid        NOT NULL,
    kind      text        NOT NULL,
    error     text        NOT NULL,
    attempts  integer     NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT mesh.clock(),
    PRIMARY KEY (consumer, pos)
);

CREATE TABLE recovery.event_cursor (
    name       text        PRIMARY KEY CHECK (name <> ''),
    pos        bigint      NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 50);
CREATE TABLE recovery.parked_event (
    consumer  text        NOT NULL,
    pos       bigint      NOT NULL,
    event_id  uuid        NOT NULL,
    kind      text        NOT NULL,
    error     text        NOT NULL,
    attempts  integer     NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT mesh.clock(),
    PRIMARY KEY (consumer, pos)
);

CREATE TABLE readmodel.event_cursor (
    name       text        PRIMARY KEY CHECK (name <> ''),
    pos        bigint      NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 50);
CREATE TABLE readmodel.parked_event (
    consumer  text        NOT NULL,
    pos       bigint      NOT NULL,
    event_id  uuid        NOT NULL,
    kind      text        NOT NULL,
    error     text        NOT NULL,
    attempts  integer     NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT mesh.clock(),
    PRIMARY KEY (consumer, pos)
);

-- +goose Down
DROP TABLE nodeapi.parked_event;
DROP TABLE nodeapi.event_cursor;
DROP TABLE lifecycle.parked_event;
DROP TABLE lifecycle.event_cursor;
DROP TABLE recovery.parked_event;
DROP TABLE recovery.event_cursor;
DROP TABLE readmodel.parked_event;
DROP TABLE readmodel.event_cursor;
