-- +goose Up

-- A database whose fleet was loaded by a bench, and not made by the product: services refuse it unless told.
CREATE TABLE mesh.seeded (
    one       boolean     PRIMARY KEY DEFAULT true CHECK (one),
    seeded_by text        NOT NULL CHECK (seeded_by <> ''),
    seeded_at timestamptz NOT NULL DEFAULT mesh.clock()
);
GRANT SELECT ON mesh.seeded TO nodeapi, lifecycle, recovery, readmodel;

-- +goose Down
DROP TABLE mesh.seeded;
