-- +goose Up

-- What the function of 00130 promises, by partitions. The walk takes the rows of events.numbered as before, each with all of its events. The events of a day
-- that is over, and whose last one has reached its term, stay until no row names one of the day, nor leaves one open: then the partition is dropped. Others
-- are deleted: where the term is shorter than two days; in event_first and the default partition; those of a day that go with the last row of the day before;
-- and those that are two days over their term while their partition is not.
-- named_from returns a seq below which no row of events.numbered names an event, nor will: each row leaves open what later ones may name. It reads the
-- 100 oldest rows.
-- +goose StatementBegin
CREATE FUNCTION events.named_from() RETURNS bigint LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(max(least(y.named, y.open)), 0) FROM (
        SELECT min(lower(x.seqs)) OVER (ORDER BY x.last_pos) AS named, lower(x.open) AS open
        FROM (SELECT n.last_pos, n.seqs, n.open FROM events.numbered n ORDER BY n.last_pos LIMIT 100) x) y
$$;
-- +goose StatementEnd
DROP FUNCTION events.cut_events(interval, uuid, integer);
-- +goose StatementBegin
CREATE FUNCTION events.cut_events(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    slack   constant interval := interval '2 days';
    until   timestamptz;
    horizon bigint;
    below   bigint;
    dropped int8multirange := '{}'; -- the seqs of partitions that will be dropped whole
    waiting int8multirange := '{}'; -- of those that are not over yet
    day     record;
    n       record;
    gone    bigint := 0;
    singly  bigint;
BEGIN
    cut := 0;
    IF mesh.rolled_back() OR NOT pg_try_advisory_xact_lock(113732703289349) THEN
        RETURN;
    END IF;
    -- What is done of the partitions takes locks that nobody shall wait for until the end of a walk.
    IF events.keep_partitions(events.named_from()) THEN
        next := lowest;
        RETURN;
    END IF;
    -- Whatever the caller says, not before the term of the policy: the log is a witness beside what the services show.
    term := greatest(term, make_interval(secs => coalesce((
        SELECT p.value::float8 FROM mesh.policy p WHERE p.key = 'retention.events_seconds'), 1209600)));
    until := mesh.clock() - term;
    IF term >= slack THEN
        FOR day IN SELECT x.seqs, upper(x.seqs) <= s.last_value AS past FROM events.partitions() x, events.event_seq_seq s WHERE NOT lower_inf(x.seqs) LOOP
            IF isempty(waiting) AND day.past AND coalesce((SELECT e.created_at < until FROM events.event e
                WHERE e.seq >= lower(day.seqs) AND e.seq < upper(day.seqs) ORDER BY e.seq DESC LIMIT 1), true)
            THEN
                dropped := dropped + int8multirange(day.seqs);
            ELSE
                waiting := waiting + int8multirange(day.seqs);
            END IF;
        END LOOP;
    END IF;
    -- The newest row stays: the next one is numbered after it.
    SELECT least(min(c.pos), (SELECT max(x.last_pos) - 1 FROM events.numbered x)) INTO horizon FROM (
        SELECT pos FROM nodeapi.event_cursor UNION ALL SELECT pos FROM lifecycle.event_cursor
        UNION ALL SELECT pos FROM recovery.event_cursor UNION ALL SELECT pos FROM readmodel.event_cursor
        UNION ALL SELECT min(pos) - 1 FROM nodeapi.parked_event UNION ALL SELECT min(pos) - 1 FROM lifecycle.parked_event
        UNION ALL SELECT min(pos) - 1 FROM recovery.parked_event UNION ALL SELECT min(pos) - 1 FROM readmodel.parked_event) c;
    FOR n IN SELECT x.last_pos, x.last_pos - x.first_pos + 1 AS size, x.seqs, x.open FROM events.numbered x
        WHERE x.last_pos <= horizon ORDER BY x.last_pos LIMIT most
    LOOP
        IF EXISTS (SELECT FROM unnest(n.seqs) r JOIN events.event e ON e.seq >= lower(r) AND e.seq < upper(r)
            WHERE e.created_at >= CASE WHEN n.seqs && waiting AND NOT n.seqs && dropped AND NOT n.open && dropped THEN until - slack ELSE until END)
        THEN
            EXIT;
        END IF;
        IF NOT n.seqs <@ dropped THEN
            DELETE FROM events.event e USING unnest(n.seqs - dropped) r WHERE e.seq >= lower(r) AND e.seq < upper(r);
            GET DIAGNOSTICS singly = ROW_COUNT;
            gone := gone + singly;
        END IF;
        DELETE FROM events.numbered x WHERE x.last_pos = n.last_pos;
        cut := cut + n.size;
        IF gone >= most OR cut >= 20 * most THEN
            EXIT;
        END IF;
    END LOOP;
    below := events.named_from();
    IF cut >= most OR cut > 0 AND EXISTS (
            SELECT FROM events.partitions() x WHERE upper(x.seqs) <= least(below, floor(extract(epoch FROM mesh.clock()) / 86400)::bigint << 32))
    THEN
        next := lowest;
    END IF;
END $$;
-- +goose StatementEnd
GRANT CREATE ON SCHEMA events TO mesh_retention;
REVOKE ALL ON FUNCTION events.cut_events(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION events.cut_events(interval, uuid, integer) TO readmodel;
ALTER FUNCTION events.cut_events(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA events FROM mesh_retention;

-- +goose Down
DROP FUNCTION events.cut_events(interval, uuid, integer);
DROP FUNCTION events.named_from();
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
GRANT CREATE ON SCHEMA events TO mesh_retention;
REVOKE ALL ON FUNCTION events.cut_events(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION events.cut_events(interval, uuid, integer) TO readmodel;
ALTER FUNCTION events.cut_events(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA events FROM mesh_retention;
