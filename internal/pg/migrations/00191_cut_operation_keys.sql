-- +goose Up
-- Keys of operations by their age: none of them rises with time. Each run is found by its id, and each key by its place: joined, all runs and all old keys were
-- read for one batch.
DROP FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer);
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_operation_keys(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM lifecycle.operation_key g WHERE g.ctid = ANY (ARRAY(
            SELECT k.ctid FROM lifecycle.operation_key k WHERE k.created_at < until
                AND coalesce((SELECT l.state IN ('succeeded', 'failed') FROM lifecycle.saga_run l WHERE l.id = k.run_id), true)
            ORDER BY k.created_at LIMIT most))
        RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd
GRANT CREATE ON SCHEMA lifecycle TO mesh_retention;
REVOKE ALL ON FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) TO lifecycle;
ALTER FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA lifecycle FROM mesh_retention;

-- +goose Down
DROP FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer);
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_operation_keys(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH over AS (
        SELECT k.tenant_id, k.key FROM lifecycle.operation_key k WHERE k.created_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.id = k.run_id AND l.state NOT IN ('succeeded', 'failed'))
        ORDER BY k.created_at LIMIT most
    ), gone AS (
        DELETE FROM lifecycle.operation_key k USING over o
        WHERE k.tenant_id = o.tenant_id AND k.key = o.key AND k.created_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.saga_run l WHERE l.id = k.run_id AND l.state NOT IN ('succeeded', 'failed'))
        RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd
GRANT CREATE ON SCHEMA lifecycle TO mesh_retention;
REVOKE ALL ON FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) TO lifecycle;
ALTER FUNCTION lifecycle.cut_operation_keys(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA lifecycle FROM mesh_retention;
