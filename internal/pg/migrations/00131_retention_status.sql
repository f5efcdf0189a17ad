-- +goose Up

-- Since when the oldest event is parked, of a consumer of any service: readmodel shows it, and may not read the tables of others.
-- +goose StatementBegin
CREATE FUNCTION mesh.oldest_parked() RETURNS timestamptz LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT least((SELECT min(parked_at) FROM nodeapi.parked_event), (SELECT min(parked_at) FROM lifecycle.parked_event),
        (SELECT min(parked_at) FROM recovery.parked_event), (SELECT min(parked_at) FROM readmodel.parked_event))
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.oldest_parked() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.oldest_parked() TO readmodel;

-- +goose Down
DROP FUNCTION mesh.oldest_parked();
