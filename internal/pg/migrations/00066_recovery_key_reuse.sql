-- +goose Up

-- A key certifies one node. Each enrolment and renewal asks whether another one was ever given a certificate for it. Not unique: earlier builds certified
-- one key for several nodes.
CREATE INDEX serial_key ON recovery.serial (csr_key_sha256) WHERE csr_key_sha256 IS NOT NULL;

-- +goose Down
DROP INDEX recovery.serial_key;
