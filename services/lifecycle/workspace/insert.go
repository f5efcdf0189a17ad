package workspace

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Draft is the row of a workspace that is about to be created by a run in the same transaction.
type Draft struct {
	ID         string // empty draws one
	TenantID   string
	Name       string
	Spec       json.RawMessage // as names.MarshalJSON spells it
	SpecDigest string
	CreatedBy  string
}

// Insert inserts the row in state `provisioning` with epoch 0, without an event: the Start that follows in the
// same transaction announces it. A name that is taken is a unique violation of workspace_name.
func Insert(ctx context.Context, tx pgx.Tx, in Draft) (string, error) {
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
