-- +goose Up

-- The function of 00221 with one difference: the events of a row of events.numbered are read range by range, each by a
-- subquery of its own. As a join on seq >= lower(r) AND seq < upper(r), for which Postgres expects a ninth of the log
-- for each range, both statements read the log whole for each row of events.numbered once it was large.
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
        FOR day IN SELECT x.seqs, upper(x.seqs) <= s.last_value AS past
            FROM events.partitions() x, events.event_seq_seq s WHERE NOT lower_inf(x.seqs)
        LOOP
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
        UNION ALL SELECT min(pos) - 1 FROM nodeapi.parked_event
            UNION ALL SELECT min(pos) - 1 FROM lifecycle.parked_event
        UNION ALL SELECT min(pos) - 1 FROM recovery.parked_event
        UNION ALL SELECT min(pos) - 1 FROM readmodel.parked_event) c;
    FOR n IN SELECT x.last_pos, x.last_pos - x.first_pos + 1 AS size, x.seqs, x.open FROM events.numbered x
        WHERE x.last_pos <= horizon ORDER BY x.last_pos LIMIT most
    LOOP
        IF EXISTS (
            SELECT FROM unnest(n.seqs) r CROSS JOIN LATERAL (
                SELECT x.created_at FROM events.event x WHERE x.seq >= lower(r) AND x.seq < upper(r) ORDER BY x.seq) e
            WHERE e.created_at >= CASE
                WHEN n.seqs && waiting AND NOT n.seqs && dropped AND NOT n.open && dropped
                    THEN until - slack ELSE until END)
        THEN
            EXIT;
        END IF;
        IF NOT n.seqs <@ dropped THEN
            DELETE FROM events.event e WHERE e.seq = ANY (ARRAY(
                SELECT y.seq FROM unnest(n.seqs - dropped) r CROSS JOIN LATERAL (
                    SELECT x.seq FROM events.event x WHERE x.seq >= lower(r) AND x.seq < upper(r) ORDER BY x.seq) y));
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
            SELECT FROM events.partitions() x
            WHERE upper(x.seqs) <= least(below, floor(extract(epoch FROM mesh.clock()) / 86400)::bigint << 32))
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
        FOR day IN SELECT x.seqs, upper(x.seqs) <= s.last_value AS past
            FROM events.partitions() x, events.event_seq_seq s WHERE NOT lower_inf(x.seqs)
        LOOP
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
        UNION ALL SELECT min(pos) - 1 FROM nodeapi.parked_event
            UNION ALL SELECT min(pos) - 1 FROM lifecycle.parked_event
        UNION ALL SELECT min(pos) - 1 FROM recovery.parked_event
        UNION ALL SELECT min(pos) - 1 FROM readmodel.parked_event) c;
    FOR n IN SELECT x.last_pos, x.last_pos - x.first_pos + 1 AS size, x.seqs, x.open FROM events.numbered x
        WHERE x.last_pos <= horizon ORDER BY x.last_pos LIMIT most
    LOOP
        IF EXISTS (SELECT FROM unnest(n.seqs) r JOIN events.event e ON e.seq >= lower(r) AND e.seq < upper(r)
            WHERE e.created_at >= CASE WHEN n.seqs && waiting AND NOT n.seqs && dropped AND NOT n.open && dropped
                THEN until - slack ELSE until END)
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
            SELECT FROM events.partitions() x
            WHERE upper(x.seqs) <= least(below, floor(extract(epoch FROM mesh.clock()) / 86400)::bigint << 32))
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
