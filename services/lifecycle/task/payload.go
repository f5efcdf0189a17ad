package task

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// PayloadKept is how long an ended task that may be queued again keeps its payload, after its end and after its last
// moment to start. Then the sweep clears it, and the task cannot be queued again. Every other end clears the payload at
// once.
const PayloadKept = "1 day"

// idempotent are the types whose tasks may be done twice, so that one that has expired, or of which nobody knows
// whether it was done, may be queued again.
var idempotent = []string{
	"probe.noop", "workload.status", "workload.deploy", "workload.start", "workload.stop", "workload.remove",
	"storage.allocate", "storage.release", "diagnostics.collect",
}

// Idempotent says whether doing a task of that type twice is as good as once.
func Idempotent(taskType string) bool { return slices.Contains(idempotent, taskType) }

// payloadAt is the SQL of a task's payload in a state: nothing once no agent may be sent it again. A payload may carry
// credentials.
func payloadAt(state string) string {
	return `CASE WHEN ` + state + ` IN ('succeeded', 'failed', 'cancelled', 'superseded')
		OR ` + state + ` IN ('expired', 'outcome_unknown') AND t.type NOT IN ('` + strings.Join(idempotent, `', '`) + `')
		THEN ''::bytea ELSE t.payload END`
}

// payloadOver is the condition that a task t that has ended keeps its payload no longer.
const payloadOver = `t.expires_at <= mesh.clock() - interval '` + PayloadKept + `'
	AND t.state_at <= mesh.clock() - interval '` + PayloadKept + `'`

// clearBatches bounds what one sweep clears: a database of an earlier build, which kept all payloads, is cleared over
// many sweeps, and none of them holds up the end of stale tasks for long.
const clearBatches = 10

// clearPayloads clears what ended tasks still carry after PayloadKept, in batches, and returns of how many it did. In
// rollback mode it leaves all as it is.
func (s *Server) clearPayloads(ctx context.Context) (int, error) {
	total := 0
	for range clearBatches {
		n := 0
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			tag, err := pg.Exec(ctx, tx, clearPayloads, sweepBatch)
			n = int(tag.RowsAffected())
			return err //nolint:wrapcheck // wrapped below
		})
		total += n
		if err != nil {
			return total, fmt.Errorf("clear payloads of ended tasks: %w", err)
		}
		if n < sweepBatch {
			break
		}
	}
	return total, nil
}

// keepsPayload reports whether a locked task that has ended may still be sent as it was.
func keepsPayload(ctx context.Context, tx pgx.Tx, taskID string) (bool, error) {
	keeps, err := pg.Value[bool](ctx, tx, hasPayloadStill, taskID)
	if err != nil {
		return false, fmt.Errorf("read age of task %s: %w", taskID, err)
	}
	return keeps, nil
}
