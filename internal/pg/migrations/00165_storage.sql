-- +goose Up

-- What the database took, every few minutes for a week: how fast it grows, and what it may grow to.
CREATE TABLE mesh.storage_sample (
    at            timestamptz NOT NULL PRIMARY KEY,
    bytes         bigint      NOT NULL,
    limit_bytes   bigint      NOT NULL, -- that it may take; 0: not known
    bytes_per_day bigint      NOT NULL, -- by which it grows; 0: it does not, or that is not known yet
    volume        boolean     NOT NULL, -- its volume was seen, and what is free there counts
    problem       text        NOT NULL  -- empty: there is room
);
GRANT SELECT, INSERT, DELETE ON mesh.storage_sample TO recovery;
GRANT SELECT ON mesh.storage_sample TO readmodel;

ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys', 'storage'));

-- +goose Down
DELETE FROM recovery.incident WHERE kind = 'storage';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys'));
DROP TABLE mesh.storage_sample;
