package dispatch_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// evidenceLimit is how many rows of late evidence a task keeps.
const evidenceLimit = 8

// TestInventedAttemptsLeaveNothing reports thousands of attempts of one finished task that were never leased: no row,
// no event, no acknowledgement.
func TestInventedAttemptsLeaveNothing(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	if !k.result(n, ref, succeeded) {
		t.Fatal("not acknowledged")
	}
	before := k.row(row.TaskID)
	for batch := range int32(4) {
		res := k.report(n, func(r *lifecyclev1.NodeReport) {
			for i := range int32(1000) {
				ref := &nodev1.TaskRef{TaskId: row.TaskID, Attempt: 1000 + 1000*batch + i}
				r.Results = append(r.Results, &nodev1.TaskResult{Task: ref, State: succeeded})
			}
		})
		if len(res.GetAcknowledged()) != 0 {
			t.Fatalf("%d invented attempts are acknowledged", len(res.GetAcknowledged()))
		}
	}
	k.wants(row.TaskID, succeeded, 1, 0)
	if after := k.row(row.TaskID); after.Version != before.Version {
		t.Errorf("the row has version %d, had %d", after.Version, before.Version)
	}
	k.wantHistory(row.TaskID, "queued", "dispatched", "succeeded")
}

// TestLateEvidenceIsCapped reports the ended attempt again in every session, with another end each time.
func TestLateEvidenceIsCapped(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	if !k.result(n, ref, succeeded) {
		t.Fatal("not acknowledged")
	}
	ends := []commonv1.TaskState{failed, cancelled, unknown}
	for i := range 3 * evidenceLimit {
		if i%len(ends) == 0 {
			k.ready(n)
		}
		if !k.result(n, ref, ends[i%len(ends)]) {
			t.Fatal("a late result of an attempt that was leased is to be acknowledged")
		}
	}
	k.wants(row.TaskID, succeeded, 1, evidenceLimit)
	var counted int
	if err := k.pool.QueryRow(t.Context(), `SELECT late_evidence FROM lifecycle.task WHERE task_id = $1`,
		row.TaskID).Scan(&counted); err != nil {
		t.Fatal(err)
	}
	if counted != 3*evidenceLimit {
		t.Errorf("the row counts %d late results, want %d", counted, 3*evidenceLimit)
	}
	// One event for each row that is kept, and one with the text that further ones are only counted.
	if got, want := len(k.history(row.TaskID)), 3+evidenceLimit+1; got != want {
		t.Errorf("%d events, want %d", got, want)
	}
}

// TestTheFirstResultOfABatchWins reports two ends of one attempt in one batch, in both orders, in one report and in
// two.
func TestTheFirstResultOfABatchWins(t *testing.T) {
	for _, order := range [][]commonv1.TaskState{{failed, succeeded}, {succeeded, failed}} {
		for _, reports := range []int{1, 2} {
			k := newKit(t)
			n := k.node()
			row := k.enqueue(n, ofRun(ids.New()))
			ref := k.lease(n)
			req := &lifecyclev1.ReportTasksRequest{}
			for i, state := range order {
				if i < reports {
					req.Reports = append(req.Reports, &lifecyclev1.NodeReport{
						NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
					})
				}
				last := req.GetReports()[len(req.GetReports())-1]
				last.Results = append(last.Results, &nodev1.TaskResult{Task: ref, State: state, Output: []byte(state.String())})
			}
			res, err := k.tasks.ReportTasks(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for _, one := range res.GetResults() {
				if len(one.GetAcknowledged()) == 0 {
					t.Errorf("not acknowledged: %v", one)
				}
			}
			k.wants(row.TaskID, order[0], 1, 1)
			if got := k.row(row.TaskID).Output; got != order[0].String() {
				t.Errorf("output %q, want that of the first result", got)
			}
			if k.wakes() != 1 {
				t.Errorf("the run was woken %d times", k.wakes())
			}
		}
	}
}
