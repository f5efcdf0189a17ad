-- +goose Up

-- What recovery has seen of each node, and when it must be judged again. A row is made with the node's identity and goes
-- with it.
CREATE TABLE recovery.judgement (
    node_id         uuid        PRIMARY KEY,
    identity_state  text        NOT NULL,
    session_id      uuid,                        -- the newest session that was admitted
    generation      bigint      NOT NULL,        -- of that session
    session_version bigint      NOT NULL,        -- of its last event that is part of this row
    replica_id      uuid,                        -- the replica of nodeapi that serves the node; null: none does
    silent_since    timestamptz,                 -- when it was heard last, for one that none serves and that is not judged silent yet
    due_at          timestamptz                  -- null: all that was seen of it is judged
) WITH (fillfactor = 70);
CREATE INDEX judgement_due ON recovery.judgement (due_at, node_id) WHERE due_at IS NOT NULL;
CREATE INDEX judgement_silent ON recovery.judgement (silent_since, node_id) WHERE silent_since IS NOT NULL;
CREATE INDEX judgement_served_by ON recovery.judgement (replica_id, node_id) WHERE replica_id IS NOT NULL;

-- The last observation of each part of a node by each source; of the nil UUID: of the control plane. It changes when what was seen changes.
CREATE TABLE recovery.evidence (
    node_id        uuid        NOT NULL,
    part           text        NOT NULL,
    source         text        NOT NULL,
    reason         text        NOT NULL,         -- unspecified: the part is well
    observed_at    timestamptz NOT NULL,
    fresh_until    timestamptz,                  -- null: until it is replaced
    detail         text        NOT NULL,
    correlation_id text        NOT NULL,
    version        bigint      NOT NULL,         -- of the source's row
    PRIMARY KEY (node_id, part, source)
) WITH (fillfactor = 70);

-- The present verdict on each node of which there ever was one, and on the control plane.
CREATE TABLE recovery.verdict (
    node_id uuid   PRIMARY KEY,
    reason  text   NOT NULL,                     -- unspecified: nothing is wrong any more
    body    bytea  NOT NULL,                     -- gpuaas.recovery.v1.NodeVerdict
    began   bigint NOT NULL,                     -- the version that began this reason
    version bigint NOT NULL
) WITH (fillfactor = 70);
INSERT INTO recovery.verdict (node_id, reason, body, began, version) VALUES ('00000000-0000-0000-0000-000000000000', 'unspecified', '', 0, 0);

-- Verdicts that have ended; the id is of the time of the end.
CREATE TABLE recovery.verdict_period (
    period_id      uuid        PRIMARY KEY,
    node_id        uuid        NOT NULL,
    reason         text        NOT NULL,
    severity       text        NOT NULL,
    observed_at    timestamptz NOT NULL,
    detected_at    timestamptz NOT NULL,
    ended_at       timestamptz NOT NULL,
    correlation_id text        NOT NULL,
    version        bigint      NOT NULL          -- of the verdict that began it
);

-- Up to which time a service has judged what was there to be judged: an older verdict is as good as its evidence no more.
CREATE TABLE mesh.judged (
    service text        PRIMARY KEY,
    through timestamptz NOT NULL,
    noted   boolean     NOT NULL DEFAULT true -- by the service; false: by the migration, before the service has judged anything
) WITH (fillfactor = 50);
GRANT SELECT, INSERT, UPDATE ON mesh.judged TO recovery;
GRANT SELECT ON mesh.judged TO readmodel;
-- Until a replica of recovery of this build judges, verdicts are missing: readmodel shows since when.
INSERT INTO mesh.judged (service, through, noted) VALUES ('recovery', mesh.clock(), false);

-- The nodes that are there already. Their gates are read from events.
INSERT INTO recovery.judgement (node_id, identity_state, session_id, generation, session_version, replica_id, silent_since, due_at)
SELECT i.node_id, i.state, s.session_id, COALESCE(s.generation, 0), COALESCE(s.version, 0), CASE WHEN s.serving THEN s.replica_id END,
    CASE WHEN i.state = 'active' AND NOT COALESCE(s.serving, false) THEN COALESCE(s.since, mesh.clock()) END, mesh.clock()
FROM recovery.identity i
LEFT JOIN LATERAL (SELECT w.session_id, w.generation, w.version, w.replica_id, w.serving AND w.replica_id IS NOT NULL AS serving, w.since
    FROM recovery.watch_session w WHERE w.node_id = i.node_id ORDER BY w.serving DESC, w.generation DESC LIMIT 1) s ON true;

INSERT INTO recovery.evidence (node_id, part, source, reason, observed_at, detail, correlation_id, version)
SELECT i.node_id, 'certificate', 'identity', r.reason, i.state_at,
    CASE WHEN r.reason IN ('identity_revoked_or_fenced', 'unspecified') THEN i.state ELSE i.state_reason END, '', i.version
FROM recovery.identity i CROSS JOIN LATERAL (SELECT CASE
    WHEN i.state = 'retired' THEN 'identity_revoked_or_fenced'
    WHEN i.alarm IN ('cloned_identity_detected', 'token_reuse') THEN i.alarm
    WHEN i.state = 'held' AND i.alarm = 'join_state_lost' THEN i.alarm
    WHEN i.state = 'held' THEN 'identity_held'
    WHEN i.state IN ('quarantined', 'fenced') THEN 'identity_revoked_or_fenced'
    ELSE 'unspecified' END AS reason) r
UNION ALL
SELECT j.node_id, 'process', 'session', CASE WHEN j.replica_id IS NULL THEN 'disconnected' ELSE 'unspecified' END,
    COALESCE(j.silent_since, mesh.clock()), '', '', 0
FROM recovery.judgement j WHERE j.identity_state <> 'pending';

-- A node's rows go with its identity; what its verdicts were stays for a term of its own.
DROP FUNCTION recovery.cut_identities(interval, uuid, integer);
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
    suspects AS (DELETE FROM recovery.suspect s USING gone g WHERE s.node_id = g.id),
    judgements AS (DELETE FROM recovery.judgement s USING gone g WHERE s.node_id = g.id),
    evidence AS (DELETE FROM recovery.evidence s USING gone g WHERE s.node_id = g.id),
    verdicts AS (DELETE FROM recovery.verdict s USING gone g WHERE s.node_id = g.id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_verdict_periods(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.period_id AS id FROM recovery.verdict_period t
        WHERE t.period_id > lowest AND t.period_id < mesh.first_id(until) ORDER BY t.period_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.verdict_period t WHERE t.period_id = ANY (seen) AND t.ended_at < until
        RETURNING t.period_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION recovery.cut_identities(interval, uuid, integer), recovery.cut_verdict_periods(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION recovery.cut_identities(interval, uuid, integer), recovery.cut_verdict_periods(interval, uuid, integer) TO recovery;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
ALTER FUNCTION recovery.cut_identities(interval, uuid, integer) OWNER TO mesh_retention;
ALTER FUNCTION recovery.cut_verdict_periods(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;
GRANT SELECT, DELETE ON recovery.judgement, recovery.evidence, recovery.verdict, recovery.verdict_period TO mesh_retention;

-- +goose Down
DROP FUNCTION recovery.cut_identities(interval, uuid, integer);
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
REVOKE ALL ON FUNCTION recovery.cut_identities(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION recovery.cut_identities(interval, uuid, integer) TO recovery;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
ALTER FUNCTION recovery.cut_identities(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;
DROP FUNCTION recovery.cut_verdict_periods(interval, uuid, integer);
DROP TABLE mesh.judged, recovery.verdict_period, recovery.verdict, recovery.evidence, recovery.judgement;
