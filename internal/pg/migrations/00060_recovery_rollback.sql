-- +goose Up

-- Rollback mode: the database is older than what others remember. While it is active nothing is launched, dispatched,
-- recreated, released, reaped or put on hold. The owner's `gpuaas migrate restored` sets it, and recovery does on the
-- evidence of agents and of the launch log; a person ends it.
CREATE TABLE recovery.rollback (
    singleton      boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    state          text        NOT NULL DEFAULT 'none' CHECK (state IN ('none', 'active')),
    declared       boolean     NOT NULL DEFAULT false, -- by the owner, who raised the era with it
    since          timestamptz,
    era            bigint      NOT NULL DEFAULT 0, -- of the database when the mode was set or declared
    reported_by    text        NOT NULL DEFAULT '',
    reason         text        NOT NULL DEFAULT '', -- that the owner gave
    -- What shows that the database is older, each thing once, the newest of them; evidence_total counts them all.
    evidence       jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(evidence) = 'array'),
    evidence_total bigint      NOT NULL DEFAULT 0,
    incident_id    text        NOT NULL DEFAULT '',
    accepted_at    timestamptz,
    accepted_by    text        NOT NULL DEFAULT '',
    accept_reason  text        NOT NULL DEFAULT '',
    version        bigint      NOT NULL DEFAULT 0,
    CONSTRAINT active_since CHECK (state = 'none' OR since IS NOT NULL)
);
INSERT INTO recovery.rollback DEFAULT VALUES;
-- One row, which is changed and never added to or taken away.
REVOKE INSERT, DELETE ON recovery.rollback FROM recovery;

ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check
    CHECK (kind IN ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback'));

-- rolled_back reports whether rollback mode is active. Every service calls it in the transaction of what it is about to
-- do, so that none acts on a copy that is behind. It runs with its owner's rights, because the row is recovery's and no
-- other service may read it.
-- +goose StatementBegin
CREATE FUNCTION mesh.rolled_back() RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM recovery.rollback WHERE state = 'active')
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.rolled_back() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.rolled_back() TO nodeapi, lifecycle, recovery, readmodel;

-- +goose Down
DROP FUNCTION mesh.rolled_back();
DELETE FROM recovery.incident WHERE kind = 'control_plane_rollback';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check
    CHECK (kind IN ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable'));
DROP TABLE recovery.rollback;
