package work

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// slow is a lifecycle whose database takes reports of up to a given number of nodes in ten seconds, and times out on
// larger ones.
type slow struct {
	Lifecycle

	takes int
	stuck string // a node whose report is never taken

	mu    sync.Mutex
	taken []string
}

func (s *slow) ReportTasks(ctx context.Context, req *lifecyclev1.ReportTasksRequest) (*lifecyclev1.ReportTasksResponse,
	error,
) {
	stuck := slices.ContainsFunc(req.GetReports(),
		func(n *lifecyclev1.NodeReport) bool { return n.GetNodeId() == s.stuck })
	if len(req.GetReports()) > s.takes || stuck {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range req.GetReports() {
		s.taken = append(s.taken, r.GetNodeId())
	}
	return &lifecyclev1.ReportTasksResponse{}, nil
}

// batchOf returns reports of so many nodes with their sessions, all marked busy, and the nodes' names.
func batchOf(r *Reporter, nodes int) (sessions []*roster.Session, reports []*lifecyclev1.NodeReport, names []string) {
	for range nodes {
		id := ids.New()
		names = append(names, id)
		sessions = append(sessions, &roster.Session{})
		reports = append(reports, &lifecyclev1.NodeReport{NodeId: id})
		r.busy[sessions[len(sessions)-1]] = true
	}
	return sessions, reports, names
}

// TestANodeThatAlwaysTimesOutHoldsUpNoOther checks that all other reports of its batch are taken, wherever in the batch
// it is.
func TestANodeThatAlwaysTimesOutHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	for _, at := range []int{0, 31, 63} {
		synctest.Test(t, func(t *testing.T) {
			lc := &slow{takes: reportNodes}
			r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, lc, nil)
			sessions, reports, want := batchOf(r, reportNodes)
			lc.stuck = want[at]
			r.send(t.Context(), sessions, reports)
			if want = slices.Delete(want, at, at+1); !slices.Equal(lc.taken, want) {
				t.Errorf("node %d: %d of %d nodes' reports were taken", at, len(lc.taken), len(want))
			}
			if len(r.busy) > 0 {
				t.Errorf("node %d: %d sessions are busy after it", at, len(r.busy))
			}
		})
	}
}

// TestABatchThatTimesOutIsHalved checks that reports of many nodes reach a lifecycle that is too slow for all of them
// at once, each report once, in the time that the halves take.
func TestABatchThatTimesOutIsHalved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		lc := &slow{takes: 10}
		r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, lc, nil)
		sessions, reports, want := batchOf(r, reportNodes)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		began := time.Now()
		r.send(ctx, sessions, reports)
		if !slices.Equal(lc.taken, want) {
			t.Errorf("%d of %d nodes' reports were taken, in order: %v", len(lc.taken), len(want), slices.IsSorted(lc.taken))
		}
		// One report of 64 nodes, two of 32 and four of 16 time out, 10 s each; eight of 8 are taken.
		if took := time.Since(began); took != 70*time.Second {
			t.Errorf("it took %s", took)
		}
	})
}
