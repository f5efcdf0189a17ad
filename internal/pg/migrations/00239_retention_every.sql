-- +goose Up

-- How often the service begins a walk, by its configuration: what is late follows from it. Null of builds before this one.
ALTER TABLE mesh.retention ADD COLUMN every interval;

-- A cut that a service has no more, as of a database that is not configured any more, is forgotten.
GRANT DELETE ON mesh.retention TO lifecycle, recovery, readmodel;
CREATE POLICY own_end ON mesh.retention FOR DELETE USING (service = current_user::text);

-- +goose Down
DROP POLICY own_end ON mesh.retention;
REVOKE DELETE ON mesh.retention FROM lifecycle, recovery, readmodel;
ALTER TABLE mesh.retention DROP COLUMN every;
