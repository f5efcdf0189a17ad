-- +goose Up

ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys',
    'storage', 'issuer_untrusted',
    'fleet_drift', 'identity_suspected', 'state_overdue')) NOT VALID;
ALTER TABLE recovery.incident VALIDATE CONSTRAINT incident_kind_check;

-- +goose Down
DELETE FROM recovery.incident WHERE kind = 'state_overdue';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys',
    'storage', 'issuer_untrusted',
    'fleet_drift', 'identity_suspected'));
