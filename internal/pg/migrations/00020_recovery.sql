-- +goose Up

-- Changes that nodeapi must know take their number from this row, under one transaction advisory lock taken last in each transaction: the lock
-- goes only after the commit is visible, so the order of numbers is the order of commits and `authority_seq > last` misses nothing.
CREATE TABLE recovery.authority_head (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    seq  bigint  NOT NULL DEFAULT 0
) WITH (fillfactor = 10);
INSERT INTO recovery.authority_head DEFAULT VALUES;

CREATE TABLE recovery.identity (
    node_id               uuid        PRIMARY KEY,
    name                  text        NOT NULL CHECK (name <> ''),
    node_instance_id      uuid,
    state                 text        NOT NULL CHECK (state IN ('pending', 'active', 'held', 'quarantined', 'fenced', 'retired')),
    state_reason          text        NOT NULL DEFAULT '',
    state_by              text        NOT NULL DEFAULT '',
    state_at              timestamptz NOT NULL DEFAULT mesh.clock(),
    alarm                 text        NOT NULL DEFAULT '' CHECK (alarm IN ('', 'cloned_identity_detected', 'join_state_lost', 'token_reuse')),
    fence_epoch           bigint      NOT NULL DEFAULT 0,
    fence_acked           bigint      NOT NULL DEFAULT 0,
    -- What lifecycle must be told of this node, numbered; told_at is when the next attempt is due.
    told                  bigint      NOT NULL DEFAULT 0,
    told_acked            bigint      NOT NULL DEFAULT 0,
    told_at               timestamptz NOT NULL DEFAULT mesh.clock(),
    issued                bigint      NOT NULL DEFAULT 0,
    confirmed             bigint      NOT NULL DEFAULT 0,
    confirmed_session_id  uuid,
    replaced_nonce        text        NOT NULL DEFAULT '',
    current_serial        text        NOT NULL DEFAULT '',
    next_serial           text        NOT NULL DEFAULT '',
    certificate_not_after timestamptz,
    issuer_fingerprint    text        NOT NULL DEFAULT '',
    workspace_id          uuid,
    tenant_id             uuid,
    epoch                 bigint      NOT NULL DEFAULT 0,
    instance_id           uuid        UNIQUE,
    mints                 integer     NOT NULL DEFAULT 0,
    refused_registers     integer     NOT NULL DEFAULT 0,
    last_refusal          text        NOT NULL DEFAULT '',
    authority_seq         bigint      NOT NULL DEFAULT 0,
    version               bigint      NOT NULL DEFAULT 1,
    created_at            timestamptz NOT NULL DEFAULT mesh.clock(),
    CONSTRAINT generations CHECK (confirmed >= 0 AND confirmed <= issued),
    CONSTRAINT box CHECK ((workspace_id IS NULL) = (instance_id IS NULL) AND (workspace_id IS NULL) = (epoch = 0)),
    CONSTRAINT enrolled CHECK (node_instance_id IS NOT NULL OR state IN ('pending', 'retired'))
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX identity_name ON recovery.identity (name) WHERE state <> 'retired';
CREATE INDEX identity_authority ON recovery.identity (authority_seq);
CREATE INDEX identity_untold ON recovery.identity (told_at) WHERE told_acked < told;

-- Certificates that count, or once did. One whose signing was never stored is in none of these rows, and is refused.
CREATE TABLE recovery.serial (
    serial             text        PRIMARY KEY CHECK (serial <> ''),
    node_id            uuid        NOT NULL REFERENCES recovery.identity,
    node_instance_id   uuid        NOT NULL,
    csr_key_sha256     bytea       CHECK (octet_length(csr_key_sha256) = 32), -- null: taken over after the database lost its row
    chain_pem          bytea       NOT NULL,
    issuer_fingerprint text        NOT NULL,
    state              text        NOT NULL CHECK (state IN ('next', 'current', 'superseded', 'revoked')),
    state_at           timestamptz NOT NULL DEFAULT mesh.clock(),
    issued_at          timestamptz NOT NULL DEFAULT mesh.clock(),
    not_before         timestamptz NOT NULL,
    not_after          timestamptz NOT NULL,
    ready_at           timestamptz, -- a session was ready on it
    UNIQUE (node_id, csr_key_sha256)
);
CREATE UNIQUE INDEX serial_one_current ON recovery.serial (node_id) WHERE state = 'current';
CREATE UNIQUE INDEX serial_one_next ON recovery.serial (node_id) WHERE state = 'next';

-- What a Hello was answered, by the session id that nodeapi drew: the same question gets the same answer.
CREATE TABLE recovery.session_open (
    session_id       uuid        PRIMARY KEY,
    node_id          uuid        NOT NULL REFERENCES recovery.identity,
    node_instance_id uuid        NOT NULL,
    verdict          text        NOT NULL CHECK (verdict IN ('welcome', 'challenge')),
    generation       bigint      NOT NULL DEFAULT 0,
    era              bigint      NOT NULL DEFAULT 0,
    serial           text        NOT NULL,
    put_for          text        NOT NULL DEFAULT '', -- of a challenge: what an answer proves
    fence_epoch      bigint      NOT NULL,
    answer           text        NOT NULL DEFAULT '', -- of a reported challenge: the reason that closed the stream
    replaces_nonce   text        NOT NULL DEFAULT '',
    replica_id       text        NOT NULL DEFAULT '',
    boot_id          text        NOT NULL DEFAULT '',
    machine_id       text        NOT NULL DEFAULT '',
    remote_address   text        NOT NULL DEFAULT '',
    agent_version    text        NOT NULL DEFAULT '',
    opened_at        timestamptz NOT NULL DEFAULT mesh.clock()
);
CREATE INDEX session_open_age ON recovery.session_open (opened_at);

-- Operator tokens and launch secrets. Only the hash is kept.
CREATE TABLE recovery.token (
    token_id        uuid        PRIMARY KEY,
    kind            text        NOT NULL CHECK (kind IN ('bootstrap', 'launch')),
    node_id         uuid        NOT NULL REFERENCES recovery.identity,
    secret_sha256   bytea       NOT NULL CHECK (octet_length(secret_sha256) = 32),
    state           text        NOT NULL CHECK (state IN ('issued', 'used', 'revoked', 'expired')),
    state_at        timestamptz NOT NULL DEFAULT mesh.clock(),
    issued_by       text        NOT NULL,
    idempotency_key text        NOT NULL DEFAULT '',
    issued_at       timestamptz NOT NULL DEFAULT mesh.clock(),
    expires_at      timestamptz NOT NULL,
    used_key_sha256 bytea       CHECK (octet_length(used_key_sha256) = 32),
    used_serial     text        NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX token_idempotency ON recovery.token (issued_by, idempotency_key) WHERE idempotency_key <> '';
CREATE INDEX token_node ON recovery.token (node_id);
CREATE INDEX token_expiry ON recovery.token (expires_at) WHERE state = 'issued';

-- Attempts at an enrolment. The partial index is the promise of one in flight per node. An abandoned attempt may have been signed: its
-- certificate is an orphan, known by its key alone, and never accepted.
CREATE TABLE recovery.enrollment (
    enrollment_id  uuid        PRIMARY KEY,
    token_id       uuid        REFERENCES recovery.token, -- null: a renewal over a session
    node_id        uuid        NOT NULL REFERENCES recovery.identity,
    csr_key_sha256 bytea       NOT NULL CHECK (octet_length(csr_key_sha256) = 32),
    state          text        NOT NULL CHECK (state IN ('claimed', 'done', 'abandoned', 'failed')),
    lease_until    timestamptz NOT NULL,
    started_at     timestamptz NOT NULL DEFAULT mesh.clock(),
    ended_at       timestamptz,
    serial         text        NOT NULL DEFAULT '', -- done: the one stored; abandoned or failed: the orphan, if it is known
    failure        text        NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX enrollment_one_in_flight ON recovery.enrollment (node_id) WHERE state = 'claimed';
CREATE INDEX enrollment_lease ON recovery.enrollment (lease_until) WHERE state = 'claimed';

-- Boxes that lifecycle launches. A row without a node is a tombstone: the box ended before its preparation arrived.
CREATE TABLE recovery.instance (
    instance_id  uuid        PRIMARY KEY,
    workspace_id uuid        NOT NULL,
    epoch        bigint      NOT NULL CHECK (epoch > 0),
    node_id      uuid        REFERENCES recovery.identity,
    prepared_at  timestamptz,
    retired_at   timestamptz
);
CREATE INDEX instance_workspace ON recovery.instance (workspace_id, epoch);

-- The highest epoch prepared for each workspace, and the instance it was prepared for.
CREATE TABLE recovery.workspace_epoch (
    workspace_id uuid   PRIMARY KEY,
    epoch        bigint NOT NULL,
    instance_id  uuid   NOT NULL
);

-- The version of each policy key, for its events: the values themselves are shared and carry none.
CREATE TABLE recovery.policy_version (
    key     text   PRIMARY KEY,
    version bigint NOT NULL
);

-- +goose Down
DROP TABLE recovery.policy_version;
DROP TABLE recovery.workspace_epoch;
DROP TABLE recovery.instance;
DROP TABLE recovery.enrollment;
DROP TABLE recovery.token;
DROP TABLE recovery.session_open;
DROP TABLE recovery.serial;
DROP TABLE recovery.identity;
DROP TABLE recovery.authority_head;
