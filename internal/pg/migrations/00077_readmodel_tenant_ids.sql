-- +goose Up

-- Tenants are found by the end of their ids as everything else is.
CREATE INDEX tenant_by_end ON readmodel.tenant ((reverse(replace(tenant_id::text, '-', ''))) COLLATE "C");

-- +goose Down
DROP INDEX readmodel.tenant_by_end;
