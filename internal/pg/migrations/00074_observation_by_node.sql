-- +goose Up

-- A workspace's workloads are observed by each node that has some of them: what one agent reports must not replace what another has reported. An observation
-- names its node since the first build that wrote any.
DELETE FROM readmodel.observation WHERE node_id IS NULL;
ALTER TABLE readmodel.observation DROP CONSTRAINT observation_pkey;
ALTER TABLE readmodel.observation ADD PRIMARY KEY (workspace_id, node_id);
ALTER TABLE readmodel.scratch_observation DROP CONSTRAINT scratch_observation_pkey;
ALTER TABLE readmodel.scratch_observation ADD PRIMARY KEY (workspace_id, node_id);

-- +goose Down
DELETE FROM readmodel.observation o USING readmodel.observation n WHERE n.workspace_id = o.workspace_id AND n.version > o.version;
ALTER TABLE readmodel.scratch_observation DROP CONSTRAINT scratch_observation_pkey;
ALTER TABLE readmodel.scratch_observation ADD PRIMARY KEY (workspace_id);
ALTER TABLE readmodel.scratch_observation ALTER COLUMN node_id DROP NOT NULL;
ALTER TABLE readmodel.observation DROP CONSTRAINT observation_pkey;
ALTER TABLE readmodel.observation ADD PRIMARY KEY (workspace_id);
ALTER TABLE readmodel.observation ALTER COLUMN node_id DROP NOT NULL;
