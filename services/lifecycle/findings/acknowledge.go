package findings

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
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
	`SELECT `+findingColumns+` FROM lifecycle.finding f WHERE f.finding_id = $1 FOR UPDATE`)

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
		entry.TenantID, entry.WorkspaceID, entry.AllocationID, entry.NodeID = f.TenantID, f.WorkspaceID, f.AllocationID,
			f.NodeID
		entry.Details = map[string]any{"kind": f.Kind, "subject": f.SubjectType + " " + f.SubjectID, "summary": f.Summary}
		if err := mayAcknowledge(ctx, tx, f); err != nil {
			return err
		}
		if err := settleFinding(ctx, tx, f); err != nil {
			return err
		}
		if _, err := audit.Record(ctx, tx, entry); err != nil {
			return err
		}
		_, err = pg.Exec(ctx, tx, acknowledgeFinding, f.id, rpc.ActorFrom(ctx), req.GetReason())
		if err != nil {
			return fmt.Errorf("acknowledge finding: %w", err)
		}
		res.Finding, res.Pos, err = resolve(ctx, tx, f)
		return err
	})
	if err != nil {
		return nil, v.audit.Refuse(ctx, entry, err)
	}
	s.deps.Committed()
	return res, nil
}

// mayAcknowledge returns a fault for a finding that has ended, for one of a kind that ends by itself, and for a row
// that is still as it was changed.
func mayAcknowledge(ctx context.Context, q pg.Querier, f row) error {
	switch {
	case f.resolved != nil:
		return fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the finding is over",
			fault.Unmet("the finding is not open any more"),
			fault.Remedy("nothing is left to do"))
	case f.Kind != rowChanged:
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"a finding of "+names.Of(f.Kind)+" ends by itself when it is no longer so",
			fault.Unmet("the finding is of "+names.Of(f.Kind)+", not of "+names.Of(rowChanged)), fault.Remedy(f.NextAction))
	}
	still, err := standsAsChanged(ctx, q, rowKey{f.SubjectType, f.SubjectID})
	if err != nil {
		return err
	}
	if still != "" {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the row stands as it was changed by hand: "+still,
			fault.Unmet("no operation has gone on from the row, and it has not been put back"),
			fault.Remedy("set the row back to what stands under before, or let an operation go on from what it is; then acknowledge"))
	}
	return nil
}

// rowVersion reads the version of a row of a type, if it exists.
var rowVersion = pg.DefineDynamic(pg.RoleLifecycle, "findings.row_version", func(rowType string) string {
	src := sources[rowType]
	return `SELECT x.version FROM ` + src.table + ` x WHERE x.` + src.id + ` = $1`
}, guarded...)

// standsAsChanged returns a text that describes how a row is still as it was changed by hand and contradicts its last
// event. It returns "" if the row was put back, if the product has announced it since, or if its former content is not
// known, so that it cannot be put back.
func standsAsChanged(ctx context.Context, q pg.Querier, k rowKey) (string, error) {
	traces, err := readTraces(ctx, q)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(traces, func(tr *trace) bool { return tr.rowType == k.rowType && tr.id == k.id })
	if i < 0 || traces[i].putBack() || traces[i].blind {
		return "", nil
	}
	tr := traces[i]
	version, err := pg.Values[int64](ctx, q, rowVersion.For(k.rowType), k.id)
	if err != nil {
		return "", fmt.Errorf("read version of row: %w", err)
	}
	switch {
	case !tr.is && len(version) == 0:
		return "it is gone", nil
	case len(version) == 0 || tr.version != strconv.FormatInt(version[0], 10):
		return "", nil
	case !tr.was:
		return "it was inserted", nil
	}
	announced := tr.net()
	maps.DeleteFunc(announced, func(column string, _ change) bool { return !isAnnounced(k.rowType, column) })
	if len(announced) == 0 {
		return "", nil
	}
	return list(sortedKeys(announced)) + " differ from what stood before and was announced", nil
}

// isAnnounced reports whether events of a row contain a column, so that a change by hand contradicts them.
func isAnnounced(rowType, column string) bool {
	if strings.HasPrefix(column, deviceField) {
		return true
	}
	if slices.Contains([]string{"op_seq", "next_at", "heartbeat_at"}, column) { // they change without an event
		return false
	}
	var m proto.Message
	switch rowType {
	case "workspace":
		m = &lifecyclev1.Workspace{}
	case "run":
		m = &lifecyclev1.Run{}
	default:
		m = &lifecyclev1.Allocation{}
	}
	return m.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(column)) != nil
}

var settleResealed = pg.Define(pg.RoleLifecycle, "findings.settle_resealed",
	`INSERT INTO lifecycle.row_evidence_settled (evidence_id, how) SELECT e.evidence_id, 'acknowledged' FROM lifecycle.row_evidence e
			WHERE e.row_type = $1 AND e.row_id = $2 AND e.xid = pg_current_xact_id()`)

// sealRow puts a new seal on a row of a type.
var sealRow = pg.DefineDynamic(pg.RoleLifecycle, "findings.seal_row", func(rowType string) string {
	src := sources[rowType]
	return `UPDATE ` + src.table + ` SET seal = NULL WHERE ` + src.id + ` = $1`
}, guarded...)

// settleFinding settles the evidence that a finding names. If the finding reports a broken seal, the row is sealed
// again, and the evidence that the trigger records of that is settled as well.
func settleFinding(ctx context.Context, tx pgx.Tx, f row) error {
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
	return nil
}
