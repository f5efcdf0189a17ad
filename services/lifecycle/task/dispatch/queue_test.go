package dispatch_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

func (k *kit) spec(n *node, key string) task.Spec {
	return task.Spec{
		Type: noop, NodeID: n.id, IdempotencyKey: key, Payload: &nodev1.ProbeNoop{Nonce: "n"}, StartWithin: time.Minute,
	}
}

// TestAProbeTakesTwoRoundTrips checks that a probe takes one round trip for the row, with the check of its node, and
// one for the event with the commit.
func TestAProbeTakesTwoRoundTrips(t *testing.T) {
	k := newKit(t)
	n := k.node()
	c := k.counted()
	before := c.sent.Load()
	res, err := k.tasks.EnqueueProbe(t.Context(), &lifecyclev1.EnqueueProbeRequest{NodeId: n.id})
	if err != nil {
		t.Fatal(err)
	}
	if sent := c.sent.Load() - before; sent != 2 {
		t.Errorf("queueing a probe takes %d round trips", sent)
	}
	if res.GetPos() == "" || res.GetTask().GetState() != queued {
		t.Errorf("answered %v", res)
	}
}

// TestTasksOfOneGroup: tasks that wait share a transaction. Each caller gets its own row, as it is stored; of those
// with one key one is new; a node that is not there refuses its own task alone.
func TestTasksOfOneGroup(t *testing.T) {
	k := newKit(t)
	n, other := k.node(), k.node()
	const callers = 40
	type answer struct {
		row   task.Row
		isNew bool
		err   error
	}
	answers := make([]answer, callers)
	same := ids.New()
	spec := func(i int) task.Spec {
		switch s := k.spec(n, fmt.Sprintf("one/%02d", i)); {
		case i%10 == 3:
			s.NodeID = ids.New()
			return s
		case i%10 == 7:
			s.IdempotencyKey = same
			return s
		case i%2 == 0:
			s.NodeID, s.WorkspaceID, s.TenantID, s.RunID = other.id, ids.New(), ids.New(), ids.New()
			s.Epoch, s.OpSeq = 3, int64(i)
			s.CorrelationID, s.CreatedBy = "c", "by"
			return s
		default:
			return s
		}
	}
	k.counted()                              // a pool of one connection
	conn, err := k.pool.Acquire(t.Context()) // what comes first waits for the others
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			a := &answers[i]
			a.row, a.isNew, a.err = k.tasks.Queue(t.Context(), spec(i))
		})
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := k.tasks.Waiting(); n != callers-dispatch.QueueLanes {
			return fmt.Errorf("%d tasks wait", n)
		}
		return nil
	})
	conn.Release()
	all.Wait()
	var transactions int
	err = k.pool.QueryRow(t.Context(), `SELECT count(DISTINCT xmin::text) FROM lifecycle.task`).Scan(&transactions)
	if err != nil || transactions > dispatch.QueueLanes+1 {
		t.Errorf("%d transactions, %v; those that waited share one", transactions, err)
	}
	fresh := 0
	for i, a := range answers {
		if i%10 == 3 {
			wantReason(t, a.err, commonv1.Reason_REASON_NOT_FOUND)
			continue
		}
		if a.err != nil {
			t.Fatalf("task %d: %v", i, a.err)
		}
		if a.isNew {
			fresh++
		}
		var stored task.Row
		k.tx(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			stored, err = task.ByKey(ctx, tx, spec(i).IdempotencyKey)
			return err
		})
		if diff := cmp.Diff(stored, a.row); diff != "" {
			t.Errorf("task %d: returned, not stored: %s", i, diff)
		}
	}
	if want := callers - callers/10 - callers/10 + 1; fresh != want {
		t.Errorf("%d are new, not %d", fresh, want)
	}
}
