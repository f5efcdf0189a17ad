-- +goose Up

-- A token of an operator's bundle is for a node that exists, and may be used while the node is active.
ALTER TABLE recovery.token DROP CONSTRAINT token_kind_check;
ALTER TABLE recovery.token ADD CONSTRAINT token_kind_check CHECK (kind IN ('bootstrap', 'launch', 'bundle'));

-- +goose Down
DELETE FROM recovery.enrollment WHERE token_id IN (SELECT token_id FROM recovery.token WHERE kind = 'bundle');
DELETE FROM recovery.token WHERE kind = 'bundle';
ALTER TABLE recovery.token DROP CONSTRAINT token_kind_check;
ALTER TABLE recovery.token ADD CONSTRAINT token_kind_check CHECK (kind IN ('bootstrap', 'launch'));
