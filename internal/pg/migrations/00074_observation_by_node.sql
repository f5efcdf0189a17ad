-- +goose Up

-- What each node's agent last said of a workspace's workloads: untrusted evidence. What one agent reports must not replace what another has reported.
CREATE TABLE readmodel.observed (
    workspace_id uuid   NOT NULL,
    node_id      uuid   NOT NULL,
    version      bigint NOT NULL,
    body         jsonb  NOT NULL,
    PRIMARY KEY (workspace_id, node_id)
);
INSERT INTO readmodel.observed SELECT workspace_id, node_id, version, body FROM readmodel.observation WHERE node_id IS NOT NULL;
CREATE UNLOGGED TABLE readmodel.scratch_observed (LIKE readmodel.observed INCLUDING ALL);

-- readmodel.observation, with one row a workspace, stays for replicas of the build before, which go on writing it until they are replaced: without it they
-- would park each observation. Nothing reads it any more.

-- +goose Down
DROP TABLE readmodel.scratch_observed, readmodel.observed;
