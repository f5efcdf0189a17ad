-- +goose Up

-- Recovery tokens that may be used, the oldest of each profile first: what is too old is found there.
CREATE INDEX recovery_token_aging ON recovery.recovery_token (profile, COALESCE(counted_since, issued_at)) WHERE state = 'issued';

-- +goose Down
DROP INDEX recovery.recovery_token_aging;
