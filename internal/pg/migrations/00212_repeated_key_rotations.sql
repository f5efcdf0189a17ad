-- +goose Up

-- The idempotency keys of requests that got a rotation which was under way already: repeated, they get it again once it is over.
CREATE TABLE mesh.key_rotation_repeat (
    idempotency_key text        PRIMARY KEY,
    rotation_id     uuid        NOT NULL REFERENCES mesh.key_rotation,
    requested_at    timestamptz NOT NULL
);
CREATE INDEX key_rotation_repeat_of ON mesh.key_rotation_repeat (rotation_id);
GRANT SELECT, INSERT ON mesh.key_rotation_repeat TO recovery;

-- +goose Down
DROP TABLE mesh.key_rotation_repeat;
