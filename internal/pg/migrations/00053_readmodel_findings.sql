-- +goose Up

-- What lifecycle's sweeps found, as each change brought it.
CREATE TABLE readmodel.finding (
    finding_id   uuid    PRIMARY KEY,
    version      bigint  NOT NULL,
    workspace_id uuid,
    tenant_id    uuid,
    severity     text    NOT NULL CHECK (severity IN ('p0', 'p1', 'p2')),
    open         boolean NOT NULL,
    body         jsonb   NOT NULL
);
CREATE INDEX finding_open ON readmodel.finding (finding_id) WHERE open;
CREATE INDEX finding_by_workspace ON readmodel.finding (workspace_id) WHERE workspace_id IS NOT NULL;

CREATE UNLOGGED TABLE readmodel.scratch_finding (LIKE readmodel.finding INCLUDING ALL);

-- +goose Down
DROP TABLE readmodel.scratch_finding;
DROP TABLE readmodel.finding;
