-- +goose Up

-- What recovery concludes about a node now. The row of the nil id is the verdict about the control plane.
CREATE TABLE readmodel.verdict (
    node_id uuid   PRIMARY KEY,
    version bigint NOT NULL,
    body    jsonb  NOT NULL
);

-- The times for which a node had one reason. The id of one is made of the node and of when the reason was concluded, so that ids are in the order of time.
CREATE TABLE readmodel.verdict_period (
    period_id uuid   PRIMARY KEY,
    version   bigint NOT NULL, -- of the verdict that the row was made of
    node_id   uuid   NOT NULL,
    body      jsonb  NOT NULL
);
CREATE INDEX verdict_period_by_node ON readmodel.verdict_period (node_id, period_id);

CREATE UNLOGGED TABLE readmodel.scratch_verdict (LIKE readmodel.verdict INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_verdict_period (LIKE readmodel.verdict_period INCLUDING ALL);

-- A verdict stays for as long as the row of its node does. That of the control plane, whose id is the first of all, is not read.
-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_verdicts(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.node_id AS id FROM readmodel.verdict t
        WHERE t.node_id > lowest AND t.node_id < mesh.first_id(until) ORDER BY t.node_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.verdict t WHERE t.node_id = ANY (seen) AND NOT EXISTS (SELECT FROM readmodel.node n WHERE n.node_id = t.node_id)
        RETURNING t.node_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- A period that lasts stays, unless the row of its node is gone.
-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_verdict_periods(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.period_id AS id FROM readmodel.verdict_period t
        WHERE t.period_id > lowest AND t.period_id < mesh.first_id(until) ORDER BY t.period_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.verdict_period t WHERE t.period_id = ANY (seen)
            AND (coalesce((t.body->>'ended_at')::timestamptz, mesh.clock()) < until
                OR t.node_id <> '00000000-0000-0000-0000-000000000000' AND NOT EXISTS (SELECT FROM readmodel.node n WHERE n.node_id = t.node_id))
        RETURNING t.period_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

GRANT SELECT, DELETE ON readmodel.verdict, readmodel.verdict_period TO mesh_retention;
GRANT CREATE ON SCHEMA readmodel TO mesh_retention;
REVOKE ALL ON FUNCTION readmodel.cut_verdicts(interval, uuid, integer), readmodel.cut_verdict_periods(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION readmodel.cut_verdicts(interval, uuid, integer), readmodel.cut_verdict_periods(interval, uuid, integer) TO readmodel;
ALTER FUNCTION readmodel.cut_verdicts(interval, uuid, integer) OWNER TO mesh_retention;
ALTER FUNCTION readmodel.cut_verdict_periods(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA readmodel FROM mesh_retention;

-- +goose Down
DROP FUNCTION readmodel.cut_verdicts(interval, uuid, integer), readmodel.cut_verdict_periods(interval, uuid, integer);
DROP TABLE readmodel.scratch_verdict_period, readmodel.scratch_verdict, readmodel.verdict_period, readmodel.verdict;
