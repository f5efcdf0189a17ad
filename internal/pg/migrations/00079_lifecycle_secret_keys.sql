-- +goose Up

-- Under which keys a row's environment values and digest are: the ids of the keys, in order, with commas; ! stands for a value or a digest that is under
-- none; empty if there is nothing that needs a key. A sealed value begins with one byte of version and eight of its key's id, so with twelve digits of base64.
-- +goose StatementBegin
CREATE FUNCTION lifecycle.secret_keys(spec jsonb, digest text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(string_agg(DISTINCT x.k, ',' ORDER BY x.k), '') COLLATE "C" FROM (
        SELECT CASE WHEN v.one #>> '{}' ~ '^[A-Za-z0-9+/]{12}' THEN encode(substr(decode(left(v.one #>> '{}', 12), 'base64'), 2), 'hex') ELSE '!' END AS k
            FROM jsonb_path_query(spec, '$.workloads[*].sealed_env.*') AS v (one)
        UNION ALL SELECT '!' WHERE jsonb_path_exists(spec, '$.workloads[*].env.*') OR digest ~ '^[0-9a-f]{64}$'
        UNION ALL SELECT split_part(digest, '.', 2) WHERE starts_with(digest, 'hmac-sha256.')) AS x
$$;
-- +goose StatementEnd
GRANT EXECUTE ON FUNCTION lifecycle.secret_keys(jsonb, text) TO lifecycle;

CREATE INDEX workspace_secret_keys ON lifecycle.workspace ((lifecycle.secret_keys(spec, spec_digest)) COLLATE "C", id)
    WHERE lifecycle.secret_keys(spec, spec_digest) <> '';
CREATE INDEX run_secret_keys ON lifecycle.saga_run ((lifecycle.secret_keys(input->'spec', '')) COLLATE "C", id)
    WHERE lifecycle.secret_keys(input->'spec', '') <> '';
CREATE INDEX operation_key_bare ON lifecycle.operation_key (tenant_id, key) WHERE digest ~ '/[0-9a-f]{64}$';

-- The same of a queued deploy, whose payload Postgres cannot read. NULL: by a build that did not say; it is looked at.
ALTER TABLE lifecycle.task ADD COLUMN secret_keys text;
CREATE INDEX task_secret_keys ON lifecycle.task ((coalesce(secret_keys, '!')) COLLATE "C", task_id)
    WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '';

-- What needs which keys.
CREATE VIEW lifecycle.secret_key_use AS
    SELECT 'workspaces' AS what, lifecycle.secret_keys(spec, spec_digest) AS keys, count(*) AS n FROM lifecycle.workspace
        WHERE lifecycle.secret_keys(spec, spec_digest) <> '' GROUP BY 2
    UNION ALL SELECT 'runs', lifecycle.secret_keys(input->'spec', ''), count(*) FROM lifecycle.saga_run
        WHERE lifecycle.secret_keys(input->'spec', '') <> '' GROUP BY 2
    UNION ALL SELECT 'tasks', coalesce(secret_keys, '!'), count(*) FROM lifecycle.task
        WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '' GROUP BY 2
    UNION ALL SELECT 'idempotency keys', lifecycle.secret_keys(NULL, split_part(digest, '/', 2)), count(*) FROM lifecycle.operation_key GROUP BY 2;
GRANT SELECT ON lifecycle.secret_key_use TO lifecycle;

-- +goose Down
DROP VIEW lifecycle.secret_key_use;
DROP INDEX lifecycle.task_secret_keys, lifecycle.operation_key_bare, lifecycle.run_secret_keys, lifecycle.workspace_secret_keys;
ALTER TABLE lifecycle.task DROP COLUMN secret_keys;
DROP FUNCTION lifecycle.secret_keys(jsonb, text);
