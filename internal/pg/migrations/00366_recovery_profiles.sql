-- +goose Up

-- The contents of profiles, each under a number of its name. A row never changes but in its phase.
CREATE TABLE recovery.profile (
    profile_id         uuid        PRIMARY KEY,
    name               text        NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    number             bigint      NOT NULL CHECK (number > 0),
    fingerprint        text        NOT NULL, -- of name, endpoints and both bundles
    api_url            text        NOT NULL,
    recovery_url       text        NOT NULL,
    terminal_url       text        NOT NULL,
    ca_bundle          bytea       NOT NULL, -- PEM; trusts the node API
    recovery_ca_bundle bytea       NOT NULL, -- PEM; trusts the enrolment listener
    phase              text        NOT NULL CHECK (phase IN ('announced', 'active', 'retiring', 'retired')),
    phase_at           timestamptz NOT NULL DEFAULT mesh.clock(),
    phase_by           text        NOT NULL,
    phase_reason       text        NOT NULL,
    created_at         timestamptz NOT NULL DEFAULT mesh.clock(),
    version            bigint      NOT NULL DEFAULT 1,
    UNIQUE (name, number)
);
CREATE UNIQUE INDEX profile_fingerprint ON recovery.profile (fingerprint);
CREATE UNIQUE INDEX profile_active ON recovery.profile (name) WHERE phase = 'active';
CREATE UNIQUE INDEX profile_announced ON recovery.profile (name) WHERE phase = 'announced';

-- What is remembered of each name: the numbers that were given, and what the configuration last said, so that a replica
-- that starts with the same configuration takes back nothing that a person has decided.
CREATE TABLE recovery.profile_name (
    name       text   PRIMARY KEY,
    newest     bigint NOT NULL DEFAULT 0,
    configured text   NOT NULL DEFAULT '' -- fingerprint; empty: no replica is configured with this name
);

-- One row, locked by each change of profiles. Replicas read the rows again when the revision has changed.
CREATE TABLE recovery.profile_head (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    revision bigint  NOT NULL DEFAULT 0
);
INSERT INTO recovery.profile_head DEFAULT VALUES;
-- Of the head there is one row, and names are never forgotten: a number is given once.
REVOKE INSERT, DELETE ON recovery.profile_head FROM recovery;
REVOKE DELETE ON recovery.profile_name, recovery.profile FROM recovery;

-- The profile of each node, by name. Empty: the default.
ALTER TABLE recovery.identity ADD COLUMN profile text NOT NULL DEFAULT '';

-- Which profile the newest session of a node reported, which is the agent's word. It goes with the node's judgement.
CREATE TABLE recovery.node_profile (
    node_id     uuid        PRIMARY KEY REFERENCES recovery.judgement ON DELETE CASCADE,
    name        text        NOT NULL, -- empty: the agent's build tells none
    fingerprint text        NOT NULL,
    reported_at timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX node_profile_reported ON recovery.node_profile (fingerprint, node_id);

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_profiles(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.profile_id AS id FROM recovery.profile t
        WHERE t.profile_id > lowest AND t.profile_id < mesh.first_id(until) ORDER BY t.profile_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.profile t WHERE t.profile_id = ANY (seen) AND t.phase = 'retired' AND t.phase_at < until
            AND NOT EXISTS (SELECT FROM recovery.node_profile n WHERE n.fingerprint = t.fingerprint)
        RETURNING t.profile_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION recovery.cut_profiles(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION recovery.cut_profiles(interval, uuid, integer) TO recovery;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
ALTER FUNCTION recovery.cut_profiles(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;
GRANT SELECT, DELETE ON recovery.profile TO mesh_retention;
GRANT SELECT ON recovery.node_profile TO mesh_retention;

-- +goose Down
DROP FUNCTION recovery.cut_profiles(interval, uuid, integer);
DROP TABLE recovery.node_profile;
ALTER TABLE recovery.identity DROP COLUMN profile;
DROP TABLE recovery.profile_head;
DROP TABLE recovery.profile_name;
DROP TABLE recovery.profile;
