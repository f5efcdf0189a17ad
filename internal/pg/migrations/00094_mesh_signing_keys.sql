-- +goose Up

-- Who signs with the keys of a kind, and so decides about them.
-- +goose StatementBegin
CREATE FUNCTION mesh.signing_key_owner(kind text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'join_state' THEN 'recovery' WHEN 'task_signing' THEN 'lifecycle' WHEN 'assertion' THEN 'readmodel' END
$$;
-- +goose StatementEnd

-- The keys by which services sign for one another and for agents: their public halves. Private keys stand in the directories of the service
-- that signs, and nowhere else. A key but the first of its kind is endorsed by a signature of an earlier one, so that a row alone is trusted by
-- none who was not given a key of the chain in a file.
CREATE TABLE mesh.signing_key (
    kind        text        NOT NULL CHECK (kind IN ('join_state', 'task_signing', 'assertion')),
    key_id      text        NOT NULL UNIQUE CHECK (key_id <> ''), -- no key serves two kinds
    public_key  bytea       NOT NULL CHECK (octet_length(public_key) = 32),
    state       text        NOT NULL CHECK (state IN ('verify_only', 'signing', 'verifying_after', 'retired')),
    file        text        NOT NULL, -- the name in the directory of those who sign
    endorsed_by text        NOT NULL DEFAULT '',
    endorsement bytea       NOT NULL DEFAULT '',
    made_by     text        NOT NULL, -- the replica
    made_at     timestamptz NOT NULL,
    state_at    timestamptz NOT NULL,
    needed_by   text        NOT NULL DEFAULT '', -- what keeps it from its next state
    PRIMARY KEY (kind, key_id)
);
CREATE UNIQUE INDEX signing_key_signs ON mesh.signing_key (kind) WHERE state = 'signing';
CREATE UNIQUE INDEX signing_key_next ON mesh.signing_key (kind) WHERE state = 'verify_only';

-- What people asked for: a new key of a kind. The owner of the kind makes it and writes its name.
CREATE TABLE mesh.key_rotation (
    rotation_id     uuid        PRIMARY KEY,
    kind            text        NOT NULL CHECK (kind IN ('join_state', 'task_signing', 'assertion')),
    idempotency_key text        NOT NULL UNIQUE,
    requested_by    text        NOT NULL,
    reason          text        NOT NULL,
    requested_at    timestamptz NOT NULL,
    key_id          text        NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX key_rotation_open ON mesh.key_rotation (kind) WHERE key_id = '';

-- Which keys each replica holds. takes and holds are words such as sign:join_state and verify:join_state:0123456789abcdef.
CREATE TABLE mesh.key_replica (
    service    text        NOT NULL,
    replica_id text        NOT NULL,
    takes      text[]      NOT NULL,
    holds      text[]      NOT NULL,
    problems   text[]      NOT NULL,
    seen_at    timestamptz NOT NULL,
    PRIMARY KEY (service, replica_id)
) WITH (fillfactor = 50);

GRANT SELECT ON mesh.signing_key, mesh.key_rotation, mesh.key_replica TO nodeapi, lifecycle, recovery, readmodel;
GRANT INSERT ON mesh.signing_key TO lifecycle, recovery, readmodel;
GRANT UPDATE (state, state_at, needed_by) ON mesh.signing_key TO lifecycle, recovery, readmodel;
GRANT INSERT ON mesh.key_rotation TO recovery;
GRANT UPDATE (key_id) ON mesh.key_rotation TO lifecycle, recovery, readmodel;
GRANT INSERT, UPDATE, DELETE ON mesh.key_replica TO nodeapi, lifecycle, recovery, readmodel;

ALTER TABLE mesh.signing_key ENABLE ROW LEVEL SECURITY;
ALTER TABLE mesh.key_rotation ENABLE ROW LEVEL SECURITY;
ALTER TABLE mesh.key_replica ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON mesh.signing_key FOR SELECT USING (true);
CREATE POLICY own_kind ON mesh.signing_key FOR INSERT WITH CHECK (mesh.signing_key_owner(kind) = current_user::text);
CREATE POLICY own_change ON mesh.signing_key FOR UPDATE USING (mesh.signing_key_owner(kind) = current_user::text);
CREATE POLICY readable ON mesh.key_rotation FOR SELECT USING (true);
CREATE POLICY requests ON mesh.key_rotation FOR INSERT TO recovery WITH CHECK (true);
CREATE POLICY own_change ON mesh.key_rotation FOR UPDATE USING (mesh.signing_key_owner(kind) = current_user::text);
CREATE POLICY readable ON mesh.key_replica FOR SELECT USING (true);
CREATE POLICY own_row ON mesh.key_replica FOR INSERT WITH CHECK (service = current_user::text);
CREATE POLICY own_change ON mesh.key_replica FOR UPDATE USING (service = current_user::text);
CREATE POLICY own_end ON mesh.key_replica FOR DELETE USING (service = current_user::text);

-- Which keys have signed the join states that a node may hold: those issued since the last that it confirmed, the newest last. Empty for what
-- was issued before the set of keys was kept.
ALTER TABLE recovery.identity ADD COLUMN join_keys text[] NOT NULL DEFAULT '{}';
-- The key that signed the session's join state: asked again, the same bytes are the answer.
ALTER TABLE recovery.session_open ADD COLUMN key_id text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE recovery.session_open DROP COLUMN key_id;
ALTER TABLE recovery.identity DROP COLUMN join_keys;
DROP TABLE mesh.key_replica, mesh.key_rotation, mesh.signing_key;
DROP FUNCTION mesh.signing_key_owner(text);
