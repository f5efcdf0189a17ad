-- +goose Up

-- When the present reason of a verdict began: nodes whose reason began within the window are counted by it. Null: before this migration.
ALTER TABLE recovery.verdict ADD COLUMN since timestamptz;
CREATE INDEX verdict_since ON recovery.verdict (reason, since) WHERE reason <> 'unspecified';

ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys', 'storage', 'issuer_untrusted',
    'fleet_drift')) NOT VALID;
ALTER TABLE recovery.incident VALIDATE CONSTRAINT incident_kind_check;

-- +goose Down
DELETE FROM recovery.incident WHERE kind = 'fleet_drift';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys', 'storage', 'issuer_untrusted'));
DROP INDEX recovery.verdict_since;
ALTER TABLE recovery.verdict DROP COLUMN since;
