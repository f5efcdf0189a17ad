-- +goose Up

-- What repeats (refusals, joins) has one audit entry when it begins, one a window while it lasts and one when it is over. The counts between stand
-- here, in the schema of the service that refuses: they are notes of the writer, the entries are the events.

CREATE TABLE lifecycle.audit_window (
    key        text        PRIMARY KEY CHECK (key <> ''), -- of actor, action, subject and reason
    settles    text        NOT NULL,                      -- of actor, action and subject: what goes through ends every reason
    entry      jsonb       NOT NULL,
    count      bigint      NOT NULL CHECK (count > 0),
    told       bigint      NOT NULL CHECK (told <= count), -- how many the last entry spoke of
    first_at   timestamptz NOT NULL DEFAULT mesh.clock(),
    last_at    timestamptz NOT NULL DEFAULT mesh.clock(),
    told_at    timestamptz NOT NULL DEFAULT mesh.clock()
) WITH (fillfactor = 70);
CREATE INDEX audit_window_settles ON lifecycle.audit_window (settles);
CREATE INDEX audit_window_told ON lifecycle.audit_window (told_at);

CREATE TABLE recovery.audit_window (LIKE lifecycle.audit_window INCLUDING ALL) WITH (fillfactor = 70);
CREATE TABLE nodeapi.audit_window (LIKE lifecycle.audit_window INCLUDING ALL) WITH (fillfactor = 70);
CREATE TABLE readmodel.audit_window (LIKE lifecycle.audit_window INCLUDING ALL) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE readmodel.audit_window;
DROP TABLE nodeapi.audit_window;
DROP TABLE recovery.audit_window;
DROP TABLE lifecycle.audit_window;
