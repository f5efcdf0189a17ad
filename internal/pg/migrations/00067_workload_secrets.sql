-- +goose Up

-- Environment values of workloads are secrets. What this migration can do without a key: the projection, and what the drift guard keeps of workspaces and
-- runs, have the names alone from here on. Rows of lifecycle that hold values are sealed by lifecycle when it starts. Events are append-only, and those that
-- were written before keep their values.

-- +goose StatementBegin
CREATE FUNCTION pg_temp.names_only(spec jsonb) RETURNS jsonb LANGUAGE sql AS $$
    SELECT CASE WHEN jsonb_typeof(spec->'workloads') IS DISTINCT FROM 'array' THEN spec ELSE jsonb_set(spec, '{workloads}', (
        SELECT coalesce(jsonb_agg(CASE
            WHEN jsonb_typeof(w.one->'env') = 'object' AND w.one->'env' <> '{}' THEN
                (w.one - 'env' - 'sealed_env') || jsonb_build_object('env_names', (SELECT jsonb_agg(k ORDER BY k COLLATE "C") FROM jsonb_object_keys(w.one->'env') k))
            ELSE w.one - 'env' - 'sealed_env' END ORDER BY w.at), '[]')
        FROM jsonb_array_elements(spec->'workloads') WITH ORDINALITY AS w (one, at)))
    END
$$;
-- +goose StatementEnd

UPDATE readmodel.workspace SET body = jsonb_set(body, '{spec}', pg_temp.names_only(body->'spec')) WHERE body ? 'spec';

UPDATE lifecycle.row_witness SET payload = jsonb_set(payload, '{spec}', pg_temp.names_only(payload->'spec')) WHERE row_type = 'workspace' AND payload ? 'spec';
UPDATE lifecycle.row_witness SET image = jsonb_set(image, '{spec}', pg_temp.names_only(image->'spec')) WHERE row_type = 'workspace' AND image ? 'spec';
UPDATE lifecycle.row_witness SET image = jsonb_set(image, '{input,spec}', pg_temp.names_only(image->'input'->'spec'))
    WHERE row_type = 'run' AND image->'input' ? 'spec';

DROP FUNCTION pg_temp.names_only(jsonb);

-- +goose Down
-- What was removed is gone: it stands in the events.
SELECT 1;
