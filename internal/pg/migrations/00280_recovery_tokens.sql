-- +goose Up

-- Recovery tokens. The text is stored nowhere: it is signed anew from the row. A token counts from the first session
-- that is ready on the certificate that came with it; until then those before it may be used as well.
CREATE TABLE recovery.recovery_token (
    token_id         uuid        PRIMARY KEY,
    node_id          uuid        NOT NULL REFERENCES recovery.identity ON DELETE CASCADE,
    node_instance_id uuid        NOT NULL,
    family           uuid        NOT NULL, -- the same for all that follow from one enrolment of an operator or of a launch
    profile          text        NOT NULL,
    key_sha256       bytea       NOT NULL CHECK (octet_length(key_sha256) = 32), -- of the node's recovery key
    key_id           text        NOT NULL, -- of the key that signs it
    era              bigint      NOT NULL,
    state            text        NOT NULL CHECK (state IN ('issued', 'used', 'revoked', 'expired')),
    state_at         timestamptz NOT NULL DEFAULT mesh.clock(),
    ended_by         text        NOT NULL DEFAULT '' CHECK (ended_by IN ('', 'replaced', 'reuse', 'operator', 'enrolled', 'retired')),
    issued_at        timestamptz NOT NULL DEFAULT mesh.clock(),
    serial           text        NOT NULL, -- of the certificate that came with it
    counted_since    timestamptz,          -- null: no session was ready on that certificate yet
    used_key_sha256  bytea       CHECK (octet_length(used_key_sha256) = 32),
    used_serial      text        NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX recovery_token_serial ON recovery.recovery_token (serial);
CREATE INDEX recovery_token_node ON recovery.recovery_token (node_id, token_id);

-- How often a node has recovered within the hour is counted from its enrolments.
ALTER TABLE recovery.enrollment ADD COLUMN recovery_token_id uuid;
CREATE INDEX enrollment_by_recovery_token ON recovery.enrollment (node_id, started_at) WHERE recovery_token_id IS NOT NULL;

-- Times in which we issued nothing. They do not age a recovery token.
CREATE TABLE recovery.issuance_stop (
    stop_id  uuid        PRIMARY KEY,
    reason   text        NOT NULL,
    from_at  timestamptz NOT NULL,
    until_at timestamptz CHECK (until_at >= from_at) -- null: it lasts
);
CREATE UNIQUE INDEX issuance_stop_lasting ON recovery.issuance_stop (reason) WHERE until_at IS NULL;
CREATE UNIQUE INDEX issuance_stop_until ON recovery.issuance_stop (until_at, reason);

-- Decisions to accept the tokens of a profile until a time, however old they are. The newest of a profile counts.
CREATE TABLE recovery.token_extension (
    extension_id uuid        PRIMARY KEY,
    profile      text        NOT NULL,
    until_at     timestamptz NOT NULL,
    reason       text        NOT NULL,
    decided_by   text        NOT NULL,
    decided_at   timestamptz NOT NULL DEFAULT mesh.clock()
);
CREATE INDEX token_extension_profile ON recovery.token_extension (profile, decided_at);

-- When attempts of a node with one outcome were last reported.
CREATE TABLE recovery.enrollment_attempt (
    node_id     uuid        NOT NULL REFERENCES recovery.identity ON DELETE CASCADE,
    outcome     text        NOT NULL,
    reported_at timestamptz NOT NULL,
    version     bigint      NOT NULL,
    PRIMARY KEY (node_id, outcome)
);

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_recovery_tokens(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.token_id AS id FROM recovery.recovery_token t
        WHERE t.token_id > lowest AND t.token_id < mesh.first_id(until) ORDER BY t.token_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.recovery_token t WHERE t.token_id = ANY (seen) AND t.state <> 'issued' AND t.state_at < until
        RETURNING t.token_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_issuance_stops(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.stop_id AS id FROM recovery.issuance_stop t
        WHERE t.stop_id > lowest AND t.stop_id < mesh.first_id(until) ORDER BY t.stop_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.issuance_stop t WHERE t.stop_id = ANY (seen) AND t.until_at < until
        RETURNING t.stop_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_token_extensions(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.extension_id AS id FROM recovery.token_extension t
        WHERE t.extension_id > lowest AND t.extension_id < mesh.first_id(until) ORDER BY t.extension_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.token_extension t WHERE t.extension_id = ANY (seen) AND t.until_at < until
        RETURNING t.extension_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION recovery.cut_recovery_tokens(interval, uuid, integer), recovery.cut_issuance_stops(interval, uuid, integer),
    recovery.cut_token_extensions(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION recovery.cut_recovery_tokens(interval, uuid, integer), recovery.cut_issuance_stops(interval, uuid, integer),
    recovery.cut_token_extensions(interval, uuid, integer) TO recovery;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
ALTER FUNCTION recovery.cut_recovery_tokens(interval, uuid, integer) OWNER TO mesh_retention;
ALTER FUNCTION recovery.cut_issuance_stops(interval, uuid, integer) OWNER TO mesh_retention;
ALTER FUNCTION recovery.cut_token_extensions(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;
GRANT SELECT, DELETE ON recovery.recovery_token, recovery.issuance_stop, recovery.token_extension TO mesh_retention;

-- +goose Down
DROP FUNCTION recovery.cut_token_extensions(interval, uuid, integer);
DROP FUNCTION recovery.cut_issuance_stops(interval, uuid, integer);
DROP FUNCTION recovery.cut_recovery_tokens(interval, uuid, integer);
DROP TABLE recovery.enrollment_attempt;
DROP TABLE recovery.token_extension;
DROP TABLE recovery.issuance_stop;
ALTER TABLE recovery.enrollment DROP COLUMN recovery_token_id;
DROP TABLE recovery.recovery_token;
