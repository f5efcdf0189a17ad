-- +goose Up

-- When a retired instance last asked for a session or a certificate and was refused, and how often that was reported: at most once in five minutes.
ALTER TABLE recovery.instance ADD COLUMN refused_at timestamptz, ADD COLUMN refusals bigint NOT NULL DEFAULT 0;

-- Instances of epochs that are over and that were started again, as recovery refused them. One row for each instance.
CREATE TABLE lifecycle.woken_instance (
    instance_id    uuid        PRIMARY KEY,
    version        bigint      NOT NULL,
    workspace_id   uuid        NOT NULL,
    tenant_id      uuid,
    epoch          bigint      NOT NULL,
    node_id        uuid,
    reason         text        NOT NULL,
    remote_address text        NOT NULL,
    machine_id     text        NOT NULL,
    boot_id        text        NOT NULL,
    refused_at     timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX woken_instance_refused ON lifecycle.woken_instance (refused_at);

-- The enumeration of the proto is the list of kinds, and each reader checks it. A second list here had to be altered with each kind, and refused those
-- of a newer version.
ALTER TABLE lifecycle.finding DROP CONSTRAINT finding_kind_check;
ALTER TABLE lifecycle.finding ADD CONSTRAINT finding_kind_said CHECK (kind <> '');

-- +goose Down
ALTER TABLE lifecycle.finding DROP CONSTRAINT finding_kind_said;
DELETE FROM lifecycle.finding WHERE kind = 'ended_instance_woke';
ALTER TABLE lifecycle.finding ADD CONSTRAINT finding_kind_check CHECK (kind IN ('node_occupied_without_allocation', 'allocation_without_occupancy',
    'instance_without_row', 'claim_without_resource', 'resource_without_claim', 'successive_provisions', 'row_changed_outside'));
DROP TABLE lifecycle.woken_instance;
ALTER TABLE recovery.instance DROP COLUMN refusals, DROP COLUMN refused_at;
