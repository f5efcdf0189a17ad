-- +goose Up

-- What a sweep holds for broken: one open row for each (kind, subject).
CREATE TABLE lifecycle.finding (
    finding_id    uuid        PRIMARY KEY,
    kind          text        NOT NULL CHECK (kind IN ('node_occupied_without_allocation', 'allocation_without_occupancy', 'instance_without_row',
                                  'claim_without_resource', 'resource_without_claim', 'successive_provisions', 'row_changed_outside')),
    severity      text        NOT NULL CHECK (severity IN ('p0', 'p1', 'p2')),
    subject_type  text        NOT NULL CHECK (subject_type <> ''),
    subject_id    text        NOT NULL CHECK (subject_id <> ''),
    -- The look that sees it: only a later one of its own, and a whole one, resolves it.
    source        text        NOT NULL,
    tenant_id     uuid,
    workspace_id  uuid,
    node_id       uuid,
    allocation_id uuid,
    summary       text        NOT NULL CHECK (summary <> ''),
    next_action   text        NOT NULL CHECK (next_action <> ''),
    before        jsonb       NOT NULL DEFAULT '{}',
    after         jsonb       NOT NULL DEFAULT '{}',
    cordoned      boolean     NOT NULL DEFAULT false,
    first_seen_at timestamptz NOT NULL DEFAULT mesh.clock(),
    last_seen_at  timestamptz NOT NULL DEFAULT mesh.clock(),
    resolved_at   timestamptz,
    count         bigint      NOT NULL DEFAULT 1,
    version       bigint      NOT NULL DEFAULT 1,
    evidence      bigint[]    NOT NULL DEFAULT '{}', -- of row_evidence: what an acknowledgement settles
    acknowledged_by    text   NOT NULL DEFAULT '',
    acknowledge_reason text   NOT NULL DEFAULT ''
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX finding_open ON lifecycle.finding (kind, subject_type, subject_id) WHERE resolved_at IS NULL;
CREATE INDEX finding_of_node ON lifecycle.finding (node_id) WHERE resolved_at IS NULL AND cordoned;

-- What was seen and is not yet a finding: it needs a second look, and to be older than work under way takes to commit.
CREATE TABLE lifecycle.suspicion (
    kind         text        NOT NULL,
    subject_type text        NOT NULL,
    subject_id   text        NOT NULL,
    source       text        NOT NULL,
    since        timestamptz NOT NULL DEFAULT mesh.clock(),
    looks        integer     NOT NULL DEFAULT 1,
    PRIMARY KEY (kind, subject_type, subject_id)
);

-- What the event log last said of a row that sagas own. The guard alone writes it, behind the writers, from the log.
CREATE TABLE lifecycle.row_witness (
    row_type    text        NOT NULL CHECK (row_type IN ('workspace', 'run', 'allocation')),
    row_id      uuid        NOT NULL,
    version     bigint      NOT NULL,
    payload     jsonb       NOT NULL,
    over_at     timestamptz,          -- when its life ended, by the log
    agreed_xmin text        NOT NULL DEFAULT '', -- the transaction of the row that was last found to agree
    -- The whole row as it stood when it last agreed: what it was before, of a change that no trigger saw.
    image       jsonb,
    breach      jsonb,                -- a break within the log itself; it stays until a person has acknowledged it
    breach_at   timestamptz,
    PRIMARY KEY (row_type, row_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX row_witness_over ON lifecycle.row_witness (over_at) WHERE over_at IS NOT NULL;
CREATE INDEX row_witness_breach ON lifecycle.row_witness (breach_at) WHERE breach_at IS NOT NULL;

-- What the agent on a node last said of the workloads of a workspace. Untrusted evidence.
CREATE TABLE lifecycle.observed_workload (
    workspace_id uuid        NOT NULL,
    node_id      uuid        NOT NULL,
    payload      jsonb       NOT NULL,
    observed_at  timestamptz NOT NULL, -- by the database's clock, when it was written down
    PRIMARY KEY (workspace_id, node_id)
) WITH (fillfactor = 70);

-- The seal of a row: a digest over all its other columns. Whoever writes such a row within the product breaks the seal (SET seal = NULL; 1 in a new
-- row), and the trigger puts on a new one: that is how it tells the product's writes from all others, statement by statement. An UPDATE that leaves the
-- seal alone, an INSERT that does not name it and any DELETE leave evidence. A row that was written while the trigger did not fire no longer fits its
-- seal: the next write finds out, or the next sweep.
--
-- hash_record_extended rather than a digest of the row's text: it costs a few microseconds, and no setting of a session (time zone, encoding) changes it.
-- Its values are stored on disk by partitioned tables, and so stay the same in later versions. A migration that adds or alters a column of these tables
-- ends with CALL lifecycle.seal_again().
ALTER TABLE lifecycle.workspace ADD COLUMN seal bigint DEFAULT 0;
ALTER TABLE lifecycle.saga_run ADD COLUMN seal bigint DEFAULT 0;
ALTER TABLE lifecycle.allocation ADD COLUMN seal bigint DEFAULT 0;

-- What was done to sealed rows behind the product's back. Rows are added, and never changed by anybody.
CREATE TABLE lifecycle.row_evidence (
    evidence_id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at               timestamptz NOT NULL DEFAULT mesh.clock(), -- of a change by `unsealed`: when it was noticed
    op               text        NOT NULL CHECK (op IN ('insert', 'update', 'delete', 'unsealed')),
    row_type         text        NOT NULL CHECK (row_type IN ('workspace', 'run', 'allocation')),
    row_id           uuid        NOT NULL,
    before           jsonb,      -- of `unsealed`: as a sweep last saw it, if one did
    after            jsonb,
    db_user          text        NOT NULL DEFAULT session_user,
    application_name text        NOT NULL DEFAULT current_setting('application_name'),
    client           text        NOT NULL DEFAULT coalesce(host(inet_client_addr()), 'local'),
    backend          integer     NOT NULL DEFAULT pg_backend_pid(),
    xid              xid8        NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX row_evidence_of ON lifecycle.row_evidence (row_type, row_id);

-- Evidence that no finding speaks of any more, and why.
CREATE TABLE lifecycle.row_evidence_settled (
    evidence_id bigint      PRIMARY KEY REFERENCES lifecycle.row_evidence (evidence_id),
    how         text        NOT NULL CHECK (how IN ('put_back', 'acknowledged')),
    settled_at  timestamptz NOT NULL DEFAULT mesh.clock()
);

-- +goose StatementBegin
CREATE FUNCTION lifecycle.evidence_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'evidence is added by triggers and never changed' USING ERRCODE = 'insufficient_privilege';
END $$;
-- +goose StatementEnd
CREATE TRIGGER evidence_stays BEFORE UPDATE OR DELETE OR TRUNCATE ON lifecycle.row_evidence
    FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.evidence_stays();
CREATE TRIGGER evidence_by_trigger BEFORE INSERT ON lifecycle.row_evidence
    FOR EACH STATEMENT WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION lifecycle.evidence_stays();
REVOKE UPDATE, DELETE, TRUNCATE ON lifecycle.row_evidence FROM lifecycle;
REVOKE UPDATE, DELETE, TRUNCATE ON lifecycle.row_evidence_settled FROM lifecycle;

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

CREATE FUNCTION lifecycle.leave_evidence(what text, tab text, was jsonb, is_now jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    kind  text := CASE tab WHEN 'saga_run' THEN 'run' ELSE tab END;
    found uuid := coalesce(is_now, was)->>(CASE tab WHEN 'allocation' THEN 'allocation_id' ELSE 'id' END);
BEGIN
    IF what = 'unsealed' THEN
        SELECT v.image INTO was FROM lifecycle.row_witness v WHERE v.row_type = kind AND v.row_id = found;
    END IF;
    INSERT INTO lifecycle.row_evidence (op, row_type, row_id, before, after) VALUES (what, kind, found, was - 'seal', is_now - 'seal');
END $$;
REVOKE ALL ON FUNCTION lifecycle.leave_evidence(text, text, jsonb, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lifecycle.leave_evidence(text, text, jsonb, jsonb) TO lifecycle;

CREATE FUNCTION lifecycle.seal_row() RETURNS trigger LANGUAGE plpgsql AS $$
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

CREATE FUNCTION lifecycle.rows_truncated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('SELECT lifecycle.leave_evidence(''delete'', %L, to_jsonb(x), NULL) FROM lifecycle.%I x', TG_TABLE_NAME, TG_TABLE_NAME);
    RETURN NULL;
END $$;

-- For migrations: what stands in the rows counts as the product's from here on.
CREATE PROCEDURE lifecycle.seal_again() LANGUAGE plpgsql AS $$
DECLARE
    tab regclass;
BEGIN
    FOREACH tab IN ARRAY ARRAY['lifecycle.workspace', 'lifecycle.saga_run', 'lifecycle.allocation']::regclass[] LOOP
        EXECUTE format('ALTER TABLE %s DISABLE TRIGGER seal_row', tab);
        EXECUTE format('UPDATE %s x SET seal = lifecycle.digest(x)', tab);
        EXECUTE format('ALTER TABLE %s ENABLE TRIGGER seal_row', tab);
    END LOOP;
END $$;
REVOKE ALL ON PROCEDURE lifecycle.seal_again() FROM PUBLIC;
-- +goose StatementEnd

CREATE TRIGGER seal_row BEFORE INSERT OR UPDATE OR DELETE ON lifecycle.workspace FOR EACH ROW EXECUTE FUNCTION lifecycle.seal_row();
CREATE TRIGGER seal_row BEFORE INSERT OR UPDATE OR DELETE ON lifecycle.saga_run FOR EACH ROW EXECUTE FUNCTION lifecycle.seal_row();
CREATE TRIGGER seal_row BEFORE INSERT OR UPDATE OR DELETE ON lifecycle.allocation FOR EACH ROW EXECUTE FUNCTION lifecycle.seal_row();
CREATE TRIGGER rows_truncated BEFORE TRUNCATE ON lifecycle.workspace FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.rows_truncated();
CREATE TRIGGER rows_truncated BEFORE TRUNCATE ON lifecycle.saga_run FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.rows_truncated();
CREATE TRIGGER rows_truncated BEFORE TRUNCATE ON lifecycle.allocation FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.rows_truncated();

-- +goose Down
DROP TRIGGER rows_truncated ON lifecycle.allocation;
DROP TRIGGER rows_truncated ON lifecycle.saga_run;
DROP TRIGGER rows_truncated ON lifecycle.workspace;
DROP FUNCTION lifecycle.rows_truncated();
DROP TRIGGER seal_row ON lifecycle.allocation;
DROP TRIGGER seal_row ON lifecycle.saga_run;
DROP TRIGGER seal_row ON lifecycle.workspace;
DROP PROCEDURE lifecycle.seal_again();
DROP FUNCTION lifecycle.seal_row();
DROP FUNCTION lifecycle.leave_evidence(text, text, jsonb, jsonb);
DROP FUNCTION lifecycle.digest(lifecycle.allocation);
DROP FUNCTION lifecycle.digest(lifecycle.saga_run);
DROP FUNCTION lifecycle.digest(lifecycle.workspace);
DROP TABLE lifecycle.row_evidence_settled;
DROP TABLE lifecycle.row_evidence;
DROP FUNCTION lifecycle.evidence_stays();
ALTER TABLE lifecycle.allocation DROP COLUMN seal;
ALTER TABLE lifecycle.saga_run DROP COLUMN seal;
ALTER TABLE lifecycle.workspace DROP COLUMN seal;
DROP TABLE lifecycle.observed_workload;
DROP TABLE lifecycle.row_witness;
DROP TABLE lifecycle.suspicion;
DROP TABLE lifecycle.finding;
