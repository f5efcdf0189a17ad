-- +goose Up

-- The issuers of services' certificates are a kind of the set: public_key is the certificate of a root, endorsement the cross certificate by the root
-- before it. Lifecycle decides about them, since it knows what agents hold.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mesh.signing_key_owner(kind text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'join_state' THEN 'recovery' WHEN 'task_signing' THEN 'lifecycle' WHEN 'assertion' THEN 'readmodel'
        WHEN 'services' THEN 'lifecycle' END
$$;
-- +goose StatementEnd
ALTER TABLE mesh.signing_key
    DROP CONSTRAINT signing_key_kind_check, DROP CONSTRAINT signing_key_public_key_check,
    ADD CONSTRAINT signing_key_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services')),
    ADD CONSTRAINT signing_key_public_key_check CHECK (
        CASE kind WHEN 'services' THEN octet_length(public_key) BETWEEN 1 AND 16384 ELSE octet_length(public_key) = 32 END);
ALTER TABLE mesh.key_rotation
    DROP CONSTRAINT key_rotation_kind_check,
    ADD CONSTRAINT key_rotation_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion', 'services'));

-- +goose Down
DELETE FROM mesh.key_rotation WHERE kind = 'services';
DELETE FROM mesh.signing_key WHERE kind = 'services';
ALTER TABLE mesh.key_rotation
    DROP CONSTRAINT key_rotation_kind_check,
    ADD CONSTRAINT key_rotation_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion'));
ALTER TABLE mesh.signing_key
    DROP CONSTRAINT signing_key_kind_check, DROP CONSTRAINT signing_key_public_key_check,
    ADD CONSTRAINT signing_key_kind_check CHECK (kind IN ('join_state', 'task_signing', 'assertion')),
    ADD CONSTRAINT signing_key_public_key_check CHECK (octet_length(public_key) = 32);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mesh.signing_key_owner(kind text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'join_state' THEN 'recovery' WHEN 'task_signing' THEN 'lifecycle' WHEN 'assertion' THEN 'readmodel' END
$$;
-- +goose StatementEnd
