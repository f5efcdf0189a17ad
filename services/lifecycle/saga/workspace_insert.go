package saga

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// NewWorkspace is the row of a workspace that is about to be created by a run in the same transaction.
type NewWorkspace struct {
	ID         string // empty draws one
	TenantID   string
	Name       string
	Spec       json.RawMessage // as names.MarshalJSON spells it
	SpecDigest string
	CreatedBy  string
}

// InsertWorkspace inserts the row in state `provisioning` with epoch 0, without an event: the Start that follows in the
// same transaction announces it. A name that is taken is a unique violation of workspace_name.
func (c *Core) InsertWorkspace(ctx context.Context, tx pgx.Tx, in NewWorkspace) (string, error) {
	if in.ID == "" {
		in.ID = ids.New()
	}
	if len(in.Spec) == 0 {
		in.Spec = json.RawMessage(`{}`)
	}
	_, err := pg.Exec(ctx, tx, insertWorkspace, in.ID, in.TenantID, in.Name, in.Spec, in.SpecDigest, in.CreatedBy)
	if err != nil {
		return "", fmt.Errorf("insert workspace: %w", err)
	}
	return in.ID, nil
}
