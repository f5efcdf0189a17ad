-- +goose NO TRANSACTION
-- +goose Up

-- The log is partitioned by seq. A day's partition takes the seqs from the day's number since 1970, times 2^32, on; once a day the sequence is set to the
-- first of them. So a partition holds the events of a day, seq is unique and rises as before, and who reads by seq reaches the partitions of these seqs alone.
-- Seqs below those of the first day are in event_first, which is the table that was; what no partition takes goes to event_default.

-- event_first is attached without reading its rows, because this constraint, which is validated beside the work that goes on, says what the bounds say. Its
-- bound is the first seq of a day of the past, or, where the sequence is beyond it because the log had partitions before, of the day after the sequence's.
-- Appends wait for at most a second at a time.
-- +goose StatementBegin
DO $$
DECLARE
    bound bigint;
BEGIN
    IF (SELECT relkind <> 'r' FROM pg_class WHERE oid = 'events.event'::regclass) OR EXISTS (
        SELECT FROM pg_constraint WHERE conrelid = 'events.event'::regclass AND conname = 'event_first_bound')
    THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', '1000', true);
    FOR attempt IN 1..60 LOOP
        BEGIN
            LOCK TABLE events.event IN ACCESS EXCLUSIVE MODE;
            SELECT greatest(85899345920000, ((last_value >> 32) + 1) << 32) INTO bound FROM events.event_seq_seq;
            EXECUTE format('ALTER TABLE events.event ADD CONSTRAINT event_first_bound CHECK (seq < %s) NOT VALID', bound);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(1);
        END;
    END LOOP;
    RAISE EXCEPTION 'the event log was not free for a moment in two minutes' USING ERRCODE = 'lock_not_available',
        HINT = 'End transactions that have been open for long (pg_stat_activity), and run `gpuaas migrate up` again.';
END $$;
-- +goose StatementEnd
-- +goose StatementBegin
DO $$
BEGIN
    IF (SELECT relkind = 'r' FROM pg_class WHERE oid = 'events.event'::regclass) THEN
        ALTER TABLE events.event VALIDATE CONSTRAINT event_first_bound;
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
DECLARE
    given   bigint;
    drawn   boolean;
    bound   bigint;
    waiting boolean := true;
BEGIN
    IF (SELECT relkind = 'p' FROM pg_class WHERE oid = 'events.event'::regclass) THEN
        RETURN;
    END IF;
    -- Appends wait for at most a second at a time.
    PERFORM set_config('lock_timeout', '1000', true);
    FOR attempt IN 1..60 LOOP
        BEGIN
            LOCK TABLE events.event IN ACCESS EXCLUSIVE MODE;
            waiting := false;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(1);
        END;
    END LOOP;
    IF waiting THEN
        RAISE EXCEPTION 'the event log was not free for a moment in two minutes' USING ERRCODE = 'lock_not_available',
            HINT = 'End transactions that have been open for long (pg_stat_activity), and run `gpuaas migrate up` again.';
    END IF;
    SELECT last_value, is_called INTO given, drawn FROM events.event_seq_seq;
    ALTER TABLE events.event RENAME TO event_first;
    ALTER INDEX events.event_pkey RENAME TO event_first_pkey;
    ALTER INDEX events.event_token RENAME TO event_first_token;
    ALTER TABLE events.event_first ALTER COLUMN seq DROP IDENTITY;
    CREATE TABLE events.event (LIKE events.event_first INCLUDING DEFAULTS) PARTITION BY RANGE (seq);
    ALTER TABLE events.event ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY;
    PERFORM setval('events.event_seq_seq', given, drawn);
    ALTER TABLE events.event ADD PRIMARY KEY (seq);
    ALTER TABLE events.event ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;

    GRANT SELECT ON events.event TO nodeapi, lifecycle, recovery, readmodel, sequencer;
    GRANT INSERT (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, correlation_id, tenant_id,
        workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id, correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid,
        allocation_uuid, task_uuid, node_uuid, node_instance_uuid)
        ON events.event TO nodeapi, lifecycle, recovery, readmodel;
    GRANT SELECT, DELETE ON events.event TO mesh_retention;
    GRANT SELECT ON events.event_seq_seq TO mesh_retention;
    CREATE POLICY readable ON events.event FOR SELECT TO nodeapi, lifecycle, recovery, readmodel
        USING (CASE WHEN current_setting('events.format', true) = 'protobuf, uuids' THEN true
            WHEN coalesce(correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid, node_instance_uuid) IS NULL
                AND (body IS NULL OR id IS NOT NULL AND (body_type <> '' OR body = '') AND current_setting('events.format', true) = 'protobuf') THEN true
            ELSE events.refuse_reader() END);
    CREATE POLICY numberable ON events.event FOR SELECT TO sequencer USING (true);
    CREATE POLICY own_source ON events.event FOR INSERT TO nodeapi, lifecycle, recovery, readmodel
        WITH CHECK (source = current_user::text AND kind <> '' AND aggregate_type <> '' AND aggregate_id <> '');
    CREATE POLICY cuttable_seen ON events.event FOR SELECT TO mesh_retention USING (true);
    CREATE POLICY cuttable ON events.event FOR DELETE TO mesh_retention USING (true);

    -- Partitions are reached by the rights and row policies of events.event alone: they have neither, and the owner is bound too.
    REVOKE ALL ON events.event_first FROM nodeapi, lifecycle, recovery, readmodel, sequencer, mesh_retention;
    REVOKE ALL (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, correlation_id, tenant_id,
        workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id, correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid,
        allocation_uuid, task_uuid, node_uuid, node_instance_uuid)
        ON events.event_first FROM nodeapi, lifecycle, recovery, readmodel;
    DROP POLICY readable ON events.event_first;
    DROP POLICY numberable ON events.event_first;
    DROP POLICY own_source ON events.event_first;
    DROP POLICY cuttable_seen ON events.event_first;
    DROP POLICY cuttable ON events.event_first;
    SELECT substring(pg_get_constraintdef(oid) FROM '[0-9]+') INTO STRICT bound FROM pg_constraint
        WHERE conrelid = 'events.event_first'::regclass AND conname = 'event_first_bound';
    EXECUTE format('ALTER TABLE events.event ATTACH PARTITION events.event_first FOR VALUES FROM (MINVALUE) TO (%s)', bound);
    ALTER TABLE events.event_first DROP CONSTRAINT event_first_bound;

    CREATE TABLE events.event_default (LIKE events.event INCLUDING DEFAULTS);
    ALTER TABLE events.event_default ADD PRIMARY KEY (seq);
    CREATE UNIQUE INDEX event_default_token ON events.event_default (id) WHERE id IS NOT NULL;
    ALTER TABLE events.event_default ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
    ALTER TABLE events.event ATTACH PARTITION events.event_default DEFAULT;
END $$;
-- +goose StatementEnd

-- The partitions that are dropped whole, with the seqs that they take: those of days, and event_first.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION events.partitions(OUT name text, OUT seqs int8range) RETURNS SETOF record LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.relname::text, CASE
            WHEN d.day IS NULL THEN int8range(NULL, substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO [^0-9]*([0-9]+)')::bigint)
            ELSE int8range(d.day << 32, (d.day + 1) << 32)
        END
    FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        CROSS JOIN LATERAL (
            SELECT CASE WHEN c.relname ~ '^event_[0-9]{8}$' THEN (to_date(substr(c.relname, 7), 'YYYYMMDD') - date '1970-01-01')::bigint END AS day
        ) d
    WHERE i.inhparent = 'events.event'::regclass AND (d.day IS NOT NULL OR c.relname = 'event_first')
    ORDER BY d.day NULLS FIRST
$$;
-- +goose StatementEnd

-- keep_partitions does what is due of the partitions, and reports whether it has done anything: it drops the first one whose seqs are all below a seq, sets
-- the sequence to the day, and makes the partitions of the day and of the two after it. It belongs to the owner of the log, and only the functions that cut
-- events call it: cut_events has found below what no consumer can need. An append waits for at most 200 ms for each of the locks that it cannot get.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION events.keep_partitions(below bigint) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    today bigint := floor(extract(epoch FROM mesh.clock()) / 86400);
    day   bigint;
    done  boolean := false;
    part  text;
BEGIN
    -- None of today or later, which would be made again: after a clock that was ahead the sequence is in a day to come.
    SELECT p.name INTO part FROM events.partitions() p WHERE upper(p.seqs) <= least(below, today << 32) ORDER BY p.seqs LIMIT 1;
    IF FOUND THEN
        BEGIN
            EXECUTE format('DROP TABLE events.%I', part);
            done := true;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'the partition % of events is dropped later: its lock was not free', part;
        END;
    END IF;
    IF EXISTS (SELECT FROM events.partitions() p WHERE p.seqs @> (today << 32)) AND (SELECT s.last_value < today << 32 FROM events.event_seq_seq s) THEN
        BEGIN
            -- No append is under way: one that has begun may not know of the partition yet, and the sequence must never go back.
            LOCK TABLE events.event IN SHARE MODE;
            PERFORM setval('events.event_seq_seq', today << 32, false) FROM events.event_seq_seq s WHERE s.last_value < today << 32;
            done := true;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'the day of events begins later: the lock of the log was not free';
        END;
    END IF;
    FOR ahead IN 0..2 LOOP
        day := today + ahead;
        CONTINUE WHEN EXISTS (SELECT FROM events.partitions() p WHERE p.seqs @> (day << 32));
        part := 'event_' || to_char(date '1970-01-01' + day::int, 'YYYYMMDD');
        BEGIN
            IF to_regclass('events.' || part) IS NULL THEN
                EXECUTE format('CREATE TABLE events.%I (LIKE events.event INCLUDING DEFAULTS)', part);
                EXECUTE format('ALTER TABLE events.%I ADD PRIMARY KEY (seq)', part);
                EXECUTE format('CREATE UNIQUE INDEX %I ON events.%I (id) WHERE id IS NOT NULL', part || '_token', part);
                EXECUTE format('ALTER TABLE events.%I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', part);
            END IF;
            EXECUTE format('ALTER TABLE events.event ATTACH PARTITION events.%I FOR VALUES FROM (%s) TO (%s)', part, day << 32, (day + 1) << 32);
            done := true;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                RAISE LOG 'the partition % of events is made later: a lock was not free', part;
            WHEN check_violation THEN
                RAISE LOG 'the partition % of events is made once no event of it is in the default one', part;
        END;
    END LOOP;
    RETURN done;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION events.keep_partitions(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION events.keep_partitions(bigint) TO mesh_retention;

-- The partitions of today and the next days.
SELECT events.keep_partitions(0);

-- +goose Down
DROP FUNCTION IF EXISTS events.keep_partitions(bigint);
DROP FUNCTION IF EXISTS events.partitions();
-- It writes the log anew, and nobody appends or reads meanwhile.
-- +goose StatementBegin
DO $$
DECLARE
    given bigint;
    drawn boolean;
BEGIN
    IF (SELECT relkind = 'r' FROM pg_class WHERE oid = 'events.event'::regclass) THEN
        RETURN;
    END IF;
    LOCK TABLE events.event IN ACCESS EXCLUSIVE MODE;
    SELECT last_value, is_called INTO given, drawn FROM events.event_seq_seq;
    ALTER TABLE events.event NO FORCE ROW LEVEL SECURITY;
    CREATE TABLE events.event_all (LIKE events.event INCLUDING DEFAULTS);
    INSERT INTO events.event_all SELECT * FROM events.event ORDER BY seq;
    DROP TABLE events.event;
    ALTER TABLE events.event_all RENAME TO event;
    ALTER TABLE events.event ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY;
    PERFORM setval('events.event_seq_seq', given, drawn);
    ALTER TABLE events.event ADD CONSTRAINT event_pkey PRIMARY KEY (seq);
    CREATE UNIQUE INDEX event_token ON events.event (id) WHERE id IS NOT NULL;
    ALTER TABLE events.event ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
    GRANT SELECT ON events.event TO nodeapi, lifecycle, recovery, readmodel, sequencer;
    GRANT INSERT (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, correlation_id, tenant_id,
        workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id, correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid,
        allocation_uuid, task_uuid, node_uuid, node_instance_uuid)
        ON events.event TO nodeapi, lifecycle, recovery, readmodel;
    GRANT SELECT, DELETE ON events.event TO mesh_retention;
    CREATE POLICY readable ON events.event FOR SELECT TO nodeapi, lifecycle, recovery, readmodel
        USING (CASE WHEN current_setting('events.format', true) = 'protobuf, uuids' THEN true
            WHEN coalesce(correlation_uuid, tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid, node_instance_uuid) IS NULL
                AND (body IS NULL OR id IS NOT NULL AND (body_type <> '' OR body = '') AND current_setting('events.format', true) = 'protobuf') THEN true
            ELSE events.refuse_reader() END);
    CREATE POLICY numberable ON events.event FOR SELECT TO sequencer USING (true);
    CREATE POLICY own_source ON events.event FOR INSERT TO nodeapi, lifecycle, recovery, readmodel
        WITH CHECK (source = current_user::text AND kind <> '' AND aggregate_type <> '' AND aggregate_id <> '');
    CREATE POLICY cuttable_seen ON events.event FOR SELECT TO mesh_retention USING (true);
    CREATE POLICY cuttable ON events.event FOR DELETE TO mesh_retention USING (true);
END $$;
-- +goose StatementEnd
