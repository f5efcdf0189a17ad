-- +goose Up

-- One drift guard: the trigger alone. A session of the product carries a setting (gpuaas.writer, set by every pool that the product opens); the trigger
-- takes a write in a session without it for one by hand and leaves evidence, whatever the statement says of the seal. What the event log says of a row is
-- not compared any more.

-- The shapes that a table had before columns were added to it: a seal that was put on then fits the row still, if the columns that came later hold what
-- they were added with. Only rows whose seal does not fit as it is come here.
-- +goose StatementBegin
CREATE FUNCTION lifecycle.fits_former_shape(r anyelement, sealed bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    shape text;
    fits  boolean;
BEGIN
    FOR shape IN
        SELECT format('hash_record_extended(ROW(%s), 0) IS NOT DISTINCT FROM $2',
                   string_agg(CASE WHEN a.attname = 'seal' THEN 'NULL::bigint' ELSE format('($1).%I', a.attname) END, ', ' ORDER BY a.attnum)
                       FILTER (WHERE a.attnum <= upto.attnum))
            || coalesce(string_agg(format(' AND ($1).%I IS NOT DISTINCT FROM %s', a.attname, CASE
                   WHEN a.atthasmissing THEN format('%L::%s', (a.attmissingval::text::text[])[1], format_type(a.atttypid, a.atttypmod))
                   ELSE coalesce(pg_get_expr(d.adbin, d.adrelid), 'NULL') END), '') FILTER (WHERE a.attnum > upto.attnum), '')
        FROM pg_type t
            JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
            LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            JOIN pg_attribute upto ON upto.attrelid = a.attrelid AND NOT upto.attisdropped
            JOIN pg_attribute seal ON seal.attrelid = a.attrelid AND seal.attname = 'seal' AND upto.attnum >= seal.attnum
        WHERE t.oid = pg_typeof(r)
        GROUP BY upto.attnum HAVING upto.attnum < max(a.attnum) ORDER BY upto.attnum DESC
    LOOP
        EXECUTE 'SELECT ' || shape INTO fits USING r, sealed;
        IF fits THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END $$;

-- Whether a row fits its seal.
CREATE FUNCTION lifecycle.seal_fits(r anyelement) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    of_row record;
    sealed bigint;
BEGIN
    of_row := r;
    sealed := of_row.seal;
    of_row.seal := NULL;
    RETURN sealed IS NOT DISTINCT FROM hash_record_extended(of_row, 0) OR lifecycle.fits_former_shape(r, sealed);
END $$;

CREATE OR REPLACE FUNCTION lifecycle.leave_evidence(what text, tab text, was jsonb, is_now jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after)
    VALUES (what, CASE tab WHEN 'saga_run' THEN 'run' ELSE tab END, (coalesce(is_now, was)->>(CASE tab WHEN 'allocation' THEN 'allocation_id' ELSE 'id' END))::uuid,
        was - 'seal', is_now - 'seal');
END $$;

CREATE OR REPLACE FUNCTION lifecycle.seal_row() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    by_hand boolean := current_setting('gpuaas.writer', true) IS DISTINCT FROM 'product';
    sealed  bigint;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        sealed := OLD.seal;
        OLD.seal := NULL;
        IF sealed IS DISTINCT FROM hash_record_extended(OLD, 0)
            AND NOT lifecycle.fits_former_shape(OLD, sealed) AND current_setting('gpuaas.seal_again', true) IS DISTINCT FROM 'on' THEN
            PERFORM lifecycle.leave_evidence('unsealed', TG_TABLE_NAME, NULL, to_jsonb(OLD));
        END IF;
        IF TG_OP = 'DELETE' THEN
            IF by_hand THEN
                PERFORM lifecycle.leave_evidence('delete', TG_TABLE_NAME, to_jsonb(OLD), NULL);
            END IF;
            RETURN OLD;
        END IF;
    END IF;
    NEW.seal := NULL;
    IF by_hand THEN
        IF TG_OP = 'INSERT' THEN
            PERFORM lifecycle.leave_evidence('insert', TG_TABLE_NAME, NULL, to_jsonb(NEW));
        ELSIF OLD IS DISTINCT FROM NEW THEN
            PERFORM lifecycle.leave_evidence('update', TG_TABLE_NAME, to_jsonb(OLD), to_jsonb(NEW));
        END IF;
    END IF;
    NEW.seal := hash_record_extended(NEW, 0);
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION lifecycle.rows_truncated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('gpuaas.writer', true) IS DISTINCT FROM 'product' THEN
        EXECUTE format('SELECT lifecycle.leave_evidence(''delete'', %L, to_jsonb(x), NULL) FROM lifecycle.%I x', TG_TABLE_NAME, TG_TABLE_NAME);
    END IF;
    RETURN NULL;
END $$;

-- The devices of an allocation are rows of their own: what a hand does to them is evidence on the allocation. A device is a field of it whose value is
-- the node that it is on.
CREATE FUNCTION lifecycle.hold_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after)
        SELECT 'update', 'allocation', a.allocation_id, o || jsonb_build_object('device ' || OLD.device_id, OLD.node_id), o
        FROM lifecycle.allocation a, LATERAL (SELECT jsonb_build_object('workspace_id', a.workspace_id,
            'tenant_id', a.tenant_id, 'node_id', a.node_id, 'version', a.version) AS o) x
        WHERE a.allocation_id = OLD.allocation_id;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after)
        SELECT 'update', 'allocation', a.allocation_id, o, o || jsonb_build_object('device ' || NEW.device_id, NEW.node_id)
        FROM lifecycle.allocation a, LATERAL (SELECT jsonb_build_object('workspace_id', a.workspace_id,
            'tenant_id', a.tenant_id, 'node_id', a.node_id, 'version', a.version) AS o) x
        WHERE a.allocation_id = NEW.allocation_id;
    END IF;
    RETURN NULL;
END $$;

-- For a migration that takes a column of the three tables away or changes its type: what stands in the rows counts as the product's from here on. A
-- migration that adds a column has no need of it.
CREATE OR REPLACE PROCEDURE lifecycle.seal_again() LANGUAGE plpgsql AS $$
DECLARE
    tab regclass;
BEGIN
    PERFORM set_config('gpuaas.seal_again', 'on', true);
    FOREACH tab IN ARRAY ARRAY['lifecycle.workspace', 'lifecycle.saga_run', 'lifecycle.allocation']::regclass[] LOOP
        EXECUTE format('UPDATE %s x SET seal = NULL WHERE NOT lifecycle.seal_fits(x)', tab);
    END LOOP;
    PERFORM set_config('gpuaas.seal_again', '', true);
END $$;
-- +goose StatementEnd
DROP FUNCTION lifecycle.digest(lifecycle.workspace);
DROP FUNCTION lifecycle.digest(lifecycle.saga_run);
DROP FUNCTION lifecycle.digest(lifecycle.allocation);

CREATE TRIGGER hold_changed AFTER INSERT OR UPDATE OR DELETE ON lifecycle.gpu_hold
    FOR EACH ROW WHEN (current_setting('gpuaas.writer', true) IS DISTINCT FROM 'product') EXECUTE FUNCTION lifecycle.hold_changed();

-- ALWAYS: also in a session with session_replication_role = replica.
ALTER TABLE lifecycle.workspace ENABLE ALWAYS TRIGGER seal_row, ENABLE ALWAYS TRIGGER rows_truncated;
ALTER TABLE lifecycle.saga_run ENABLE ALWAYS TRIGGER seal_row, ENABLE ALWAYS TRIGGER rows_truncated;
ALTER TABLE lifecycle.allocation ENABLE ALWAYS TRIGGER seal_row, ENABLE ALWAYS TRIGGER rows_truncated;
ALTER TABLE lifecycle.gpu_hold ENABLE ALWAYS TRIGGER hold_changed;

DROP TABLE lifecycle.row_witness;
-- What follows the log reads agents' reports alone.
UPDATE lifecycle.event_cursor SET name = 'workload-reports' WHERE name = 'row-witness';

-- +goose Down
UPDATE lifecycle.event_cursor SET name = 'row-witness' WHERE name = 'workload-reports';
CREATE TABLE lifecycle.row_witness (
    row_type    text        NOT NULL CHECK (row_type IN ('workspace', 'run', 'allocation')),
    row_id      uuid        NOT NULL,
    version     bigint      NOT NULL,
    payload     jsonb       NOT NULL,
    over_at     timestamptz,
    agreed_xmin text        NOT NULL DEFAULT '',
    image       jsonb,
    breach      jsonb,
    breach_at   timestamptz,
    PRIMARY KEY (row_type, row_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX row_witness_over ON lifecycle.row_witness (over_at) WHERE over_at IS NOT NULL;
CREATE INDEX row_witness_breach ON lifecycle.row_witness (breach_at) WHERE breach_at IS NOT NULL;
ALTER TABLE lifecycle.allocation ENABLE TRIGGER seal_row, ENABLE TRIGGER rows_truncated;
ALTER TABLE lifecycle.saga_run ENABLE TRIGGER seal_row, ENABLE TRIGGER rows_truncated;
ALTER TABLE lifecycle.workspace ENABLE TRIGGER seal_row, ENABLE TRIGGER rows_truncated;
DROP TRIGGER hold_changed ON lifecycle.gpu_hold;
DROP FUNCTION lifecycle.hold_changed();
-- +goose StatementBegin
CREATE FUNCTION lifecycle.digest(r lifecycle.workspace) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    r.seal := NULL;
    RETURN hash_record_extended(r, 0);
END $$;
CREATE FUNCTION lifecycle.digest(r lifecycle.saga_run) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    r.seal := NULL;
    RETURN hash_record_extended(r, 0);
END $$;
CREATE FUNCTION lifecycle.digest(r lifecycle.allocation) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    r.seal := NULL;
    RETURN hash_record_extended(r, 0);
END $$;
CREATE OR REPLACE FUNCTION lifecycle.leave_evidence(what text, tab text, was jsonb, is_now jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    kind  text := CASE tab WHEN 'saga_run' THEN 'run' ELSE tab END;
    found uuid := coalesce(is_now, was)->>(CASE tab WHEN 'allocation' THEN 'allocation_id' ELSE 'id' END);
BEGIN
    IF what = 'unsealed' THEN
        SELECT v.image INTO was FROM lifecycle.row_witness v WHERE v.row_type = kind AND v.row_id = found;
    END IF;
    INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after) VALUES (what, kind, found, was - 'seal', is_now - 'seal');
END $$;
CREATE OR REPLACE FUNCTION lifecycle.seal_row() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    sealed bigint;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        sealed := OLD.seal;
        OLD.seal := NULL;
        IF sealed IS DISTINCT FROM hash_record_extended(OLD, 0) THEN
            PERFORM lifecycle.leave_evidence('unsealed', TG_TABLE_NAME, NULL, to_jsonb(OLD));
        END IF;
        IF TG_OP = 'DELETE' THEN
            PERFORM lifecycle.leave_evidence('delete', TG_TABLE_NAME, to_jsonb(OLD), NULL);
            RETURN OLD;
        END IF;
    END IF;
    sealed := NEW.seal;
    NEW.seal := NULL;
    IF TG_OP = 'INSERT' THEN
        IF sealed IS DISTINCT FROM 1 THEN
            PERFORM lifecycle.leave_evidence('insert', TG_TABLE_NAME, NULL, to_jsonb(NEW));
        END IF;
    ELSIF sealed IS NOT NULL AND OLD IS DISTINCT FROM NEW THEN
        PERFORM lifecycle.leave_evidence('update', TG_TABLE_NAME, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    NEW.seal := hash_record_extended(NEW, 0);
    RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION lifecycle.rows_truncated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('SELECT lifecycle.leave_evidence(''delete'', %L, to_jsonb(x), NULL) FROM lifecycle.%I x', TG_TABLE_NAME, TG_TABLE_NAME);
    RETURN NULL;
END $$;
CREATE OR REPLACE PROCEDURE lifecycle.seal_again() LANGUAGE plpgsql AS $$
DECLARE
    tab regclass;
BEGIN
    FOREACH tab IN ARRAY ARRAY['lifecycle.workspace', 'lifecycle.saga_run', 'lifecycle.allocation']::regclass[] LOOP
        EXECUTE format('ALTER TABLE %s DISABLE TRIGGER seal_row', tab);
        EXECUTE format('UPDATE %s x SET seal = lifecycle.digest(x)', tab);
        EXECUTE format('ALTER TABLE %s ENABLE TRIGGER seal_row', tab);
    END LOOP;
END $$;
-- +goose StatementEnd
DROP FUNCTION lifecycle.seal_fits(anyelement);
DROP FUNCTION lifecycle.fits_former_shape(anyelement, bigint);
