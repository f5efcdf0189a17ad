-- +goose Up

-- The mesh schema exists already: the version table stands in it.

-- The era of this database. It is raised by one after a restore from a backup, so that every number drawn from then on
-- is above every number the lost timeline may have handed out.
CREATE TABLE mesh.era (
    singleton boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    era       bigint      NOT NULL DEFAULT 0 CHECK (era BETWEEN 0 AND 4194303),
    raised_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    raised_by text        NOT NULL DEFAULT current_user,
    reason    text        NOT NULL DEFAULT ''
);
INSERT INTO mesh.era (reason) VALUES ('new mesh');

-- +goose StatementBegin
CREATE FUNCTION mesh.era_only_rises() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        RAISE EXCEPTION 'the era cannot be deleted' USING ERRCODE = 'check_violation';
    ELSIF NEW.era <= OLD.era THEN
        RAISE EXCEPTION 'the era only rises: % is not above %', NEW.era, OLD.era USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
CREATE TRIGGER era_only_rises BEFORE UPDATE OR DELETE ON mesh.era FOR EACH ROW EXECUTE FUNCTION mesh.era_only_rises();

-- The one clock that decides leases, expiry and fences. It moves within a transaction (clock_timestamp, not now): a
-- statement that waited for a lock judges by the time it got it.
--
-- STABLE is a deliberate untruth. A volatile function cannot be an index condition, so `next_at <= mesh.clock()` would
-- scan the whole table; as STABLE it is read once at the start of an index scan and per row elsewhere. Each statement
-- still sees a fresh value. plpgsql, because an SQL function whose body is more volatile than its label is not inlined
-- and is several times dearer to call.
-- +goose StatementBegin
CREATE FUNCTION mesh.clock() RETURNS timestamptz LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN pg_catalog.clock_timestamp();
END $$;
-- +goose StatementEnd

-- The successor of an epoch, generation, fence, op_seq or position.
-- +goose StatementBegin
CREATE FUNCTION mesh.next(n bigint) RETURNS bigint LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN GREATEST(n + 1, (SELECT e.era << 40 FROM mesh.era e));
END $$;
-- +goose StatementEnd

-- Policy keys that differ from their default. The keys, defaults and refusals are data of the binary.
CREATE TABLE mesh.policy (
    key        text        PRIMARY KEY CHECK (key <> ''),
    value      text        NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT mesh.clock(),
    updated_by text        NOT NULL,
    reason     text        NOT NULL DEFAULT ''
);

GRANT USAGE ON SCHEMA mesh TO nodeapi, lifecycle, recovery, readmodel, sequencer;
GRANT SELECT ON mesh.era TO nodeapi, lifecycle, recovery, readmodel, sequencer;
GRANT SELECT ON mesh.goose_db_version TO nodeapi, lifecycle, recovery, readmodel, sequencer;
GRANT SELECT ON mesh.policy TO nodeapi, lifecycle, recovery, readmodel;
GRANT INSERT, UPDATE ON mesh.policy TO recovery;

-- One schema a service. What the owner makes in it later is usable by its own role and by nobody else.
CREATE SCHEMA nodeapi;
CREATE SCHEMA lifecycle;
CREATE SCHEMA recovery;
CREATE SCHEMA readmodel;

GRANT USAGE ON SCHEMA nodeapi TO nodeapi;
GRANT USAGE ON SCHEMA lifecycle TO lifecycle;
GRANT USAGE ON SCHEMA recovery TO recovery;
GRANT USAGE ON SCHEMA readmodel TO readmodel;

ALTER DEFAULT PRIVILEGES IN SCHEMA nodeapi GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO nodeapi;
ALTER DEFAULT PRIVILEGES IN SCHEMA lifecycle GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO lifecycle;
ALTER DEFAULT PRIVILEGES IN SCHEMA recovery GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO recovery;
ALTER DEFAULT PRIVILEGES IN SCHEMA readmodel GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO readmodel;

ALTER DEFAULT PRIVILEGES IN SCHEMA nodeapi GRANT USAGE, SELECT ON SEQUENCES TO nodeapi;
ALTER DEFAULT PRIVILEGES IN SCHEMA lifecycle GRANT USAGE, SELECT ON SEQUENCES TO lifecycle;
ALTER DEFAULT PRIVILEGES IN SCHEMA recovery GRANT USAGE, SELECT ON SEQUENCES TO recovery;
ALTER DEFAULT PRIVILEGES IN SCHEMA readmodel GRANT USAGE, SELECT ON SEQUENCES TO readmodel;

-- +goose Down
DROP SCHEMA readmodel CASCADE;
DROP SCHEMA recovery CASCADE;
DROP SCHEMA lifecycle CASCADE;
DROP SCHEMA nodeapi CASCADE;
DROP TABLE mesh.policy;
DROP FUNCTION mesh.next(bigint);
DROP FUNCTION mesh.clock();
DROP TABLE mesh.era;
DROP FUNCTION mesh.era_only_rises();
