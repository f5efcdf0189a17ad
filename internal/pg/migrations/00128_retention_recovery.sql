-- +goose Up

-- What is asked when a node is cut: by the cut, and by the rows that refer to it.
CREATE INDEX enrollment_of_node ON recovery.enrollment (node_id);
CREATE INDEX enrollment_of_token ON recovery.enrollment (token_id);
CREATE INDEX session_open_of_node ON recovery.session_open (node_id);
CREATE INDEX instance_of_node ON recovery.instance (node_id);

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_enrollments(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.enrollment_id AS id FROM recovery.enrollment t
        WHERE t.enrollment_id > lowest AND t.enrollment_id < mesh.first_id(until) ORDER BY t.enrollment_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.enrollment t WHERE t.enrollment_id = ANY (seen) AND t.state <> 'claimed' AND coalesce(t.ended_at, t.started_at) < until
        RETURNING t.enrollment_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_tokens(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.token_id AS id FROM recovery.token t
        WHERE t.token_id > lowest AND t.token_id < mesh.first_id(until) ORDER BY t.token_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.token t WHERE t.token_id = ANY (seen) AND t.state <> 'issued' AND t.state_at < until AND t.expires_at < until
            AND NOT EXISTS (SELECT FROM recovery.enrollment x WHERE x.token_id = t.token_id)
        RETURNING t.token_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_instances(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.instance_id AS id FROM recovery.instance t
        WHERE t.instance_id > lowest AND t.instance_id < mesh.first_id(until) ORDER BY t.instance_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.instance t WHERE t.instance_id = ANY (seen) AND t.retired_at < until AND coalesce(t.refused_at < until, true)
        RETURNING t.instance_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_identities(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.node_id AS id FROM recovery.identity t
        WHERE t.node_id > lowest AND t.node_id < mesh.first_id(until) ORDER BY t.node_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.identity t WHERE t.node_id = ANY (seen) AND t.state = 'retired' AND t.state_at < until AND t.told_acked >= t.told
            AND NOT EXISTS (SELECT FROM recovery.token x WHERE x.node_id = t.node_id)
            AND NOT EXISTS (SELECT FROM recovery.enrollment x WHERE x.node_id = t.node_id)
            AND NOT EXISTS (SELECT FROM recovery.instance x WHERE x.node_id = t.node_id)
            AND NOT EXISTS (SELECT FROM recovery.serial x WHERE x.node_id = t.node_id AND x.not_after > mesh.clock())
        RETURNING t.node_id AS id),
    sessions AS (DELETE FROM recovery.session_open s USING gone g WHERE s.node_id = g.id),
    serials AS (DELETE FROM recovery.serial s USING gone g WHERE s.node_id = g.id),
    suspects AS (DELETE FROM recovery.suspect s USING gone g WHERE s.node_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_records(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.record_id AS id FROM recovery.recovery_record t
        WHERE t.record_id > lowest AND t.record_id < mesh.first_id(until) ORDER BY t.record_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.recovery_record t WHERE t.record_id = ANY (seen) AND t.ended_at < until
        RETURNING t.record_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_incidents(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.incident_id AS id FROM recovery.incident t
        WHERE t.incident_id > lowest AND t.incident_id < mesh.first_id(until) ORDER BY t.incident_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.incident t WHERE t.incident_id = ANY (seen) AND t.closed_at < until
        RETURNING t.incident_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- Certificates that count no more, of nodes that stand: one of a machine is renewed every few hours.
-- +goose StatementBegin
CREATE FUNCTION recovery.cut_serials(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.node_id AS id FROM recovery.identity t
        WHERE t.node_id > lowest AND t.node_id < mesh.first_id(until) ORDER BY t.node_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.serial t WHERE t.node_id = ANY (seen) AND t.state IN ('superseded', 'revoked') AND t.state_at < until
            AND t.not_after < until AND NOT EXISTS (SELECT FROM recovery.identity i
                WHERE i.node_id = t.node_id AND t.serial IN (i.current_serial, i.next_serial))
        RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- The highest epoch prepared of a workspace, once no instance of it is left.
-- +goose StatementBegin
CREATE FUNCTION recovery.cut_epochs(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.workspace_id AS id FROM recovery.workspace_epoch t
        WHERE t.workspace_id > lowest AND t.workspace_id < mesh.first_id(until) ORDER BY t.workspace_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.workspace_epoch t WHERE t.workspace_id = ANY (seen) AND t.instance_id < mesh.first_id(until)
            AND NOT EXISTS (SELECT FROM recovery.instance i WHERE i.workspace_id = t.workspace_id)
            AND NOT EXISTS (SELECT FROM recovery.watch_workspace w WHERE w.workspace_id = t.workspace_id)
        RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- The functions belong to a role that may delete from these tables, read what decides, and do nothing else.
GRANT USAGE ON SCHEMA recovery TO mesh_retention;
GRANT SELECT, DELETE ON recovery.enrollment, recovery.identity, recovery.incident, recovery.instance, recovery.recovery_record, recovery.serial, recovery.session_open, recovery.suspect, recovery.token, recovery.workspace_epoch TO mesh_retention;
GRANT SELECT ON recovery.watch_workspace TO mesh_retention;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
-- +goose StatementBegin
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'recovery'::regnamespace AND p.proname LIKE 'cut\_%' LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO recovery', f);
        EXECUTE format('ALTER FUNCTION %s OWNER TO mesh_retention', f);
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;

-- +goose Down
DROP FUNCTION recovery.cut_enrollments(interval, uuid, integer);
DROP FUNCTION recovery.cut_tokens(interval, uuid, integer);
DROP FUNCTION recovery.cut_instances(interval, uuid, integer);
DROP FUNCTION recovery.cut_identities(interval, uuid, integer);
DROP FUNCTION recovery.cut_records(interval, uuid, integer);
DROP FUNCTION recovery.cut_incidents(interval, uuid, integer);
DROP FUNCTION recovery.cut_serials(interval, uuid, integer);
DROP FUNCTION recovery.cut_epochs(interval, uuid, integer);
REVOKE ALL ON ALL TABLES IN SCHEMA recovery FROM mesh_retention;
REVOKE ALL ON SCHEMA recovery FROM mesh_retention;
DROP INDEX recovery.instance_of_node, recovery.session_open_of_node, recovery.enrollment_of_token, recovery.enrollment_of_node;
