package guard

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// rowVersion reads the version of a row of a type, if it exists.
var rowVersion = pg.DefineDynamic(pg.RoleLifecycle, "guard.row_version", func(rowType string) string {
	src := scan.Tables[rowType]
	return `SELECT x.version FROM ` + src.Name + ` x WHERE x.` + src.ID + ` = $1`
}, guarded...)

// StandsAsChanged returns a text that describes how a row is still as it was changed by hand and contradicts its last
// event. It returns "" if the row was put back, if the product has announced it since, or if its former content is not
// known, so that it cannot be put back.
func StandsAsChanged(ctx context.Context, q pg.Querier, rowType, id string) (string, error) {
	traces, err := readTraces(ctx, q, evidenceOfRow, rowType, id)
	if err != nil || len(traces) == 0 {
		return "", err
	}
	tr := traces[0]
	if tr.putBack() || tr.blind {
		return "", nil
	}
	version, err := pg.Values[int64](ctx, q, rowVersion.For(rowType), id)
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
	maps.DeleteFunc(announced, func(column string, _ change) bool { return !isAnnounced(rowType, column) })
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

var settleResealed = pg.Define(pg.RoleLifecycle, "guard.settle_resealed",
	`INSERT INTO lifecycle.row_evidence_settled (evidence_id, how) SELECT e.evidence_id, 'acknowledged'
		FROM lifecycle.row_evidence e
			WHERE e.row_type = $1 AND e.row_id = $2 AND e.xid = pg_current_xact_id()`)

// sealRow puts a new seal on a row of a type.
var sealRow = pg.DefineDynamic(pg.RoleLifecycle, "guard.seal_row", func(rowType string) string {
	src := scan.Tables[rowType]
	return `UPDATE ` + src.Name + ` SET seal = NULL WHERE ` + src.ID + ` = $1`
}, guarded...)

// Settle settles the evidence that a finding names. If the finding reports a broken seal, the row is sealed
// again, and the evidence that the trigger records of that is settled as well.
func Settle(ctx context.Context, tx pgx.Tx, f finding.Seen) error {
	if err := settle(ctx, tx, f.Evidence, "acknowledged"); err != nil {
		return err
	}
	if f.After["seal"] == SealBroken {
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
