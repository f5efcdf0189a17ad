-- +goose Up

-- When each piece of a service's periodic work is due next. Whichever replica moves a row that is due runs the work.
CREATE TABLE mesh.periodic_job (
    service text        NOT NULL,
    name    text        NOT NULL,
    due_at  timestamptz NOT NULL,
    PRIMARY KEY (service, name)
) WITH (fillfactor = 50);

GRANT SELECT, INSERT, UPDATE ON mesh.periodic_job TO lifecycle, recovery, readmodel;
ALTER TABLE mesh.periodic_job ENABLE ROW LEVEL SECURITY;
CREATE POLICY own_rows ON mesh.periodic_job USING (service = current_user::text) WITH CHECK (service = current_user::text);

-- +goose Down
DROP TABLE mesh.periodic_job;
