package claims

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

// Claim is a row of resource_claim.
type Claim struct {
	ID           string     `db:"id"`
	WorkspaceID  string     `db:"workspace_id"`
	TenantID     string     `db:"tenant_id"`
	RunID        string     `db:"run_id"`
	Step         int        `db:"step"`
	Kind         string     `db:"kind"`
	Scope        string     `db:"scope"`
	Name         string     `db:"deterministic_name"`
	ExternalRef  string     `db:"external_ref"`
	Epoch        int64      `db:"epoch"`
	NodeID       string     `db:"node_id" expr:"COALESCE(@.node_id::text, '')"`
	IntentAt     time.Time  `db:"intent_at"`
	ConfirmedAt  *time.Time `db:"confirmed_at"`
	ReleasedAt   *time.Time `db:"released_at"`
	OrphanedAt   *time.Time `db:"orphaned_at"`
	OrphanedBy   string     `db:"orphaned_by"`
	OrphanReason string     `db:"orphan_reason"`
	Version      int64      `db:"version"`
}

var columns = pg.Columns[Claim]("c")

// Proto returns the claim as the API shows it.
func (c *Claim) Proto() *lifecyclev1.Claim {
	return &lifecyclev1.Claim{
		// small counts
		ClaimId: c.ID, WorkspaceId: c.WorkspaceID, TenantId: c.TenantID, RunId: c.RunID, Step: int32(c.Step), Kind: c.Kind,
		Scope: aside.Value[commonv1.ClaimScope]("claim", c.ID, c.Scope), Name: c.Name,
		ExternalRef: c.ExternalRef, Epoch: c.Epoch,
		NodeId: c.NodeID, IntentAt: timestamp(&c.IntentAt), ConfirmedAt: timestamp(c.ConfirmedAt),
		ReleasedAt: timestamp(c.ReleasedAt), OrphanedAt: timestamp(c.OrphanedAt), OrphanedBy: c.OrphanedBy,
		OrphanReason: c.OrphanReason, Version: c.Version,
	}
}

func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil || t.IsZero() {
		return nil
	}
	return timestamppb.New(*t)
}

// Event returns the event of the claim as it is now.
func (c *Claim) Event() events.Event {
	return events.Event{
		Kind: "claim.changed", AggregateType: "claim", AggregateID: c.ID, AggregateVersion: c.Version, Payload: c.Proto(),
		Correlation: events.Correlation{
			TenantID: c.TenantID, WorkspaceID: c.WorkspaceID, WorkflowID: c.RunID,
			NodeID: c.NodeID,
		},
	}
}

// announce appends the events of changed claims. No caller waits for their numbers, so the events
// are Unnamed.
func announce(ctx context.Context, tx pgx.Tx, changed ...Claim) error {
	if len(changed) == 0 {
		return nil
	}
	list := make([]events.Event, len(changed))
	for i := range changed {
		list[i] = changed[i].Event()
		list[i].Unnamed = true
	}
	_, err := events.Append(ctx, tx, list...)
	return err
}

var claimsAfter = pg.Define(pg.RoleLifecycle, "claims.after", `
		SELECT `+columns+` FROM lifecycle.resource_claim c WHERE c.id > $1::uuid AND c.released_at IS NULL ORDER BY c.id
			LIMIT $2`)

// Announced returns the source of the claims that are not released.
func Announced() reannounce.Source {
	return reannounce.Rows("claims", claimsAfter, func(c Claim) (events.Event, error) { return c.Event(), nil })
}

var liveClaims = pg.Define(pg.RoleLifecycle, "claims.live", `
		SELECT `+columns+` FROM lifecycle.resource_claim c
		WHERE c.workspace_id = $1 AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND (cardinality($2::text[]) = 0 OR c.kind = ANY ($2))
		ORDER BY c.intent_at, c.id`)

// Live returns a workspace's claims that are neither released nor orphaned, oldest first, of the given kinds or of all.
func Live(ctx context.Context, q pg.Querier, workspaceID string, kinds ...string) ([]Claim, error) {
	list, err := pg.All[Claim](ctx, q, liveClaims, workspaceID, append([]string{}, kinds...))
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	return list, nil
}
