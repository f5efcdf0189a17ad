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
CREATE INDEX operation_key_secret_keys ON lifecycle.operation_key ((lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C", tenant_id, key)
    WHERE lifecycle.secret_keys(NULL, split_part(digest, '/', 2)) <> '';
CREATE INDEX operation_key_bare ON lifecycle.operation_key (tenant_id, key) WHERE digest ~ '/[0-9a-f]{64}$';

-- The same of a queued deploy, whose payload Postgres cannot read. NULL: by a build that did not say; it is looked at.
ALTER TABLE lifecycle.task ADD COLUMN secret_keys text;
CREATE INDEX task_secret_keys ON lifecycle.task ((coalesce(secret_keys, '!')) COLLATE "C", task_id)
    WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '';

-- Which sets of keys there are. Each step reads one entry of an index, the first after the set before, so that the work grows with the sets and not with the
-- rows.
CREATE VIEW lifecycle.secret_key_set AS WITH RECURSIVE
    workspace_set (keys) AS (
        (SELECT (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" FROM lifecycle.workspace
            WHERE lifecycle.secret_keys(spec, spec_digest) <> '' ORDER BY (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" LIMIT 1)
        UNION ALL SELECT (SELECT (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" FROM lifecycle.workspace
            WHERE lifecycle.secret_keys(spec, spec_digest) <> '' AND (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" > s.keys
            ORDER BY (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" LIMIT 1) FROM workspace_set s WHERE s.keys IS NOT NULL),
    run_set (keys) AS (
        (SELECT (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" FROM lifecycle.saga_run
            WHERE lifecycle.secret_keys(input->'spec', '') <> '' ORDER BY (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" LIMIT 1)
        UNION ALL SELECT (SELECT (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" FROM lifecycle.saga_run
            WHERE lifecycle.secret_keys(input->'spec', '') <> '' AND (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" > s.keys
            ORDER BY (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" LIMIT 1) FROM run_set s WHERE s.keys IS NOT NULL),
    task_set (keys) AS (
        (SELECT (coalesce(secret_keys, '!')) COLLATE "C" FROM lifecycle.task
            WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '' ORDER BY (coalesce(secret_keys, '!')) COLLATE "C" LIMIT 1)
        UNION ALL SELECT (SELECT (coalesce(secret_keys, '!')) COLLATE "C" FROM lifecycle.task
            WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '' AND (coalesce(secret_keys, '!')) COLLATE "C" > s.keys
            ORDER BY (coalesce(secret_keys, '!')) COLLATE "C" LIMIT 1) FROM task_set s WHERE s.keys IS NOT NULL),
    operation_set (keys) AS (
        (SELECT (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" FROM lifecycle.operation_key
            WHERE lifecycle.secret_keys(NULL, split_part(digest, '/', 2)) <> ''
            ORDER BY (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" LIMIT 1)
        UNION ALL SELECT (SELECT (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" FROM lifecycle.operation_key
            WHERE lifecycle.secret_keys(NULL, split_part(digest, '/', 2)) <> ''
            AND (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" > s.keys
            ORDER BY (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" LIMIT 1) FROM operation_set s WHERE s.keys IS NOT NULL)
    SELECT 'workspaces' AS what, keys FROM workspace_set WHERE keys IS NOT NULL
    UNION ALL SELECT 'runs', keys FROM run_set WHERE keys IS NOT NULL
    UNION ALL SELECT 'tasks', keys FROM task_set WHERE keys IS NOT NULL
    UNION ALL SELECT 'idempotency keys', keys FROM operation_set WHERE keys IS NOT NULL;
GRANT SELECT ON lifecycle.secret_key_set TO lifecycle;

-- How many rows need which set of keys. It reads those rows, by the same indexes.
CREATE VIEW lifecycle.secret_key_use AS
    SELECT s.what, s.keys, (SELECT count(*) FROM lifecycle.workspace
        WHERE lifecycle.secret_keys(spec, spec_digest) <> '' AND (lifecycle.secret_keys(spec, spec_digest)) COLLATE "C" = s.keys) AS n
        FROM lifecycle.secret_key_set s WHERE s.what = 'workspaces'
    UNION ALL SELECT s.what, s.keys, (SELECT count(*) FROM lifecycle.saga_run
        WHERE lifecycle.secret_keys(input->'spec', '') <> '' AND (lifecycle.secret_keys(input->'spec', '')) COLLATE "C" = s.keys)
        FROM lifecycle.secret_key_set s WHERE s.what = 'runs'
    UNION ALL SELECT s.what, s.keys, (SELECT count(*) FROM lifecycle.task
        WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> '' AND (coalesce(secret_keys, '!')) COLLATE "C" = s.keys)
        FROM lifecycle.secret_key_set s WHERE s.what = 'tasks'
    UNION ALL SELECT s.what, s.keys, (SELECT count(*) FROM lifecycle.operation_key
        WHERE lifecycle.secret_keys(NULL, split_part(digest, '/', 2)) <> ''
            AND (lifecycle.secret_keys(NULL, split_part(digest, '/', 2))) COLLATE "C" = s.keys)
        FROM lifecycle.secret_key_set s WHERE s.what = 'idempotency keys';
GRANT SELECT ON lifecycle.secret_key_use TO lifecycle;

-- +goose Down
DROP VIEW lifecycle.secret_key_use, lifecycle.secret_key_set;
DROP INDEX lifecycle.task_secret_keys, lifecycle.operation_key_bare, lifecycle.operation_key_secret_keys,
    lifecycle.run_secret_keys, lifecycle.workspace_secret_keys;
ALTER TABLE lifecycle.task DROP COLUMN secret_keys;
DROP FUNCTION lifecycle.secret_keys(jsonb, text);
