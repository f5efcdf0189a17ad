-- +goose Up

-- The keys of recovery tokens are a kind of the set. The first of them stands for the provisioner's key of the node authority, which signs the
-- tokens until another key follows.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mesh.signing_key_owner(kind text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'join_state' THEN 'recovery' WHEN 'task_signing' THEN 'lifecycle' WHEN 'assertion' THEN 'readmodel'
        WHEN 'services' THEN 'lifecycle' WHEN 'recovery_token' THEN 'recovery' END
$$;
-- +goose StatementEnd
ALTER TABLE mesh.signing_key
    DROP CONSTRAINT signing_key_kind_check,
    ADD CONSTRAINT signing_key_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services', 'recovery_token'));
ALTER TABLE mesh.key_rotation
    DROP CONSTRAINT key_rotation_kind_check,
    ADD CONSTRAINT key_rotation_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services', 'recovery_token'));

-- Which tokens a key has signed that may still be used.
CREATE INDEX recovery_token_key ON recovery.recovery_token (key_id, state) WHERE state IN ('issued', 'used');

-- +goose Down
DROP INDEX recovery.recovery_token_key;
DELETE FROM mesh.key_rotation WHERE kind = 'recovery_token';
DELETE FROM mesh.signing_key WHERE kind = 'recovery_token';
ALTER TABLE mesh.key_rotation
    DROP CONSTRAINT key_rotation_kind_check,
    ADD CONSTRAINT key_rotation_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services'));
ALTER TABLE mesh.signing_key
    DROP CONSTRAINT signing_key_kind_check,
    ADD CONSTRAINT signing_key_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services'));
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mesh.signing_key_owner(kind text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'join_state' THEN 'recovery' WHEN 'task_signing' THEN 'lifecycle' WHEN 'assertion' THEN 'readmodel'
        WHEN 'services' THEN 'lifecycle' END
$$;
-- +goose StatementEnd
