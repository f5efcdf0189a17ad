-- +goose Up

-- Events carry their message as the bytes of protobuf instead of as JSON: two thirds of what a saga or a task wrote to the log of the database were
-- the JSON of their events. body_type is the full name of the message, '' of none. Rows of earlier builds stay as they are, in payload; so do the
-- entries of the audit log, to which the database itself adds counts, and whose chain hashes the JSON. Only the catalogue changes.
ALTER TABLE events.event ALTER COLUMN payload DROP NOT NULL, ADD COLUMN body bytea, ADD COLUMN body_type text;
GRANT INSERT (body, body_type) ON events.event TO nodeapi, lifecycle, recovery, readmodel;

-- A reader of an earlier build would take a body for an empty payload and set the event aside as one that cannot be applied. Its statement fails instead,
-- which it takes for an outage: it waits, and whatever replaces it reads on. It may go on to append. Readers of this build say that they read bodies.
-- +goose StatementBegin
CREATE FUNCTION events.refuse_reader() RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION 'this session does not read events whose body is protobuf' USING ERRCODE = 'feature_not_supported',
        HINT = 'Replace replicas of the earlier build. In a session of your own: SET events.format = ''protobuf''.';
END $$;
-- +goose StatementEnd

ALTER POLICY readable ON events.event TO nodeapi, lifecycle, recovery, readmodel
    USING (CASE WHEN body IS NULL THEN true WHEN current_setting('events.format', true) = 'protobuf' THEN true ELSE events.refuse_reader() END);
-- The sequencer reads none of it.
CREATE POLICY numberable ON events.event FOR SELECT TO sequencer USING (true);

-- +goose Down
DROP POLICY numberable ON events.event;
ALTER POLICY readable ON events.event TO nodeapi, lifecycle, recovery, readmodel, sequencer USING (true);
DROP FUNCTION events.refuse_reader();
-- It fails while there are events without JSON.
ALTER TABLE events.event ALTER COLUMN payload SET NOT NULL;
ALTER TABLE events.event DROP COLUMN body, DROP COLUMN body_type;
