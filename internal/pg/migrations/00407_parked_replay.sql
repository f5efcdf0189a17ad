-- +goose Up

-- When a person has asked for a parked event to be applied again; null: nobody has. Its consumer does it with its next batch, which the entry of the
-- audit log brings about, and clears it if the event cannot be applied this time either.
ALTER TABLE nodeapi.parked_event ADD COLUMN asked_at timestamptz;
ALTER TABLE lifecycle.parked_event ADD COLUMN asked_at timestamptz;
ALTER TABLE recovery.parked_event ADD COLUMN asked_at timestamptz;
ALTER TABLE readmodel.parked_event ADD COLUMN asked_at timestamptz;
CREATE INDEX parked_event_asked ON nodeapi.parked_event (consumer, pos) WHERE asked_at IS NOT NULL;
CREATE INDEX parked_event_asked ON lifecycle.parked_event (consumer, pos) WHERE asked_at IS NOT NULL;
CREATE INDEX parked_event_asked ON recovery.parked_event (consumer, pos) WHERE asked_at IS NOT NULL;
CREATE INDEX parked_event_asked ON readmodel.parked_event (consumer, pos) WHERE asked_at IS NOT NULL;

-- The parked events of all services, for readmodel, which may not read the tables of others: up to `most` behind a place, in the order of service,
-- consumer and position. An empty service or consumer means all.
-- +goose StatementBegin
CREATE FUNCTION mesh.parked_events(of_service text, of_name text, after_service text, after_name text, after_pos bigint, most integer)
RETURNS TABLE (service text, consumer text, pos bigint, event_id uuid, kind text, error text, attempts integer, parked_at timestamptz, asked_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s text;
    n bigint;
BEGIN
    FOREACH s IN ARRAY ARRAY['lifecycle', 'nodeapi', 'readmodel', 'recovery'] LOOP
        CONTINUE WHEN s < after_service OR (of_service <> '' AND s <> of_service);
        RETURN QUERY EXECUTE format('SELECT %L::text, p.consumer, p.pos, p.event_id, p.kind, p.error, p.attempts, p.parked_at, p.asked_at
            FROM %I.parked_event p WHERE (p.consumer, p.pos) > ($1, $2) AND ($3 = '''' OR p.consumer = $3)
            ORDER BY p.consumer, p.pos LIMIT $4', s, s)
            USING CASE WHEN s = after_service THEN after_name ELSE '' END, CASE WHEN s = after_service THEN after_pos ELSE 0 END, of_name, most;
        GET DIAGNOSTICS n = ROW_COUNT;
        most := most - n;
        EXIT WHEN most <= 0;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.parked_events(text, text, text, text, bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.parked_events(text, text, text, text, bigint, integer) TO readmodel;

-- Has the consumer apply what it has parked at a position, or at each one (0), up to `most`, again. It returns how many it has marked, those marked
-- before not among them.
-- +goose StatementBegin
CREATE FUNCTION mesh.replay_parked_events(of_service text, of_name text, of_pos bigint, most integer)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    n bigint;
BEGIN
    IF of_service NOT IN ('nodeapi', 'lifecycle', 'recovery', 'readmodel') THEN
        RAISE EXCEPTION '% is no service', of_service USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('UPDATE %1$I.parked_event p SET asked_at = mesh.clock() WHERE p.consumer = $1 AND p.pos = ANY (ARRAY(
        SELECT x.pos FROM %1$I.parked_event x WHERE x.consumer = $1 AND ($2 = 0 OR x.pos = $2) AND x.asked_at IS NULL
        ORDER BY x.pos LIMIT $3)) AND p.asked_at IS NULL', of_service) USING of_name, of_pos, most;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.replay_parked_events(text, text, bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.replay_parked_events(text, text, bigint, integer) TO readmodel;

-- Takes a parked event off the list: its consumer passes it over for good. It waits for a transaction that applies the event now. No row: it was not
-- there.
-- +goose StatementBegin
CREATE FUNCTION mesh.drop_parked_event(of_service text, of_name text, of_pos bigint)
RETURNS TABLE (service text, consumer text, pos bigint, event_id uuid, kind text, error text, attempts integer, parked_at timestamptz, asked_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF of_service NOT IN ('nodeapi', 'lifecycle', 'recovery', 'readmodel') THEN
        RAISE EXCEPTION '% is no service', of_service USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN QUERY EXECUTE format('DELETE FROM %I.parked_event p WHERE p.consumer = $1 AND p.pos = $2
        RETURNING %L::text, p.consumer, p.pos, p.event_id, p.kind, p.error, p.attempts, p.parked_at, p.asked_at', of_service, of_service)
        USING of_name, of_pos;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.drop_parked_event(text, text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.drop_parked_event(text, text, bigint) TO readmodel;

-- +goose Down
DROP FUNCTION mesh.drop_parked_event(text, text, bigint);
DROP FUNCTION mesh.replay_parked_events(text, text, bigint, integer);
DROP FUNCTION mesh.parked_events(text, text, text, text, bigint, integer);
ALTER TABLE readmodel.parked_event DROP COLUMN asked_at;
ALTER TABLE recovery.parked_event DROP COLUMN asked_at;
ALTER TABLE lifecycle.parked_event DROP COLUMN asked_at;
ALTER TABLE nodeapi.parked_event DROP COLUMN asked_at;
