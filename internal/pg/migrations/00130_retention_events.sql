-- +goose Up

-- Events that every consumer has read, and their numbers. A row of events.numbered goes with all of its events, so that no position ever
-- means another event. What a consumer has parked counts as unread, and so does all behind it.
-- +goose StatementBegin
CREATE FUNCTION events.cut_events(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Whatever the caller says, not before the term of the policy: the log is a witness beside what the services show.
    until   timestamptz := mesh.clock() - greatest(term, make_interval(secs => coalesce((
        SELECT p.value::float8 FROM mesh.policy p WHERE p.key = 'retention.events_seconds'), 1209600)));
    horizon bigint;
    n       record;
    gone    bigint;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    -- The newest row stays: the next one is numbered after it.
    SELECT least(min(c.pos), (SELECT max(x.last_pos) - 1 FROM events.numbered x)) INTO horizon FROM (
        SELECT pos FROM nodeapi.event_cursor UNION ALL SELECT pos FROM lifecycle.event_cursor
        UNION ALL SELECT pos FROM recovery.event_cursor UNION ALL SELECT pos FROM readmodel.event_cursor
        UNION ALL SELECT min(pos) - 1 FROM nodeapi.parked_event UNION ALL SELECT min(pos) - 1 FROM lifecycle.parked_event
        UNION ALL SELECT min(pos) - 1 FROM recovery.parked_event UNION ALL SELECT min(pos) - 1 FROM readmodel.parked_event) c;
    FOR n IN SELECT x.last_pos, x.seqs FROM events.numbered x WHERE x.last_pos <= horizon ORDER BY x.last_pos LIMIT most LOOP
        IF EXISTS (SELECT FROM unnest(n.seqs) r JOIN events.event e ON e.seq >= lower(r) AND e.seq < upper(r)
            WHERE e.created_at >= until)
        THEN
            EXIT;
        END IF;
        DELETE FROM events.event e USING unnest(n.seqs) r WHERE e.seq >= lower(r) AND e.seq < upper(r);
        GET DIAGNOSTICS gone = ROW_COUNT;
        DELETE FROM events.numbered x WHERE x.last_pos = n.last_pos;
        cut := cut + gone;
        IF cut >= most THEN
            next := lowest;
            EXIT;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

GRANT USAGE ON SCHEMA events, nodeapi TO mesh_retention;
GRANT SELECT ON mesh.policy TO mesh_retention;
GRANT SELECT, DELETE ON events.event, events.numbered TO mesh_retention;
GRANT SELECT ON nodeapi.event_cursor, lifecycle.event_cursor, recovery.event_cursor, readmodel.event_cursor,
    nodeapi.parked_event, lifecycle.parked_event, recovery.parked_event, readmodel.parked_event TO mesh_retention;
CREATE POLICY cuttable_seen ON events.event FOR SELECT TO mesh_retention USING (true);
CREATE POLICY cuttable ON events.event FOR DELETE TO mesh_retention USING (true);
CREATE POLICY cuttable_seen ON events.numbered FOR SELECT TO mesh_retention USING (true);
CREATE POLICY cuttable ON events.numbered FOR DELETE TO mesh_retention USING (true);
GRANT CREATE ON SCHEMA events TO mesh_retention;
REVOKE ALL ON FUNCTION events.cut_events(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION events.cut_events(interval, uuid, integer) TO readmodel;
ALTER FUNCTION events.cut_events(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA events FROM mesh_retention;

-- +goose Down
DROP FUNCTION events.cut_events(interval, uuid, integer);
DROP POLICY cuttable ON events.numbered;
DROP POLICY cuttable_seen ON events.numbered;
DROP POLICY cuttable ON events.event;
DROP POLICY cuttable_seen ON events.event;
REVOKE ALL ON events.event, events.numbered FROM mesh_retention;
REVOKE ALL ON nodeapi.event_cursor, lifecycle.event_cursor, recovery.event_cursor, readmodel.event_cursor,
    nodeapi.parked_event, lifecycle.parked_event, recovery.parked_event, readmodel.parked_event FROM mesh_retention;
REVOKE ALL ON mesh.policy FROM mesh_retention;
REVOKE ALL ON SCHEMA events, nodeapi FROM mesh_retention;
