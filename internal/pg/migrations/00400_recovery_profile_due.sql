-- +goose Up

-- Versions of profiles that have changed, until the nodes that report them are due to be judged, a page of nodes at a time.
CREATE TABLE recovery.profile_due (
    fingerprint text        PRIMARY KEY,
    valid       boolean     NOT NULL, -- only nodes of which it was not valid before are concerned
    after_node  uuid        NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000', -- those up to this one are due
    since       timestamptz NOT NULL DEFAULT mesh.clock()
);

-- +goose Down
DROP TABLE recovery.profile_due;
