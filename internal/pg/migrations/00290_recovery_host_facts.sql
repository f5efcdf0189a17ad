-- +goose Up

-- What a node's agent reports of its host, as far as a change of it is evidence. It goes with the node's judgement.
CREATE TABLE recovery.host_facts (
    node_id          uuid        PRIMARY KEY REFERENCES recovery.judgement ON DELETE CASCADE,
    node_instance_id uuid        NOT NULL,        -- of which the facts are
    accepted         text        NOT NULL,        -- JSON: devices, driver, kernel and container runtime as they are to be
    present          text,                        -- the same as last reported; null: as accepted
    accepted_at      timestamptz NOT NULL,
    accepted_by      text        NOT NULL,        -- empty: the first session of the node instance
    accept_reason    text        NOT NULL,
    addresses        text[]      NOT NULL,        -- of the host, as last reported
    remotes          text[]      NOT NULL,        -- from which its sessions came, the newest first
    lacks            text[]      NOT NULL         -- task types that its agent does not know
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE recovery.host_facts;
DELETE FROM recovery.evidence WHERE part LIKE '%/%';
