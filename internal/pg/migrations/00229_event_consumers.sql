-- +goose Up

-- The consumers of all services, for readmodel, which may not read the tables of others: where each stands, how many live replicas of its service run
-- it (`consume:NAME`), and how many do not say what they run (builds before this one). What a rebuild of projections keeps is no consumer.
-- +goose StatementBegin
CREATE FUNCTION mesh.event_consumers(live_for interval)
RETURNS TABLE (service text, name text, pos bigint, moved_at timestamptz, parked bigint, replicas bigint, silent bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.service, c.name, c.pos, c.updated_at, c.parked,
        (SELECT count(*) FROM mesh.key_replica r WHERE r.service = c.service AND r.seen_at > mesh.clock() - live_for
            AND 'consume:' || c.name = ANY (r.takes)),
        (SELECT count(*) FROM mesh.key_replica r WHERE r.service = c.service AND r.seen_at > mesh.clock() - live_for
            AND NOT 'consumes' = ANY (r.takes))
    FROM (
        SELECT 'nodeapi' AS service, x.name, x.pos, x.updated_at,
            (SELECT count(*) FROM nodeapi.parked_event p WHERE p.consumer = x.name) AS parked FROM nodeapi.event_cursor x
        UNION ALL
        SELECT 'lifecycle', x.name, x.pos, x.updated_at,
            (SELECT count(*) FROM lifecycle.parked_event p WHERE p.consumer = x.name) FROM lifecycle.event_cursor x
        UNION ALL
        SELECT 'recovery', x.name, x.pos, x.updated_at,
            (SELECT count(*) FROM recovery.parked_event p WHERE p.consumer = x.name) FROM recovery.event_cursor x
        UNION ALL
        SELECT 'readmodel', x.name, x.pos, x.updated_at,
            (SELECT count(*) FROM readmodel.parked_event p WHERE p.consumer = x.name) FROM readmodel.event_cursor x
    ) c WHERE c.name NOT LIKE '%.rebuild/%'
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.event_consumers(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.event_consumers(interval) TO readmodel;

-- Takes the cursor of a consumer that nothing runs, and what it has parked: events are kept for it no longer. It looks itself whether a live replica
-- runs the consumer, whatever the caller has found. True if the consumer was there.
-- +goose StatementBegin
CREATE FUNCTION mesh.forget_event_consumer(of_service text, of_name text, live_for interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    gone bigint;
BEGIN
    IF of_service NOT IN ('nodeapi', 'lifecycle', 'recovery', 'readmodel') THEN
        RAISE EXCEPTION '% is no service', of_service USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('SELECT 1 FROM %I.event_cursor WHERE name = $1 FOR UPDATE', of_service) USING of_name;
    IF EXISTS (SELECT FROM mesh.event_consumers(live_for) c WHERE c.service = of_service AND c.name = of_name AND c.replicas + c.silent > 0) THEN
        RAISE EXCEPTION 'a live replica runs %/%', of_service, of_name USING ERRCODE = 'object_in_use';
    END IF;
    IF of_name LIKE '%.rebuild/%' THEN
        RETURN false;
    END IF;
    EXECUTE format('DELETE FROM %I.parked_event WHERE consumer = $1', of_service) USING of_name;
    EXECUTE format('DELETE FROM %I.event_cursor WHERE name = $1', of_service) USING of_name;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone > 0;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.forget_event_consumer(text, text, interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.forget_event_consumer(text, text, interval) TO readmodel;

-- +goose Down
DROP FUNCTION mesh.forget_event_consumer(text, text, interval);
DROP FUNCTION mesh.event_consumers(interval);
