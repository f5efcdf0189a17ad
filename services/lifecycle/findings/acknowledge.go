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
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
)

// Server serves FindingService: a person's word that a changed row has been looked at.
type Server struct {
	sweeper *Sweeper
	audit   *audit.Log
}

// NewServer makes it.
func NewServer(s *Sweeper, log *audit.Log) *Server { return &Server{sweeper: s, audit: log} }

var findingToAcknowledge = pg.Define(pg.RoleLifecycle, "findings.finding_to_acknowledge",
	`SELECT `+findingColumns+` FROM lifecycle.finding f WHERE f.finding_id = $1 FOR UPDATE`)

var acknowledgeFinding = pg.Define(pg.RoleLifecycle, "findings.acknowledge_finding",
	`UPDATE lifecycle.finding f SET acknowledged_by = $2, acknowledge_reason = $3 WHERE f.finding_id = $1`)

// AcknowledgeFinding ends the finding of a row that was changed by hand, once the row and the log agree: what it spoke of is settled, and what it did
// not speak of makes another one. All other findings end by themselves, when what they saw is no more.
func (v *Server) AcknowledgeFinding(ctx context.Context, req *lifecyclev1.AcknowledgeFindingRequest) (*lifecyclev1.AcknowledgeFindingResponse, error) {
	s, res := v.sweeper, &lifecyclev1.AcknowledgeFindingResponse{}
	entry := audit.Entry{Action: "finding.acknowledge", Reason: req.GetReason(), SubjectType: "finding", SubjectID: req.GetFindingId()}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err //nolint:wrapcheck // a fault, or it says what it read
		}
		if _, err := pg.Exec(ctx, tx, takeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
		f, err := oneFinding(ctx, tx, findingToAcknowledge, req.GetFindingId())
		if errors.Is(err, pgx.ErrNoRows) {
			return fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such finding")
		}
		if err != nil {
			return fmt.Errorf("read finding: %w", err)
		}
		entry.TenantID, entry.WorkspaceID, entry.AllocationID, entry.NodeID = f.TenantID, f.WorkspaceID, f.AllocationID, f.NodeID
		entry.Details = map[string]any{"kind": f.Kind, "subject": f.SubjectType + " " + f.SubjectID, "summary": f.Summary}
		if err := s.mayAcknowledge(ctx, f); err != nil {
			return err
		}
		if err := s.settleFinding(ctx, tx, f); err != nil {
			return err
		}
		if _, err := audit.Record(ctx, tx, entry); err != nil {
			return err //nolint:wrapcheck // it says what it did
		}
		_, err = pg.Exec(ctx, tx, acknowledgeFinding, f.id, rpc.ActorFrom(ctx), req.GetReason())
		if err != nil {
			return fmt.Errorf("acknowledge finding: %w", err)
		}
		res.Finding, res.Pos, err = resolve(ctx, tx, f)
		return err
	})
	if err != nil {
		return nil, v.audit.Refuse(ctx, entry, err) //nolint:wrapcheck // it is the answer
	}
	s.deps.Committed()
	return res, nil
}

// mayAcknowledge refuses what has ended, what ends by itself, and what stands in contradiction still.
func (s *Sweeper) mayAcknowledge(ctx context.Context, f row) error {
	switch {
	case f.resolved != nil:
		return fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the finding is over", fault.Unmet("the finding is not open any more"),
			fault.Remedy("nothing is left to do"))
	case f.Kind != rowChanged:
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "a finding of "+names.Of(f.Kind)+" ends by itself when it is no longer so",
			fault.Unmet("the finding is of "+names.Of(f.Kind)+", not of "+names.Of(rowChanged)), fault.Remedy(f.NextAction))
	}
	still, err := s.disagrees(ctx, rowTypes[f.SubjectType], f.SubjectID)
	if err != nil {
		return err
	}
	if still != "" {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the row does not agree with the log: "+still,
			fault.Unmet("the row differs from the event of its version"),
			fault.Remedy("set the row back to what stands under before, or let an operation go on from what it is; then acknowledge"))
	}
	return nil
}

// rowStands reads how far the log was followed, and whether a row of a type stands.
var rowStands = pg.DefineDynamic(pg.RoleLifecycle, "findings.row_stands", func(rowType string) string {
	src := sources[rowType]
	return `SELECT coalesce((SELECT pos FROM lifecycle.event_cursor WHERE name = $1), 0), EXISTS (SELECT 1 FROM ` + src.table + ` x WHERE x.` + src.id + ` = $2)`
}, guarded...)

// disagrees says how one row and the log contradict each other at this moment; empty if they do not. A seal that does not fit is no contradiction: the
// acknowledgement puts on a new one.
func (s *Sweeper) disagrees(ctx context.Context, t *rowType, id string) (string, error) {
	src := sources[t.name]
	var pos int64
	var is bool
	err := pg.QueryRow(ctx, s.deps.DB, rowStands.For(t.name), cursorName, id).Scan(&pos, &is)
	if err != nil {
		return "", fmt.Errorf("look at row: %w", err)
	}
	if !is {
		kept, err := readWitnesses(ctx, s.deps.DB, ofRow, t.name, id)
		if err != nil || len(kept) == 0 {
			return "", err
		}
		return "it is gone", nil
	}
	seen, err := s.compare(ctx, t, src, pos, []suspect{{ID: id}})
	if err != nil || len(seen) == 0 {
		return "", err
	}
	return seen[0].Summary[len(changedOutside(t.name, id)):], nil
}

var settleResealed = pg.Define(pg.RoleLifecycle, "findings.settle_resealed",
	`INSERT INTO lifecycle.row_evidence_settled (evidence_id, how) SELECT e.evidence_id, 'acknowledged' FROM lifecycle.row_evidence e
			WHERE e.row_type = $1 AND e.row_id = $2 AND e.xid = pg_current_xact_id()`)

var settleBreach = pg.Define(pg.RoleLifecycle, "findings.settle_breach",
	`UPDATE lifecycle.row_witness v SET breach = NULL, breach_at = NULL WHERE v.row_type = $1 AND v.row_id = $2 AND v.breach_at <= $3`)

// sealRow puts a new seal on a row of a type.
var sealRow = pg.DefineDynamic(pg.RoleLifecycle, "findings.seal_row", func(rowType string) string {
	src := sources[rowType]
	return `UPDATE ` + src.table + ` SET seal = NULL WHERE ` + src.id + ` = $1`
}, guarded...)

// settleFinding settles the evidence that a finding spoke of, and the break in the log. A seal that it called broken is put on anew, and what the
// trigger says to that is settled with it.
func (s *Sweeper) settleFinding(ctx context.Context, tx pgx.Tx, f row) error {
	if err := settle(ctx, tx, f.Evidence, "acknowledged"); err != nil {
		return err
	}
	if f.After["seal"] == sealBroken {
		if _, err := pg.Exec(ctx, tx, sealRow.For(f.SubjectType), f.SubjectID); err != nil {
			return fmt.Errorf("seal row: %w", err)
		}
		_, err := pg.Exec(ctx, tx, settleResealed, f.SubjectType, f.SubjectID)
		if err != nil {
			return fmt.Errorf("settle evidence: %w", err)
		}
	}
	_, err := pg.Exec(ctx, tx, settleBreach, f.SubjectType, f.SubjectID, f.lastSeen)
	if err != nil {
		return fmt.Errorf("settle break in the log: %w", err)
	}
	return nil
}
