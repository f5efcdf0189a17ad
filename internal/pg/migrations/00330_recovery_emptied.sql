-- +goose Up

-- Open findings of lifecycle by which a connected machine has nothing of a workspace that it should have. Few at any time.
CREATE TABLE recovery.watch_emptied (
    finding_id   uuid        PRIMARY KEY,
    workspace_id uuid        NOT NULL,
    node_id      uuid        NOT NULL,
    since        timestamptz NOT NULL
);
CREATE INDEX watch_emptied_workspace ON recovery.watch_emptied (workspace_id);

ALTER TABLE recovery.recovery_record DROP CONSTRAINT recovery_record_trigger_check;
ALTER TABLE recovery.recovery_record ADD CONSTRAINT recovery_record_trigger_check
    CHECK (trigger IN ('stalled', 'session_lost', 'register_failing', 'manual', 'node_emptied')) NOT VALID;
ALTER TABLE recovery.recovery_record VALIDATE CONSTRAINT recovery_record_trigger_check;

-- +goose Down
ALTER TABLE recovery.recovery_record DROP CONSTRAINT recovery_record_trigger_check;
ALTER TABLE recovery.recovery_record ADD CONSTRAINT recovery_record_trigger_check
    CHECK (trigger IN ('stalled', 'session_lost', 'register_failing', 'manual')) NOT VALID;
DROP TABLE recovery.watch_emptied;
