-- +goose Up

-- Two functions that nearly every write of a saga calls. In SQL a function that cannot be inlined is read and planned anew by each statement that calls it; in
-- plpgsql once a session. What they return is the same, so that the indexes on secret_keys stay as they are.

-- Most rows hold nothing that needs a key, and are told by two looks at their spec.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.secret_keys(spec jsonb, digest text) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF (jsonb_path_exists(spec, '$.workloads[*].sealed_env.*') OR jsonb_path_exists(spec, '$.workloads[*].env.*')) IS NOT TRUE THEN
        RETURN CASE WHEN digest ~ '^[0-9a-f]{64}$' THEN '!' WHEN starts_with(digest, 'hmac-sha256.') THEN split_part(digest, '.', 2) ELSE '' END;
    END IF;
    RETURN (SELECT coalesce(string_agg(DISTINCT x.k, ',' ORDER BY x.k), '') COLLATE "C" FROM (
        SELECT CASE WHEN v.one #>> '{}' ~ '^[A-Za-z0-9+/]{12}' THEN encode(substr(decode(left(v.one #>> '{}', 12), 'base64'), 2), 'hex') ELSE '!' END AS k
            FROM jsonb_path_query(spec, '$.workloads[*].sealed_env.*') AS v (one)
        UNION ALL SELECT '!' WHERE jsonb_path_exists(spec, '$.workloads[*].env.*') OR digest ~ '^[0-9a-f]{64}$'
        UNION ALL SELECT split_part(digest, '.', 2) WHERE starts_with(digest, 'hmac-sha256.')) AS x);
END $$;

CREATE OR REPLACE FUNCTION mesh.rolled_back() RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM recovery.rollback WHERE state = 'active');
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.secret_keys(spec jsonb, digest text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(string_agg(DISTINCT x.k, ',' ORDER BY x.k), '') COLLATE "C" FROM (
        SELECT CASE WHEN v.one #>> '{}' ~ '^[A-Za-z0-9+/]{12}' THEN encode(substr(decode(left(v.one #>> '{}', 12), 'base64'), 2), 'hex') ELSE '!' END AS k
            FROM jsonb_path_query(spec, '$.workloads[*].sealed_env.*') AS v (one)
        UNION ALL SELECT '!' WHERE jsonb_path_exists(spec, '$.workloads[*].env.*') OR digest ~ '^[0-9a-f]{64}$'
        UNION ALL SELECT split_part(digest, '.', 2) WHERE starts_with(digest, 'hmac-sha256.')) AS x
$$;

CREATE OR REPLACE FUNCTION mesh.rolled_back() RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM recovery.rollback WHERE state = 'active')
$$;
-- +goose StatementEnd
