-- +goose Up

-- Signed states of the audit log: all rows up to number had this hash at that time. The rows of the log are cut only up to one of them, and the last one
-- that they were cut up to stays, as the anchor of the chain.
CREATE TABLE readmodel.audit_checkpoint (
    number    bigint      PRIMARY KEY CHECK (number > 0),
    pos       bigint      NOT NULL,                                      -- of the event of that row
    hash      bytea       NOT NULL CHECK (octet_length(hash) = 32),      -- of that row
    at        timestamptz NOT NULL,
    key_id    text        NOT NULL CHECK (key_id <> ''),                 -- of the assertion key that signed
    signature bytea       NOT NULL CHECK (octet_length(signature) = 64)
);
-- A checkpoint is signed anew when a key follows another; what it says stays.
REVOKE UPDATE, DELETE, TRUNCATE ON readmodel.audit_checkpoint FROM readmodel;
GRANT SELECT, INSERT ON readmodel.audit_checkpoint TO readmodel;
GRANT UPDATE (key_id, signature) ON readmodel.audit_checkpoint TO readmodel;

-- What a checkpoint says is what stands, and when it was made no caller says: rows are cut by it.
-- +goose StatementBegin
CREATE FUNCTION readmodel.check_checkpoint() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.at NOT BETWEEN mesh.clock() - interval '1 minute' AND mesh.clock() + interval '1 minute' THEN
        RAISE EXCEPTION 'a checkpoint is of now, not of %', NEW.at USING ERRCODE = 'check_violation';
    END IF;
    IF NOT EXISTS (SELECT FROM readmodel.audit a WHERE a.number = NEW.number AND a.pos = NEW.pos AND a.hash = NEW.hash) THEN
        RAISE EXCEPTION 'the audit log has no such row %', NEW.number USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
CREATE TRIGGER check_checkpoint BEFORE INSERT ON readmodel.audit_checkpoint FOR EACH ROW EXECUTE FUNCTION readmodel.check_checkpoint();

-- Rows up to the newest checkpoint that is older than the term; whatever the caller says, not before that of the policy. Of the checkpoints before it
-- none is needed; of those after it that are older than a day, the last of each day.
-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_audit(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until  timestamptz := mesh.clock() - greatest(term, make_interval(secs => coalesce((
        SELECT p.value::float8 FROM mesh.policy p WHERE p.key = 'retention.audit_seconds'), 34560000)));
    anchor bigint;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT max(c.number) INTO anchor FROM readmodel.audit_checkpoint c WHERE c.at < until;
    WITH over AS (
        SELECT a.number FROM readmodel.audit a WHERE a.number <= anchor ORDER BY a.number LIMIT most
    ), gone AS (
        DELETE FROM readmodel.audit a USING over o WHERE a.number = o.number RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    IF cut = most THEN
        next := lowest;
        RETURN;
    END IF;
    DELETE FROM readmodel.audit_checkpoint c WHERE c.number < anchor;
    DELETE FROM readmodel.audit_checkpoint c WHERE c.at < mesh.clock() - interval '1 day' AND c.number IS DISTINCT FROM anchor
        AND EXISTS (SELECT FROM readmodel.audit_checkpoint l WHERE l.number > c.number AND l.at::date = c.at::date);
END $$;
-- +goose StatementEnd

GRANT SELECT, DELETE ON readmodel.audit, readmodel.audit_checkpoint TO mesh_retention;
GRANT CREATE ON SCHEMA readmodel TO mesh_retention;
REVOKE ALL ON FUNCTION readmodel.cut_audit(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION readmodel.cut_audit(interval, uuid, integer) TO readmodel;
ALTER FUNCTION readmodel.cut_audit(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA readmodel FROM mesh_retention;

-- +goose Down
DROP FUNCTION readmodel.cut_audit(interval, uuid, integer);
REVOKE ALL ON readmodel.audit FROM mesh_retention;
DROP TABLE readmodel.audit_checkpoint;
DROP FUNCTION readmodel.check_checkpoint();
