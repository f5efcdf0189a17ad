package instance

import "github.com/gpuaas/mesh/internal/pg"

// row is a row of recovery.instance.
type row struct {
	NodeID      string `db:"node_id" expr:"COALESCE(@.node_id::text, '')"`
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
	Epoch       int64  `db:"epoch"`
	Retired     bool   `db:"retired" expr:"@.retired_at IS NOT NULL"`
}

// Statements of instances and of the epochs of workspaces.
var (
	readEpoch = pg.Define(pg.RoleRecovery, "instance.read_epoch", `
		SELECT `+pg.Columns[Epoch]("w")+` FROM recovery.workspace_epoch w WHERE w.workspace_id = $1`)

	raiseEpoch = pg.Define(pg.RoleRecovery, "instance.raise_epoch", `
		INSERT INTO recovery.workspace_epoch AS w (workspace_id, epoch, instance_id) VALUES ($1, $2, $3)
		ON CONFLICT (workspace_id) DO UPDATE SET epoch = EXCLUDED.epoch, instance_id = EXCLUDED.instance_id
			WHERE w.epoch < EXCLUDED.epoch`)

	lockWorkspaceEpoch = pg.Define(pg.RoleRecovery, "instance.lock_epoch", `
		SELECT `+pg.Columns[Epoch]("w")+` FROM recovery.workspace_epoch w WHERE w.workspace_id = $1 FOR UPDATE`)

	nameHolder = pg.Define(pg.RoleRecovery, "instance.name_holder_of_epoch",
		`UPDATE recovery.workspace_epoch SET instance_id = $2 WHERE workspace_id = $1`)

	lockInstance = pg.Define(pg.RoleRecovery, "instance.lock", `
		SELECT `+pg.Columns[row]("i")+` FROM recovery.instance i WHERE i.instance_id = $1 FOR UPDATE`)

	insertInstance = pg.Define(pg.RoleRecovery, "instance.insert", `
		INSERT INTO recovery.instance (instance_id, workspace_id, epoch, node_id, prepared_at)
			VALUES ($1, $2, $3, $4, mesh.clock())`)

	isRegistered = pg.Define(pg.RoleRecovery, "instance.is_registered", `
		SELECT COALESCE(i.retired_at IS NULL AND t.state = 'used', false)
		FROM recovery.instance i LEFT JOIN recovery.token t ON t.token_id = i.instance_id WHERE i.instance_id = $1`)

	endInstance = pg.Define(pg.RoleRecovery, "instance.end", `
		INSERT INTO recovery.instance AS i (instance_id, workspace_id, epoch, retired_at) VALUES ($1, $2, $3, mesh.clock())
		ON CONFLICT (instance_id) DO UPDATE SET retired_at = COALESCE(i.retired_at, EXCLUDED.retired_at)
		RETURNING COALESCE(node_id::text, '')`)
)

// Statements of launch secrets, which are tokens of the kind launch.
var (
	revokeUnused = pg.Define(pg.RoleRecovery, "instance.revoke_unused_token", `
		UPDATE recovery.token SET state = 'revoked', state_at = mesh.clock() WHERE token_id = $1 AND state = 'issued'`)

	insertLaunch = pg.Define(pg.RoleRecovery, "instance.insert_launch_secret", `
		INSERT INTO recovery.token (token_id, kind, node_id, secret_sha256, state, issued_by, expires_at)
		VALUES ($1, 'launch', $2, $3, 'issued', 'lifecycle', mesh.clock() + make_interval(secs => $4))`)

	renewLaunch = pg.Define(pg.RoleRecovery, "instance.renew_launch_secret", `
		UPDATE recovery.token SET secret_sha256 = $2,
			expires_at = CASE WHEN secret_sha256 = $2 THEN expires_at ELSE mesh.clock() + make_interval(secs => $3) END
		WHERE token_id = $1 AND (state = 'issued' OR secret_sha256 = $2)`)
)
