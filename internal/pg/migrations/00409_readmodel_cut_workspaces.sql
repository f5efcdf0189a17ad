-- +goose Up

-- A decommissioned workspace is shown for as long as something of it is held, live or open: its owner keeps it too, and an operator has to find it.
DROP FUNCTION readmodel.cut_workspaces(interval, uuid, integer);
GRANT CREATE ON SCHEMA readmodel TO mesh_retention;
-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_workspaces(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.workspace_id AS id FROM readmodel.workspace t
        WHERE t.workspace_id > lowest AND t.workspace_id < mesh.first_id(until) ORDER BY t.workspace_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.workspace t WHERE t.workspace_id = ANY (seen) AND t.state = 'decommissioned' AND coalesce((t.body->>'state_at')::timestamptz, mesh.clock()) < until
            AND NOT EXISTS (SELECT FROM readmodel.run x WHERE x.workspace_id = t.workspace_id)
            AND NOT EXISTS (SELECT FROM readmodel.claim x WHERE x.workspace_id = t.workspace_id AND NOT x.released)
            AND NOT EXISTS (SELECT FROM readmodel.allocation x WHERE x.workspace_id = t.workspace_id AND x.body->>'state' IS DISTINCT FROM 'ALLOCATION_STATE_RELEASED')
            AND NOT EXISTS (SELECT FROM readmodel.instance x WHERE x.workspace_id = t.workspace_id AND x.live)
            AND NOT EXISTS (SELECT FROM readmodel.finding x WHERE x.workspace_id = t.workspace_id AND x.open)
        RETURNING t.workspace_id AS id),
    observed AS (DELETE FROM readmodel.observed x USING gone g WHERE x.workspace_id = g.id),
    observation AS (DELETE FROM readmodel.observation x USING gone g WHERE x.workspace_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION readmodel.cut_workspaces(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION readmodel.cut_workspaces(interval, uuid, integer) TO readmodel;
ALTER FUNCTION readmodel.cut_workspaces(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA readmodel FROM mesh_retention;

-- +goose Down
DROP FUNCTION readmodel.cut_workspaces(interval, uuid, integer);
GRANT CREATE ON SCHEMA readmodel TO mesh_retention;
-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_workspaces(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.workspace_id AS id FROM readmodel.workspace t
        WHERE t.workspace_id > lowest AND t.workspace_id < mesh.first_id(until) ORDER BY t.workspace_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.workspace t WHERE t.workspace_id = ANY (seen) AND t.state = 'decommissioned' AND coalesce((t.body->>'state_at')::timestamptz, mesh.clock()) < until
            AND NOT EXISTS (SELECT FROM readmodel.run x WHERE x.workspace_id = t.workspace_id)
        RETURNING t.workspace_id AS id),
    observed AS (DELETE FROM readmodel.observed x USING gone g WHERE x.workspace_id = g.id),
    observation AS (DELETE FROM readmodel.observation x USING gone g WHERE x.workspace_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION readmodel.cut_workspaces(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION readmodel.cut_workspaces(interval, uuid, integer) TO readmodel;
ALTER FUNCTION readmodel.cut_workspaces(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA readmodel FROM mesh_retention;
