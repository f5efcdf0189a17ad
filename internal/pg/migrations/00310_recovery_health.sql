-- +goose Up

-- What proves a node healthy, beside its evidence. Only a node of which something was wrong is probed (wanted).
ALTER TABLE recovery.judgement
    ADD COLUMN node_instance_id  text        NOT NULL DEFAULT '', -- the present enrolment
    ADD COLUMN serial            text        NOT NULL DEFAULT '', -- of its current certificate
    ADD COLUMN issuer            text        NOT NULL DEFAULT '', -- fingerprint of what signed that
    ADD COLUMN session_serial    text        NOT NULL DEFAULT '', -- of the certificate with which session serial_generation was opened
    ADD COLUMN serial_generation bigint      NOT NULL DEFAULT 0,
    ADD COLUMN probe_wanted      boolean     NOT NULL DEFAULT false, -- a reason has ended, and nothing has proven it healthy since
    ADD COLUMN probe_due         timestamptz,                     -- when lifecycle is asked next; null: something else is missing first
    ADD COLUMN probe_attempt     integer     NOT NULL DEFAULT 0,  -- of the probe that is asked for, within the session
    ADD COLUMN probe_note        text        NOT NULL DEFAULT '', -- what became of the last one that did not succeed
    ADD COLUMN probe_instance    text        NOT NULL DEFAULT '', -- the enrolment in which the last probe succeeded
    ADD COLUMN probe_generation  bigint      NOT NULL DEFAULT 0,  -- the session in which it did
    ADD COLUMN probed_at         timestamptz,                     -- null: none succeeded since the last reason
    ADD COLUMN tasks_at          timestamptz;                     -- when no expired task counted as current; null: not known since the last reason
CREATE INDEX judgement_probe ON recovery.judgement (probe_due, node_id) WHERE probe_due IS NOT NULL;

UPDATE recovery.judgement j SET node_instance_id = COALESCE(i.node_instance_id::text, ''), serial = COALESCE(i.current_serial, ''),
    issuer = i.issuer_fingerprint
FROM recovery.identity i WHERE i.node_id = j.node_id;

-- +goose Down
DROP INDEX recovery.judgement_probe;
ALTER TABLE recovery.judgement DROP COLUMN node_instance_id, DROP COLUMN serial, DROP COLUMN issuer, DROP COLUMN session_serial,
    DROP COLUMN serial_generation, DROP COLUMN probe_wanted, DROP COLUMN probe_due, DROP COLUMN probe_attempt, DROP COLUMN probe_note,
    DROP COLUMN probe_instance, DROP COLUMN probe_generation, DROP COLUMN probed_at, DROP COLUMN tasks_at;
