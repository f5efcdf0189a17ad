package actions

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// batch is how many actions one transaction fails.
const batch = 500

// Sweep fails the open actions whose time is over, and returns how many. Those of kinds that only a newer build knows
// stay. In rollback mode none fails.
func Sweep(ctx context.Context, db pg.Beginner) (int, error) {
	total := 0
	for {
		failed := 0
		err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			failed, err = sweepOnce(ctx, tx)
			return err
		})
		if err != nil {
			return total, fmt.Errorf("fail recovery actions: %w", err)
		}
		if total += failed; failed < batch {
			return total, nil
		}
	}
}

func sweepOnce(ctx context.Context, tx pgx.Tx) (int, error) {
	rows, err := pg.All[row](ctx, tx, failDue, names.Spellings[Kind](), batch)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	b := &Book{open: map[place]*Action{}}
	for _, r := range rows {
		a := &Action{row: r}
		outcome := "it did not come to its end in its time" + nextOf(r.Kind)
		if r.Outcome != "" {
			outcome += "; before: " + r.Outcome
		}
		at := r.FailsAt
		a.end(StateFailed, at, outcome)
		b.keep(a)
	}
	return len(rows), b.Save(ctx, tx)
}

// nextOf returns what a person does about what an action of a kind was for, as its outcome has it; empty: the verdict
// on the node has it.
func nextOf(kind string) string {
	if kind != names.Of(CARepair) {
		return ""
	}
	return ", and the mismatch lasts: compare both sides with `gpuaas ca status`, then `gpuaas ca repair --root " +
		"FINGERPRINT --reason TEXT`, which begins another one"
}
