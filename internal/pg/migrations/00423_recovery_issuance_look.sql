-- +goose Up

-- When a replica of recovery last looked whether certificates are issued, at most a few seconds late. A gap is a time
-- in which none of them ran.
CREATE TABLE recovery.issuance_look (
    singleton boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    looked_at timestamptz -- null: none has looked yet
) WITH (fillfactor = 50);
INSERT INTO recovery.issuance_look DEFAULT VALUES;
-- One row, which is changed and never added to or taken away.
REVOKE INSERT, DELETE ON recovery.issuance_look FROM recovery;

-- +goose Down
DROP TABLE recovery.issuance_look;
