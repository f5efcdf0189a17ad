-- +goose Up

-- The evidence that is not settled. A sweep reads this instead of comparing all evidence with all that is settled.
-- Triggers alone write it: one of the evidence, whichever function leaves it, and one of what is settled, by whichever
-- build. Both fire also under session_replication_role = replica.
LOCK TABLE lifecycle.row_evidence_settled, lifecycle.row_evidence IN SHARE ROW EXCLUSIVE MODE;
CREATE TABLE lifecycle.row_evidence_open (
    evidence_id bigint PRIMARY KEY REFERENCES lifecycle.row_evidence (evidence_id) ON DELETE CASCADE
);

-- +goose StatementBegin
CREATE FUNCTION lifecycle.evidence_opens() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lifecycle.row_evidence_open (evidence_id) VALUES (NEW.evidence_id);
    RETURN NULL;
END $$;

CREATE FUNCTION lifecycle.evidence_settles() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM lifecycle.row_evidence_open o WHERE o.evidence_id = NEW.evidence_id;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER evidence_opens AFTER INSERT ON lifecycle.row_evidence
    FOR EACH ROW EXECUTE FUNCTION lifecycle.evidence_opens();
CREATE TRIGGER evidence_settles AFTER INSERT ON lifecycle.row_evidence_settled
    FOR EACH ROW EXECUTE FUNCTION lifecycle.evidence_settles();
ALTER TABLE lifecycle.row_evidence ENABLE ALWAYS TRIGGER evidence_opens;
ALTER TABLE lifecycle.row_evidence_settled ENABLE ALWAYS TRIGGER evidence_settles;

INSERT INTO lifecycle.row_evidence_open (evidence_id)
    SELECT e.evidence_id FROM lifecycle.row_evidence e
    WHERE NOT EXISTS (SELECT FROM lifecycle.row_evidence_settled s WHERE s.evidence_id = e.evidence_id);

CREATE TRIGGER evidence_by_trigger BEFORE INSERT OR DELETE ON lifecycle.row_evidence_open
    FOR EACH STATEMENT WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION lifecycle.evidence_stays();
CREATE TRIGGER evidence_stays BEFORE UPDATE OR TRUNCATE ON lifecycle.row_evidence_open
    FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.evidence_stays();
REVOKE UPDATE, TRUNCATE ON lifecycle.row_evidence_open FROM lifecycle;
-- A row that does not fit its seal leaves evidence when it is cut.
GRANT INSERT ON lifecycle.row_evidence_open TO mesh_retention;

-- What the open findings speak of is read once, not once for each row that is settled. Only findings of this kind have
-- evidence.
DROP FUNCTION lifecycle.cut_evidence(interval, uuid, integer);
GRANT CREATE ON SCHEMA lifecycle TO mesh_retention;
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_evidence(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH spoken AS MATERIALIZED (
        SELECT DISTINCT u.id FROM lifecycle.finding f CROSS JOIN LATERAL unnest(f.evidence) AS u (id)
        WHERE f.resolved_at IS NULL AND f.kind = 'row_changed_outside'
    ), over AS (
        SELECT s.evidence_id AS id FROM lifecycle.row_evidence_settled s WHERE s.settled_at < until
            AND NOT EXISTS (SELECT FROM spoken p WHERE p.id = s.evidence_id)
        ORDER BY s.evidence_id LIMIT most
    ), settled AS (
        DELETE FROM lifecycle.row_evidence_settled s USING over o WHERE s.evidence_id = o.id
    ), gone AS (
        DELETE FROM lifecycle.row_evidence e USING over o WHERE e.evidence_id = o.id RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION lifecycle.cut_evidence(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lifecycle.cut_evidence(interval, uuid, integer) TO lifecycle;
ALTER FUNCTION lifecycle.cut_evidence(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA lifecycle FROM mesh_retention;

-- +goose Down
DROP FUNCTION lifecycle.cut_evidence(interval, uuid, integer);
GRANT CREATE ON SCHEMA lifecycle TO mesh_retention;
-- +goose StatementBegin
CREATE FUNCTION lifecycle.cut_evidence(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    WITH over AS (
        SELECT s.evidence_id AS id FROM lifecycle.row_evidence_settled s WHERE s.settled_at < until
            AND NOT EXISTS (SELECT FROM lifecycle.finding f
                WHERE f.resolved_at IS NULL AND s.evidence_id = ANY (f.evidence))
        ORDER BY s.evidence_id LIMIT most
    ), settled AS (
        DELETE FROM lifecycle.row_evidence_settled s USING over o WHERE s.evidence_id = o.id
    ), gone AS (
        DELETE FROM lifecycle.row_evidence e USING over o WHERE e.evidence_id = o.id RETURNING 1)
    SELECT count(*) INTO cut FROM gone;
    next := CASE WHEN cut = most THEN lowest END;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION lifecycle.cut_evidence(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lifecycle.cut_evidence(interval, uuid, integer) TO lifecycle;
ALTER FUNCTION lifecycle.cut_evidence(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA lifecycle FROM mesh_retention;
DROP TRIGGER evidence_settles ON lifecycle.row_evidence_settled;
DROP TRIGGER evidence_opens ON lifecycle.row_evidence;
DROP TABLE lifecycle.row_evidence_open;
DROP FUNCTION lifecycle.evidence_settles();
DROP FUNCTION lifecycle.evidence_opens();
