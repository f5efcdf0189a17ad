-- +goose Up

-- What a replica of nodeapi publishes of its agents' port, written when it changes: where it serves agents itself, and the fingerprints of the issuers of
-- nodes that it trusts. Empty: its build does not publish them.
ALTER TABLE mesh.replica ADD COLUMN agent_address text NOT NULL DEFAULT '';
ALTER TABLE mesh.replica ADD COLUMN client_cas text[] NOT NULL DEFAULT '{}';

-- Whether the ingress trusts the certificates that the authority issues. Written when that changes. While it is a mismatch no certificate is issued.
CREATE TABLE recovery.ca_preflight (
    singleton      boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    state          text        NOT NULL DEFAULT 'unknown' CHECK (state IN ('unknown', 'ok', 'mismatch')),
    since          timestamptz,
    failing_side   text        NOT NULL DEFAULT '' CHECK (failing_side IN ('', 'authority', 'ingress')),
    summary        text        NOT NULL DEFAULT '',
    next_action    text        NOT NULL DEFAULT '',
    issuer         text        NOT NULL DEFAULT '', -- fingerprint of the certificate that the authority signed with at the last change
    trusted_issuer text        NOT NULL DEFAULT '', -- the last that the ingress was seen to trust
    refused_by     text[]      NOT NULL DEFAULT '{}', -- addresses of the ingress
    checked_at     timestamptz, -- of the check that has led to the state
    incident_id    text        NOT NULL DEFAULT '',
    version        bigint      NOT NULL DEFAULT 0
);
INSERT INTO recovery.ca_preflight DEFAULT VALUES;

-- The replica of recovery that checks.
CREATE TABLE recovery.ca_preflight_lease (
    singleton  boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    holder     text        NOT NULL DEFAULT '',
    until      timestamptz NOT NULL DEFAULT '-infinity',
    checked_at timestamptz -- of the last check, as of the lease's last renewal
) WITH (fillfactor = 50);
INSERT INTO recovery.ca_preflight_lease DEFAULT VALUES;
-- Of each one row, which is changed and never added to or taken away.
REVOKE INSERT, DELETE ON recovery.ca_preflight, recovery.ca_preflight_lease FROM recovery;

ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys', 'storage', 'issuer_untrusted')) NOT VALID;
ALTER TABLE recovery.incident VALIDATE CONSTRAINT incident_kind_check;

-- +goose Down
DELETE FROM recovery.incident WHERE kind = 'issuer_untrusted';
ALTER TABLE recovery.incident DROP CONSTRAINT incident_kind_check;
ALTER TABLE recovery.incident ADD CONSTRAINT incident_kind_check CHECK (kind IN
    ('step_class', 'fleet_brake', 'churn_budget', 'machine_unreachable', 'control_plane_rollback', 'signing_keys', 'storage'));
DROP TABLE recovery.ca_preflight_lease, recovery.ca_preflight;
ALTER TABLE mesh.replica DROP COLUMN client_cas, DROP COLUMN agent_address;
