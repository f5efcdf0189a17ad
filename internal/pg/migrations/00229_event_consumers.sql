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

-- Takes the cursor of a consumer that nothing runs, so that events are kept for it no longer, and up to `most` of what it has parked; with 0 it takes
-- nothing. It looks itself whether a live replica runs the consumer, whatever the caller has found, and whether one that has just ended may have: the
-- cursor has to have stood still. `was`: the cursor was there; `taken` parked events; `more`: some are there still.
-- +goose StatementBegin
CREATE FUNCTION mesh.forget_event_consumer(of_service text, of_name text, live_for interval, still_for interval, most integer)
RETURNS TABLE (was boolean, taken bigint, more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved timestamptz;
BEGIN
    IF of_service NOT IN ('nodeapi', 'lifecycle', 'recovery', 'readmodel') THEN
        RAISE EXCEPTION '% is no service', of_service USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('SELECT c.updated_at FROM %I.event_cursor c WHERE c.name = $1 FOR UPDATE', of_service) INTO moved USING of_name;
    was := moved IS NOT NULL;
    taken := 0;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.parked_event p WHERE p.consumer = $1)', of_service) INTO more USING of_name;
    IF NOT was AND NOT more THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM mesh.key_replica r WHERE r.service = of_service AND r.seen_at > mesh.clock() - live_for
            AND ('consume:' || of_name = ANY (r.takes) OR NOT 'consumes' = ANY (r.takes))) THEN
        RAISE EXCEPTION 'a live replica runs %/%', of_service, of_name USING ERRCODE = 'object_in_use';
    END IF;
    IF moved > mesh.clock() - still_for THEN
        RAISE EXCEPTION '%/% has moved lately', of_service, of_name USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF of_name LIKE '%.rebuild/%' THEN
        was := false;
        more := false;
        RETURN NEXT;
        RETURN;
    END IF;
    IF most > 0 THEN
        EXECUTE format('DELETE FROM %I.event_cursor c WHERE c.name = $1', of_service) USING of_name;
        EXECUTE format('DELETE FROM %1$I.parked_event p WHERE p.consumer = $1 AND p.pos = ANY (ARRAY(
            SELECT x.pos FROM %1$I.parked_event x WHERE x.consumer = $1 ORDER BY x.pos LIMIT $2))', of_service) USING of_name, most;
        GET DIAGNOSTICS taken = ROW_COUNT;
        EXECUTE format('SELECT EXISTS (SELECT FROM %I.parked_event p WHERE p.consumer = $1)', of_service) INTO more USING of_name;
    END IF;
    RETURN NEXT;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.forget_event_consumer(text, text, interval, interval, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.forget_event_consumer(text, text, interval, interval, integer) TO readmodel;

-- +goose Down
DROP FUNCTION mesh.forget_event_consumer(text, text, interval, interval, integer);
DROP FUNCTION mesh.event_consumers(interval);
