package findings

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/guard"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
)

// Server serves FindingService, by which a person acknowledges the finding of a changed row.
type Server struct {
	sweeper *Sweeper
	audit   *audit.Log
}

// NewServer returns a server.
func NewServer(s *Sweeper, log *audit.Log) *Server { return &Server{sweeper: s, audit: log} }

var findingToAcknowledge = pg.Define(pg.RoleLifecycle, "findings.finding_to_acknowledge",
	`SELECT `+finding.Columns+` FROM lifecycle.finding f WHERE f.finding_id = $1 FOR UPDATE`)

var acknowledgeFinding = pg.Define(pg.RoleLifecycle, "findings.acknowledge_finding",
	`UPDATE lifecycle.finding f SET acknowledged_by = $2, acknowledge_reason = $3 WHERE f.finding_id = $1`)

// AcknowledgeFinding ends the finding of a row that was changed by hand, once the row is no longer as the hand left it.
// The evidence that the finding names is settled; any other evidence makes another finding. Findings of other kinds end
// by themselves, when the contradiction is gone.
func (v *Server) AcknowledgeFinding(ctx context.Context,
	req *lifecyclev1.AcknowledgeFindingRequest,
) (*lifecyclev1.AcknowledgeFindingResponse, error) {
	s, res := v.sweeper, &lifecyclev1.AcknowledgeFindingResponse{}
	entry := audit.Entry{
		Action: "finding.acknowledge", Reason: req.GetReason(), SubjectType: "finding",
		SubjectID: req.GetFindingId(),
	}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
		f, err := finding.One(ctx, tx, findingToAcknowledge, req.GetFindingId())
		if errors.Is(err, pgx.ErrNoRows) {
			return fault.NoSuch("finding", req.GetFindingId())
		}
		if err != nil {
			return fmt.Errorf("read finding: %w", err)
		}
		entry.TenantID, entry.WorkspaceID, entry.AllocationID, entry.NodeID = f.TenantID, f.WorkspaceID, f.AllocationID,
			f.NodeID
		entry.Details = map[string]any{"kind": f.Kind, "subject": f.SubjectType + " " + f.SubjectID, "summary": f.Summary}
		if err := mayAcknowledge(ctx, tx, f); err != nil {
			return err
		}
		if err := guard.Settle(ctx, tx, f.Seen); err != nil {
			return err
		}
		if _, err := audit.Record(ctx, tx, entry); err != nil {
			return err
		}
		_, err = pg.Exec(ctx, tx, acknowledgeFinding, f.ID, rpc.ActorFrom(ctx), req.GetReason())
		if err != nil {
			return fmt.Errorf("acknowledge finding: %w", err)
		}
		over, pos, err := finding.Resolve(ctx, tx, f.ID)
		if err != nil {
			return err
		}
		if len(over) != 1 {
			return fmt.Errorf("resolve finding %s: it is not open", f.ID)
		}
		res.Finding, res.Pos = over[0], pos
		return nil
	})
	if err != nil {
		return nil, v.audit.Refuse(ctx, entry, err)
	}
	s.deps.Committed()
	return res, nil
}

// mayAcknowledge returns a fault for a finding that has ended, for one of a kind that ends by itself, and for a row
// that is still as it was changed.
func mayAcknowledge(ctx context.Context, q pg.Querier, f finding.Row) error {
	switch {
	case f.Resolved != nil:
		return fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the finding is over",
			fault.Unmet("the finding is not open any more"),
			fault.Remedy("nothing is left to do"))
	case f.Kind != guard.RowChanged:
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"a finding of "+names.Of(f.Kind)+" ends by itself when it is no longer so",
			fault.Unmet("the finding is of "+names.Of(f.Kind)+", not of "+names.Of(guard.RowChanged)),
			fault.Remedy(f.NextAction))
	}
	still, err := guard.StandsAsChanged(ctx, q, f.SubjectType, f.SubjectID)
	if err != nil {
		return err
	}
	if still != "" {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the row stands as it was changed by hand: "+still,
			fault.Unmet("no operation has gone on from the row, and it has not been put back"),
			fault.Remedy("set the row back to what stands under before, or let an operation go on from what it is; then "+
				"acknowledge"))
	}
	return nil
}
