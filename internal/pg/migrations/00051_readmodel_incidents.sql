-- +goose Up

-- Recoveries, incidents and the fleet brake, as recovery told of them.
CREATE TABLE readmodel.recovery_record (
    record_id    uuid        PRIMARY KEY,
    version      bigint      NOT NULL,
    workspace_id uuid        NOT NULL,
    tenant_id    uuid,
    detected_at  timestamptz NOT NULL,
    body         jsonb       NOT NULL
);
CREATE INDEX recovery_record_by_workspace ON readmodel.recovery_record (workspace_id, record_id DESC);

CREATE TABLE readmodel.incident (
    incident_id uuid    PRIMARY KEY,
    version     bigint  NOT NULL,
    open        boolean NOT NULL,
    body        jsonb   NOT NULL
);
CREATE INDEX incident_open ON readmodel.incident (incident_id) WHERE open;

CREATE TABLE readmodel.brake (
    name    text    PRIMARY KEY,
    version bigint  NOT NULL,
    engaged boolean NOT NULL,
    body    jsonb   NOT NULL
);

CREATE UNLOGGED TABLE readmodel.scratch_recovery_record (LIKE readmodel.recovery_record INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_incident (LIKE readmodel.incident INCLUDING ALL);
CREATE UNLOGGED TABLE readmodel.scratch_brake (LIKE readmodel.brake INCLUDING ALL);

-- +goose Down
DROP TABLE readmodel.scratch_recovery_record, readmodel.scratch_incident, readmodel.scratch_brake;
DROP TABLE readmodel.recovery_record, readmodel.incident, readmodel.brake;
