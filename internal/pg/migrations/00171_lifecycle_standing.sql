-- +goose NO TRANSACTION
-- +goose Up

-- What of its tenant's a workspace takes, by its state: its name and its part of the quota (2), its name (1: it has failed), nothing (0: it is
-- decommissioned). The indexes of names and of use ask for this and not for the state, which every saga changes twice: then a change of the state stays
-- on its page and writes to no index. The trigger that seals the row keeps it, whatever a statement says, so that the build before need not write it.
-- What that build asks for is the state, for which there is no index any more: until its replicas are replaced each create of theirs reads the table.
ALTER TABLE lifecycle.workspace ADD COLUMN IF NOT EXISTS standing smallint NOT NULL DEFAULT 2;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.leave_evidence(what text, tab text, was jsonb, is_now jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after)
    VALUES (what, CASE tab WHEN 'saga_run' THEN 'run' ELSE tab END, (coalesce(is_now, was)->>(CASE tab WHEN 'allocation' THEN 'allocation_id' ELSE 'id' END))::uuid,
        was - 'seal' - 'standing', is_now - 'seal' - 'standing');
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
    IF TG_TABLE_NAME = 'workspace' THEN
        NEW.standing := CASE NEW.state WHEN 'decommissioned' THEN 0 WHEN 'failed' THEN 1 ELSE 2 END;
    END IF;
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
-- +goose StatementEnd
UPDATE lifecycle.workspace w SET standing = 0 WHERE w.state IN ('failed', 'decommissioned') AND w.standing = 2;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_name_new;
CREATE UNIQUE INDEX CONCURRENTLY workspace_name_new ON lifecycle.workspace (tenant_id, name) WHERE standing > 0;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_name;
ALTER INDEX lifecycle.workspace_name_new RENAME TO workspace_name;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_in_use;
CREATE INDEX CONCURRENTLY workspace_in_use ON lifecycle.workspace (tenant_id) WHERE standing = 2;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_in_use;
CREATE INDEX CONCURRENTLY workspace_in_use ON lifecycle.workspace (tenant_id) WHERE state NOT IN ('failed', 'decommissioned');
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_name_new;
CREATE UNIQUE INDEX CONCURRENTLY workspace_name_new ON lifecycle.workspace (tenant_id, name) WHERE state <> 'decommissioned';
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_name;
ALTER INDEX lifecycle.workspace_name_new RENAME TO workspace_name;
-- +goose StatementBegin
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
-- +goose StatementEnd
ALTER TABLE lifecycle.workspace DROP COLUMN standing;
CALL lifecycle.seal_again();
