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

// slow is a lifecycle whose database takes as many nodes in ten seconds as it says, and none of a report with more.
type slow struct {
	Lifecycle

	takes int

	mu    sync.Mutex
	taken []string
}

func (s *slow) ReportTasks(ctx context.Context, req *lifecyclev1.ReportTasksRequest) (*lifecyclev1.ReportTasksResponse, error) {
	if len(req.GetReports()) > s.takes {
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

// TestABatchThatTimesOutIsHalved checks that reports of many nodes reach a lifecycle that is too slow for all of them at
// once, each one once, and in the time that the halves take.
func TestABatchThatTimesOutIsHalved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		lc := &slow{takes: 10}
		r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, lc, nil)
		var sessions []*roster.Session
		var reports []*lifecyclev1.NodeReport
		var want []string
		for range reportNodes {
			id := ids.New()
			want = append(want, id)
			sessions = append(sessions, &roster.Session{})
			reports = append(reports, &lifecyclev1.NodeReport{NodeId: id})
		}
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
