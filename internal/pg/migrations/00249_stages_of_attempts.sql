-- +goose Up

-- The stage that an attempt at a step has entered last, where the step goes on when it is called again. It is empty for
-- a step without stages, and for what earlier builds opened: such an attempt begins with the first stage, which finds
-- what is there. A replica of the build before leaves the column as it is.
ALTER TABLE lifecycle.saga_step ADD COLUMN stage text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE lifecycle.saga_step DROP COLUMN stage;
