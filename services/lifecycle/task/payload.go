package task

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// idempotent are the types whose tasks may be done twice, so that one that an agent has forgotten is offered again.
var idempotent = []string{
	"probe.noop", "workload.status", "workload.deploy", "workload.start", "workload.stop", "workload.remove",
	"storage.allocate", "storage.release", "diagnostics.collect",
}

// Idempotent reports whether a task of that type may be done twice with the effect of once.
func Idempotent(taskType string) bool { return slices.Contains(idempotent, taskType) }

// bare are the types of idempotent tasks that an empty payload describes. Only they can be queued again after their
// end: the payloads of others are cleared by then.
var bare = []string{"probe.noop", "diagnostics.collect"}

// Requeueable reports whether a task of that type may be queued again after it has expired, or ended with an unknown
// outcome.
func Requeueable(taskType string) bool { return slices.Contains(bare, taskType) }

// payloadAt returns the SQL of a task's payload in a state: empty once the task has ended, in whichever state. A
// payload may contain credentials.
func payloadAt(state string) string {
	return `CASE WHEN ` + state + ` IN ('succeeded', 'failed', 'cancelled', 'superseded', 'expired', 'outcome_unknown')
		THEN ''::bytea ELSE t.payload END`
}

// clearBatches bounds the batches that one sweep clears: a database of an earlier build, which kept all payloads, is
// cleared over many sweeps, and none of them delays the end of stale tasks for long.
const clearBatches = 10

// clearPayloads clears the payloads of tasks that an earlier build ended, in batches, and returns how many it cleared.
// In rollback mode it clears none.
func (s *Server) clearPayloads(ctx context.Context) (int, error) {
	total := 0
	for range clearBatches {
		n := 0
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			tag, err := pg.Exec(ctx, tx, clearPayloads, sweepBatch)
			n = int(tag.RowsAffected())
			return err
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
