-- +goose Up

-- Exchanges of what the node authority signs with, one at a time.
CREATE TABLE recovery.authority_rotation (
    rotation_id     uuid        PRIMARY KEY,
    phase           text        NOT NULL DEFAULT 'announced' CHECK (phase IN ('announced', 'both_valid', 'done', 'cancelled')),
    with_root       boolean     NOT NULL,
    former          text        NOT NULL, -- fingerprints of the issuing certificates and of the roots that they lead to
    former_root     text        NOT NULL,
    next            text        NOT NULL DEFAULT '', -- empty: it is not made yet
    next_root       text        NOT NULL DEFAULT '',
    waits_for       text        NOT NULL DEFAULT '',
    forced          boolean     NOT NULL DEFAULT false, -- certificates of the former issuer are revoked
    reason          text        NOT NULL,
    requested_by    text        NOT NULL,
    idempotency_key text        NOT NULL,
    requested_at    timestamptz NOT NULL DEFAULT mesh.clock(),
    since           timestamptz NOT NULL DEFAULT mesh.clock(), -- of the phase
    version         bigint      NOT NULL DEFAULT 1,
    CHECK (next <> '' OR phase IN ('announced', 'cancelled')),
    UNIQUE (requested_by, idempotency_key)
);
CREATE UNIQUE INDEX authority_rotation_open ON recovery.authority_rotation ((true)) WHERE phase IN ('announced', 'both_valid');
CREATE INDEX authority_rotation_last ON recovery.authority_rotation (requested_at);

-- A phase is entered from the one before it alone, and what a rotation exchanges stays as it is.
-- +goose StatementBegin
CREATE FUNCTION recovery.guard_authority_rotation() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.phase <> OLD.phase AND (OLD.phase, NEW.phase) NOT IN
        (('announced', 'both_valid'), ('announced', 'cancelled'), ('both_valid', 'done')) THEN
        RAISE EXCEPTION 'a rotation of the authority does not go from % to %', OLD.phase, NEW.phase USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.former <> OLD.former OR NEW.former_root <> OLD.former_root OR NEW.with_root <> OLD.with_root
        OR (OLD.next <> '' AND (NEW.next <> OLD.next OR NEW.next_root <> OLD.next_root)) OR NEW.version <> OLD.version + 1 THEN
        RAISE EXCEPTION 'a rotation of the authority keeps its issuers' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
CREATE TRIGGER guard BEFORE UPDATE ON recovery.authority_rotation FOR EACH ROW EXECUTE FUNCTION recovery.guard_authority_rotation();

-- Roots that replicas of nodeapi trust beside those of their files.
CREATE TABLE recovery.trusted_issuer (
    fingerprint text        PRIMARY KEY,
    name        text        NOT NULL,
    certificate bytea       NOT NULL,
    not_after   timestamptz NOT NULL,
    origin      text        NOT NULL CHECK (origin IN ('rotation', 'repair')),
    reason      text        NOT NULL,
    decided_by  text        NOT NULL,
    since       timestamptz NOT NULL DEFAULT mesh.clock()
);

-- Fingerprint of the certificate that the authority signs with; empty: the one that it was made with.
CREATE TABLE recovery.authority_signs (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    issuer    text    NOT NULL DEFAULT ''
);
INSERT INTO recovery.authority_signs DEFAULT VALUES;

-- Replicas of recovery that have the next issuer of the rotation that is announced.
CREATE TABLE recovery.authority_holder (
    replica_id text PRIMARY KEY,
    issuer     text NOT NULL
);
REVOKE INSERT, DELETE ON recovery.authority_signs FROM recovery;
REVOKE DELETE ON recovery.authority_rotation FROM recovery;

-- Which certificates of an issuer count, and until when.
CREATE INDEX serial_issuer ON recovery.serial (issuer_fingerprint, not_after) WHERE state IN ('current', 'next');

-- +goose Down
DROP INDEX recovery.serial_issuer;
DROP TABLE recovery.authority_holder, recovery.authority_signs, recovery.trusted_issuer, recovery.authority_rotation;
DROP FUNCTION recovery.guard_authority_rotation();
