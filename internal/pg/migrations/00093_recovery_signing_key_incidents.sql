-- +goose Up

-- A replica that lacks a key of the mesh is an incident of the control plane.
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys'));

-- +goose Down
DELETE FROM recovery.incident WHERE kind = 'signing_keys';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check
    CHECK (kind IN ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback'));
