package operation

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestARetryOfAReleaseLocksTheAllocationLast: the reaper of orphans locks a workspace before its allocation. A retry
// that locked them in the opposite order would deadlock with it.
func TestARetryOfAReleaseLocksTheAllocationLast(t *testing.T) {
	testkit.IO(t)
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	ctx := testkit.Context(t)
	id, _, a := p.failedRelease()
	pool := p.seats[0].pool
	reaper, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reaper.Rollback(context.Background()) }) // or the pool would wait for it
	if _, err := reaper.Exec(ctx, `SELECT 1 FROM lifecycle.workspace WHERE id = $1 FOR UPDATE`, id); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := NewAllocations(p.seats[0].server).RetryRelease(operator(ctx),
			&lifecyclev1.RetryReleaseRequest{AllocationId: a.ID, Reason: "it is back"})
		done <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting int
		err := p.db.OwnerPool().QueryRow(ctx, `SELECT count(*) FROM pg_locks l WHERE NOT l.granted
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) OR NOT l.granted
				AND l.locktype = 'transactionid'
			AND l.pid IN (SELECT s.pid FROM pg_stat_activity s WHERE s.datname = current_database())`).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("the retry does not wait for the workspace")
		}
		return err
	})
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT 1 FROM lifecycle.allocation WHERE allocation_id = $1 FOR UPDATE NOWAIT`, a.ID)
		return err
	})
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "55P03" {
		t.Error("the retry has locked the allocation before the workspace")
	} else if err != nil {
		t.Error(fmt.Errorf("look at the lock of the allocation: %w", err))
	}
	if err := reaper.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("the retry: %v", err)
	}
}
