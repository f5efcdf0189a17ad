-- +goose Up

-- A batch of the watchdog's facts writes meanwhile, or waits for this; it waits for nothing else that this holds. After ten seconds the migration fails,
-- and is run again.
SET LOCAL lock_timeout = '10s';
LOCK TABLE recovery.watch_workspace IN SHARE ROW EXCLUSIVE MODE;

-- How many workspaces of each placement are to be up, and how many units fail as one, kept by the transactions that change them: a workspace that has a
-- machine of a static placement fails with the others there, any other one by itself.
CREATE TABLE recovery.watch_count (
    placement  text    PRIMARY KEY,
    workspaces integer NOT NULL DEFAULT 0,
    units      integer NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- The machines of static placements that have such workspaces, and how many. A machine without has no row.
CREATE TABLE recovery.watch_machine (
    node_id    uuid    PRIMARY KEY,
    workspaces integer NOT NULL
) WITH (fillfactor = 70);

-- Adds to the counts: to those of a placement and of a machine, where the workspace has one, as many as delta says.
-- +goose StatementBegin
CREATE FUNCTION recovery.count_fleet(placements text[], machines uuid[], deltas integer[]) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    WITH change AS (
        SELECT x.placement, x.machine, sum(x.delta)::integer AS delta FROM unnest(placements, machines, deltas) AS x (placement, machine, delta)
        GROUP BY 1, 2 HAVING sum(x.delta) <> 0
    ), machine AS (
        INSERT INTO recovery.watch_machine AS m (node_id, workspaces)
        SELECT c.machine, c.delta FROM change c WHERE c.machine IS NOT NULL ORDER BY 1
        ON CONFLICT (node_id) DO UPDATE SET workspaces = m.workspaces + excluded.workspaces
        RETURNING m.node_id, m.workspaces
    )
    INSERT INTO recovery.watch_count AS w (placement, workspaces, units)
    SELECT y.placement, sum(y.delta), sum(y.units) FROM (
        SELECT c.placement, c.delta, CASE WHEN c.machine IS NULL THEN c.delta
            ELSE (m.workspaces > 0)::integer - (m.workspaces > c.delta)::integer END AS units
        FROM change c LEFT JOIN machine m ON m.node_id = c.machine) y
    GROUP BY 1 HAVING sum(y.delta) <> 0 OR sum(y.units) <> 0 ORDER BY 1
    ON CONFLICT (placement) DO UPDATE SET workspaces = w.workspaces + excluded.workspaces, units = w.units + excluded.units;
    DELETE FROM recovery.watch_machine m WHERE m.node_id = ANY (machines) AND m.workspaces = 0;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.count_workspace_insert() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows x WHERE x.state IN ('provisioning', 'active', 'recreating')) THEN
        PERFORM recovery.count_fleet(array_agg(x.placement), array_agg(CASE WHEN x.placement = 'static' THEN x.node_id END), array_agg(1))
        FROM new_rows x WHERE x.state IN ('provisioning', 'active', 'recreating');
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_insert AFTER INSERT ON recovery.watch_workspace REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION recovery.count_workspace_insert();

-- Most updates change nothing that is counted: a run of a workspace, or its failures to register.
-- +goose StatementBegin
CREATE FUNCTION recovery.count_workspace_update() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows x JOIN old_rows o USING (workspace_id)
            WHERE (x.state IN ('provisioning', 'active', 'recreating'), x.placement, x.node_id)
                IS DISTINCT FROM (o.state IN ('provisioning', 'active', 'recreating'), o.placement, o.node_id)) THEN
        PERFORM recovery.count_fleet(array_agg(y.placement), array_agg(CASE WHEN y.placement = 'static' THEN y.node_id END), array_agg(y.delta))
        FROM (SELECT x.placement, x.node_id, 1 AS delta FROM new_rows x WHERE x.state IN ('provisioning', 'active', 'recreating') UNION ALL
            SELECT x.placement, x.node_id, -1 FROM old_rows x WHERE x.state IN ('provisioning', 'active', 'recreating')) y;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_update AFTER UPDATE ON recovery.watch_workspace REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION recovery.count_workspace_update();

-- +goose StatementBegin
CREATE FUNCTION recovery.count_workspace_delete() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM old_rows x WHERE x.state IN ('provisioning', 'active', 'recreating')) THEN
        PERFORM recovery.count_fleet(array_agg(x.placement), array_agg(CASE WHEN x.placement = 'static' THEN x.node_id END), array_agg(-1))
        FROM old_rows x WHERE x.state IN ('provisioning', 'active', 'recreating');
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_delete AFTER DELETE ON recovery.watch_workspace REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION recovery.count_workspace_delete();

-- Counts anew, while nothing else changes what is counted.
-- +goose StatementBegin
CREATE FUNCTION recovery.recount_fleet() RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    LOCK TABLE recovery.watch_count IN SHARE ROW EXCLUSIVE MODE;
    DELETE FROM recovery.watch_count;
    DELETE FROM recovery.watch_machine;
    SELECT recovery.count_fleet(array_agg(x.placement), array_agg(CASE WHEN x.placement = 'static' THEN x.node_id END), array_agg(1))
    FROM recovery.watch_workspace x WHERE x.state IN ('provisioning', 'active', 'recreating');
$$;
-- +goose StatementEnd
SELECT recovery.recount_fleet();

-- +goose Down
DROP FUNCTION recovery.count_workspace_insert(), recovery.count_workspace_update(), recovery.count_workspace_delete() CASCADE;
DROP FUNCTION recovery.recount_fleet(), recovery.count_fleet(text[], uuid[], integer[]);
DROP TABLE recovery.watch_count, recovery.watch_machine;
