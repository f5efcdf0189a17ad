-- +goose Up

-- A hold on a slot and its GPUs. `release_failed` keeps occupancy `cleanup`: visible, and never placeable.
CREATE TABLE lifecycle.allocation (
    allocation_id uuid        PRIMARY KEY,
    workspace_id  uuid        NOT NULL REFERENCES lifecycle.workspace (id),
    tenant_id     uuid        NOT NULL,
    epoch         bigint      NOT NULL,
    state         text        NOT NULL CHECK (state IN ('allocating', 'active', 'releasing', 'released', 'release_failed')),
    placement     text        NOT NULL CHECK (placement IN ('static', 'process', 'docker')),
    node_id       uuid,
    instance_id   uuid,
    slot          integer,
    gpus          integer     NOT NULL DEFAULT 0 CHECK (gpus >= 0),
    occupancy     text        NOT NULL CHECK (occupancy IN ('none', 'reserved', 'in_use', 'cleanup')),
    last_error    text        NOT NULL DEFAULT '',
    created_at    timestamptz NOT NULL DEFAULT mesh.clock(),
    state_at      timestamptz NOT NULL DEFAULT mesh.clock(),
    -- Raised with each change of state: who forces a release names the one that they saw.
    fence         bigint      NOT NULL DEFAULT 1,
    -- While it is releasing: past this it is release_failed.
    release_deadline_at timestamptz,
    version       bigint      NOT NULL DEFAULT 1,
    CONSTRAINT released_is_empty CHECK (state <> 'released' OR occupancy = 'none'),
    CONSTRAINT failed_needs_cleanup CHECK (state <> 'release_failed' OR occupancy = 'cleanup')
);

CREATE UNIQUE INDEX allocation_live ON lifecycle.allocation (workspace_id) WHERE state <> 'released';
CREATE UNIQUE INDEX allocation_slot ON lifecycle.allocation (node_id, slot) WHERE state <> 'released' AND slot IS NOT NULL;

-- No device is held twice: the primary key decides.
CREATE TABLE lifecycle.gpu_hold (
    node_id       uuid NOT NULL,
    device_id     text NOT NULL,
    allocation_id uuid NOT NULL REFERENCES lifecycle.allocation (allocation_id),
    PRIMARY KEY (node_id, device_id)
);
CREATE INDEX gpu_hold_of ON lifecycle.gpu_hold (allocation_id);

-- One launched box of a workspace: at most one that is not confirmed ended.
CREATE TABLE lifecycle.instance (
    instance_id  uuid        PRIMARY KEY,
    workspace_id uuid        NOT NULL REFERENCES lifecycle.workspace (id),
    tenant_id    uuid        NOT NULL,
    epoch        bigint      NOT NULL,
    state        text        NOT NULL CHECK (state IN ('prepared', 'launching', 'live', 'ending', 'ended')),
    placement    text        NOT NULL CHECK (placement IN ('static', 'process', 'docker')),
    provider_id  text        NOT NULL DEFAULT '',
    node_id      uuid,
    started_at   timestamptz,
    ended_at     timestamptz,
    end_reason   text        NOT NULL DEFAULT '',
    version      bigint      NOT NULL DEFAULT 1,
    UNIQUE (workspace_id, epoch)
);
CREATE UNIQUE INDEX instance_live ON lifecycle.instance (workspace_id) WHERE state <> 'ended';

-- The launch ledger of the static driver: a slot on a machine that was there before.
CREATE TABLE lifecycle.static_placement (
    workspace_id uuid        NOT NULL,
    epoch        bigint      NOT NULL,
    instance_id  uuid        NOT NULL,
    node_id      uuid        NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT mesh.clock(),
    ended_at     timestamptz,
    fence_word   text        NOT NULL DEFAULT '', -- the person's word on which it counts as ended, if nothing confirmed it
    PRIMARY KEY (workspace_id, epoch)
);
CREATE UNIQUE INDEX static_placement_live ON lifecycle.static_placement (workspace_id) WHERE ended_at IS NULL;

-- The durable handle of a workspace: where it is signalled and what names are its own.
CREATE TABLE lifecycle.workspace_handle (
    workspace_id   uuid        PRIMARY KEY REFERENCES lifecycle.workspace (id),
    handle         text        NOT NULL UNIQUE,
    epoch          bigint      NOT NULL,
    signal_address text        NOT NULL,
    reserved_names text[]      NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT mesh.clock()
);

-- How often the reaper has tried to take an orphan away that stands on no machine, and when it tries again.
CREATE TABLE lifecycle.orphan_try (
    claim_id   uuid        PRIMARY KEY REFERENCES lifecycle.resource_claim (id),
    tries      integer     NOT NULL,
    next_at    timestamptz NOT NULL,
    last_error text        NOT NULL DEFAULT '' -- of the last try that failed; the driver's own words, never shown to tenants
);

-- +goose Down
DROP TABLE lifecycle.orphan_try;
DROP TABLE lifecycle.workspace_handle;
DROP TABLE lifecycle.static_placement;
DROP TABLE lifecycle.instance;
DROP TABLE lifecycle.gpu_hold;
DROP TABLE lifecycle.allocation;
