-- +goose Up

-- A batch of projections holds their cursor before it writes, and no other begins while this does: it waits for nothing that this holds. What is read
-- meanwhile waits for nobody. After ten seconds the migration fails, and is run again.
SET LOCAL lock_timeout = '10s';
SELECT pos FROM readmodel.event_cursor WHERE name = 'projections' FOR UPDATE;
LOCK TABLE readmodel.run, readmodel.workspace IN SHARE ROW EXCLUSIVE MODE;

-- How many workspaces and live runs each tenant has, kept by the transactions that change them. What has no tenant counts for the highest id.
CREATE TABLE readmodel.workspace_count (
    tenant_id  uuid    PRIMARY KEY,
    workspaces integer NOT NULL DEFAULT 0, -- all but those that are decommissioned
    active     integer NOT NULL DEFAULT 0,
    live_runs  integer NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_workspace_insert() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows) THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, workspaces, active)
        SELECT y.tenant_id, sum(y.w), sum(y.a) FROM (
            SELECT x.tenant_id, (x.state <> 'decommissioned')::integer AS w, (x.state = 'active')::integer AS a FROM new_rows x) y
        GROUP BY 1 HAVING sum(y.w) <> 0 OR sum(y.a) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET workspaces = c.workspaces + excluded.workspaces, active = c.active + excluded.active;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_insert AFTER INSERT ON readmodel.workspace REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_workspace_insert();

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_workspace_update() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows) THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, workspaces, active)
        SELECT y.tenant_id, sum(y.w), sum(y.a) FROM (
            SELECT x.tenant_id, (x.state <> 'decommissioned')::integer AS w, (x.state = 'active')::integer AS a FROM new_rows x UNION ALL
            SELECT x.tenant_id, -(x.state <> 'decommissioned')::integer AS w, -(x.state = 'active')::integer AS a FROM old_rows x) y
        GROUP BY 1 HAVING sum(y.w) <> 0 OR sum(y.a) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET workspaces = c.workspaces + excluded.workspaces, active = c.active + excluded.active;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_update AFTER UPDATE ON readmodel.workspace REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_workspace_update();

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_workspace_delete() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- What is cut counts for nothing, and the role that cuts may not write counts.
    IF EXISTS (SELECT FROM old_rows x WHERE x.state <> 'decommissioned') THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, workspaces, active)
        SELECT y.tenant_id, sum(y.w), sum(y.a) FROM (
            SELECT x.tenant_id, -(x.state <> 'decommissioned')::integer AS w, -(x.state = 'active')::integer AS a FROM old_rows x) y
        GROUP BY 1 HAVING sum(y.w) <> 0 OR sum(y.a) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET workspaces = c.workspaces + excluded.workspaces, active = c.active + excluded.active;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_delete AFTER DELETE ON readmodel.workspace REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_workspace_delete();

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_run_insert() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows) THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, live_runs)
        SELECT y.tenant_id, sum(y.r) FROM (
            SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS tenant_id, x.live::integer AS r FROM new_rows x) y
        GROUP BY 1 HAVING sum(y.r) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET live_runs = c.live_runs + excluded.live_runs;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_insert AFTER INSERT ON readmodel.run REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_run_insert();

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_run_update() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows) THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, live_runs)
        SELECT y.tenant_id, sum(y.r) FROM (
            SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS tenant_id, x.live::integer AS r FROM new_rows x UNION ALL
            SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS tenant_id, -x.live::integer AS r FROM old_rows x) y
        GROUP BY 1 HAVING sum(y.r) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET live_runs = c.live_runs + excluded.live_runs;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_update AFTER UPDATE ON readmodel.run REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_run_update();

-- +goose StatementBegin
CREATE FUNCTION readmodel.count_run_delete() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM old_rows x WHERE x.live) THEN
        INSERT INTO readmodel.workspace_count AS c (tenant_id, live_runs)
        SELECT y.tenant_id, sum(y.r) FROM (
            SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS tenant_id, -x.live::integer AS r FROM old_rows x) y
        GROUP BY 1 HAVING sum(y.r) <> 0 ORDER BY 1
        ON CONFLICT (tenant_id) DO UPDATE SET live_runs = c.live_runs + excluded.live_runs;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_delete AFTER DELETE ON readmodel.run REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION readmodel.count_run_delete();

-- Counts anew, while nothing else changes what is counted.
-- +goose StatementBegin
CREATE FUNCTION readmodel.recount_workspaces() RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    LOCK TABLE readmodel.workspace_count IN SHARE ROW EXCLUSIVE MODE;
    DELETE FROM readmodel.workspace_count;
    INSERT INTO readmodel.workspace_count (tenant_id, workspaces, active, live_runs)
    SELECT y.tenant_id, sum(y.w), sum(y.a), sum(y.r) FROM (
        SELECT x.tenant_id, 1 AS w, (x.state = 'active')::integer AS a, 0 AS r FROM readmodel.workspace x WHERE x.state <> 'decommissioned' UNION ALL
        SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'), 0, 0, 1 FROM readmodel.run x WHERE x.live) y
    GROUP BY 1;
$$;
-- +goose StatementEnd
-- Both tables are locked by the triggers that were made, until the migration ends.
SELECT readmodel.recount_workspaces();
