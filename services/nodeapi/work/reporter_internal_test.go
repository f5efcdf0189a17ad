package work

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// large is the result of a task with as much output as an agent sends.
func large(task string) *nodev1.TaskResult {
	return &nodev1.TaskResult{
		Task: ref(task), State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: []byte(strings.Repeat("x", 256<<10)),
	}
}

// TestHeldResultsDoNotStopTheReader: nothing is reported, since the view is stale or lifecycle is away, and an agent
// sends its results again and again, as it does until they are acknowledged. Its session's reader goes on, so that
// heartbeats are read, and each result waits once.
func TestHeldResultsDoNotStopTheReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, nil, nil)
		s := &roster.Session{}
		began := time.Now()
		tasks := []string{"a", "b", "c", "d", "e", "f"} // two more than there is room for
		for range 20 {
			for _, task := range tasks {
				if err := r.Result(t.Context(), s, large(task)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if took := time.Since(began); took > stallAfter {
			t.Errorf("the reader waited for %s", took)
		}
		_, reports, _ := r.take(time.Now())
		if len(reports) != 1 || len(reports[0].GetResults()) != 4 {
			t.Fatalf("%d reports; %d results in the first", len(reports), len(reports[0].GetResults()))
		}
		if r.frames != 0 || r.bytes != 0 {
			t.Errorf("%d frames and %d bytes wait after all were taken", r.frames, r.bytes)
		}
		// There is room again for what comes next time.
		if err := r.Result(t.Context(), s, large("f")); err != nil {
			t.Fatal(err)
		}
		if p := r.pending[s]; p == nil || p.frames != 1 || p.bytes < 256<<10 {
			t.Errorf("waiting: %+v", p)
		}
	})
}

// TestAResultWaitsWhileReportsAreTaken: a result that finds no room is not dropped if there is room soon.
func TestAResultWaitsWhileReportsAreTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, nil, nil)
		s := &roster.Session{}
		for _, task := range []string{"a", "b", "c", "d"} {
			if err := r.Result(t.Context(), s, large(task)); err != nil {
				t.Fatal(err)
			}
		}
		done := make(chan error, 1)
		go func() { done <- r.Result(t.Context(), s, large("e")) }()
		synctest.Wait()
		time.Sleep(stallAfter / 2)
		r.take(time.Now())
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if p := r.pending[s]; p == nil || len(p.report.GetResults()) != 1 {
			t.Errorf("waiting: %+v", p)
		}
	})
}

// TestAResultSentAgainReplacesTheOneThatWaits counts a result that changed in size as it is now.
func TestAResultSentAgainReplacesTheOneThatWaits(t *testing.T) {
	t.Parallel()
	r := NewReporter(slog.New(slog.DiscardHandler), ids.New(), nil, nil, nil)
	s := &roster.Session{}
	small := &nodev1.TaskResult{Task: ref("a"), State: commonv1.TaskState_TASK_STATE_FAILED}
	again := &nodev1.TaskResult{Task: &nodev1.TaskRef{TaskId: "a", Attempt: 2}}
	for _, f := range []*nodev1.TaskResult{large("a"), small, again} {
		if err := r.Result(t.Context(), s, f); err != nil {
			t.Fatal(err)
		}
	}
	p := r.pending[s]
	if got := p.report.GetResults(); len(got) != 2 || got[0] != small || got[1] != again || p.frames != 2 ||
		p.bytes > 100 || r.bytes != p.bytes || r.frames != p.frames {
		t.Errorf("%d results, %d frames, %d bytes (all: %d, %d)", len(got), p.frames, p.bytes, r.frames, r.bytes)
	}
}
