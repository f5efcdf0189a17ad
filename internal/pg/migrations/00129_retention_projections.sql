-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_tasks(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.task_id AS id FROM readmodel.task t
        WHERE t.task_id > lowest AND t.task_id < mesh.first_id(until) ORDER BY t.task_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.task t WHERE t.task_id = ANY (seen) AND t.state NOT IN ('queued', 'dispatched', 'delivered', 'running') AND coalesce((t.body->>'state_at')::timestamptz, mesh.clock()) < until
        RETURNING t.task_id AS id),
    moves AS (DELETE FROM readmodel.task_transition x USING gone g WHERE x.task_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_runs(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.run_id AS id FROM readmodel.run t
        WHERE t.run_id > lowest AND t.run_id < mesh.first_id(until) ORDER BY t.run_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.run t WHERE t.run_id = ANY (seen) AND NOT t.live AND coalesce((t.body->>'finished_at')::timestamptz, mesh.clock()) < until
        RETURNING t.run_id AS id),
    steps AS (DELETE FROM readmodel.step x USING gone g WHERE x.run_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_claims(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.claim_id AS id FROM readmodel.claim t
        WHERE t.claim_id > lowest AND t.claim_id < mesh.first_id(until) ORDER BY t.claim_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.claim t WHERE t.claim_id = ANY (seen) AND t.released AND coalesce((t.body->>'released_at')::timestamptz, mesh.clock()) < until
        RETURNING t.claim_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_allocations(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.allocation_id AS id FROM readmodel.allocation t
        WHERE t.allocation_id > lowest AND t.allocation_id < mesh.first_id(until) ORDER BY t.allocation_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.allocation t WHERE t.allocation_id = ANY (seen) AND t.body->>'state' = 'ALLOCATION_STATE_RELEASED' AND coalesce((t.body->>'state_at')::timestamptz, mesh.clock()) < until
        RETURNING t.allocation_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_instances(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.instance_id AS id FROM readmodel.instance t
        WHERE t.instance_id > lowest AND t.instance_id < mesh.first_id(until) ORDER BY t.instance_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.instance t WHERE t.instance_id = ANY (seen) AND NOT t.live AND coalesce((t.body->>'ended_at')::timestamptz, mesh.clock()) < until
        RETURNING t.instance_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_findings(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.finding_id AS id FROM readmodel.finding t
        WHERE t.finding_id > lowest AND t.finding_id < mesh.first_id(until) ORDER BY t.finding_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.finding t WHERE t.finding_id = ANY (seen) AND NOT t.open AND coalesce((t.body->>'resolved_at')::timestamptz, mesh.clock()) < until
        RETURNING t.finding_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

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

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_nodes(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.node_id AS id FROM readmodel.node t
        WHERE t.node_id > lowest AND t.node_id < mesh.first_id(until) ORDER BY t.node_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.node t WHERE t.node_id = ANY (seen) AND t.state = 'retired' AND coalesce((t.body->>'state_at')::timestamptz, mesh.clock()) < until
            AND NOT EXISTS (SELECT FROM readmodel.task x WHERE x.node_id = t.node_id AND x.state IN ('queued', 'dispatched', 'delivered', 'running'))
        RETURNING t.node_id AS id),
    gates AS (DELETE FROM readmodel.gate x USING gone g WHERE x.node_id = g.id),
    sessions AS (DELETE FROM readmodel.session x USING gone g WHERE x.node_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_recoveries(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.record_id AS id FROM readmodel.recovery_record t
        WHERE t.record_id > lowest AND t.record_id < mesh.first_id(until) ORDER BY t.record_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.recovery_record t WHERE t.record_id = ANY (seen) AND coalesce((t.body->>'ended_at')::timestamptz, mesh.clock()) < until
        RETURNING t.record_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION readmodel.cut_incidents(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.incident_id AS id FROM readmodel.incident t
        WHERE t.incident_id > lowest AND t.incident_id < mesh.first_id(until) ORDER BY t.incident_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM readmodel.incident t WHERE t.incident_id = ANY (seen) AND NOT t.open AND coalesce((t.body->>'closed_at')::timestamptz, mesh.clock()) < until
        RETURNING t.incident_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- The functions belong to a role that may delete from these tables, read what decides, and do nothing else.
GRANT USAGE ON SCHEMA readmodel TO mesh_retention;
GRANT SELECT, DELETE ON readmodel.allocation, readmodel.claim, readmodel.finding, readmodel.gate, readmodel.incident, readmodel.instance, readmodel.node, readmodel.observation, readmodel.observed, readmodel.recovery_record, readmodel.run, readmodel.session, readmodel.step, readmodel.task, readmodel.task_transition, readmodel.workspace TO mesh_retention;
GRANT CREATE ON SCHEMA readmodel TO mesh_retention;
-- +goose StatementBegin
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'readmodel'::regnamespace AND p.proname LIKE 'cut\_%' LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO readmodel', f);
        EXECUTE format('ALTER FUNCTION %s OWNER TO mesh_retention', f);
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE CREATE ON SCHEMA readmodel FROM mesh_retention;

-- +goose Down
DROP FUNCTION readmodel.cut_tasks(interval, uuid, integer);
DROP FUNCTION readmodel.cut_runs(interval, uuid, integer);
DROP FUNCTION readmodel.cut_claims(interval, uuid, integer);
DROP FUNCTION readmodel.cut_allocations(interval, uuid, integer);
DROP FUNCTION readmodel.cut_instances(interval, uuid, integer);
DROP FUNCTION readmodel.cut_findings(interval, uuid, integer);
DROP FUNCTION readmodel.cut_workspaces(interval, uuid, integer);
DROP FUNCTION readmodel.cut_nodes(interval, uuid, integer);
DROP FUNCTION readmodel.cut_recoveries(interval, uuid, integer);
DROP FUNCTION readmodel.cut_incidents(interval, uuid, integer);
REVOKE ALL ON ALL TABLES IN SCHEMA readmodel FROM mesh_retention;
REVOKE ALL ON SCHEMA readmodel FROM mesh_retention;
