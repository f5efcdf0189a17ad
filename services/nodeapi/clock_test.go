package nodeapi_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// clocked is a heartbeat of a host whose clock is off.
func clocked(sequence int64, off time.Duration) *nodev1.ConnectRequest {
	f := beat(sequence)
	f.GetHeartbeat().Monotonic = durationpb.New(time.Hour)
	f.GetHeartbeat().WallClock = timestamppb.New(time.Now().Add(off))
	return f
}

// TestAClockThatIsOffIsAnEventOnce: heartbeats of an hour that is off by a day are one event, and the admission of a
// session whose agent has sent its clock before has it already. The task types come with the admission.
func TestAClockThatIsOffIsAnEventOnce(t *testing.T) {
	k := newKit(t)
	a := k.node()
	k.connect(a, k.replica().AgentAddr(), true)
	a.send(a.hello(func(h *nodev1.Hello) {
		h.TaskTypes = []commonv1.TaskType{commonv1.TaskType_TASK_TYPE_PROBE_NOOP}
	}))
	welcome := a.next("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome()
	a.session = welcome.GetSessionId()
	a.send(clocked(0, -24*time.Hour))
	a.send(ready(welcome.GetGeneration()))
	a.next("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })
	for i := range int64(20) {
		a.send(clocked(i+1, -24*time.Hour))
	}
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: &nodev1.DiagnosticReport{
		Diagnostics: []*commonv1.Diagnostic{{Code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL, Detail: "last"}},
	}}})
	var list []testkit.Event
	testkit.Eventually(t, testkit.Patience, func() error {
		var err error
		list, err = testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel),
			`kind = 'session.changed' AND aggregate_id = $1`, a.session)
		if err == nil && !slices.ContainsFunc(list, func(e testkit.Event) bool {
			return e.Text("diagnostics", "0", "detail") == "last"
		}) {
			err = errors.New("the last report is in no event")
		}
		return err
	})
	if len(list) > 2 {
		t.Errorf("%d events of one clock", len(list))
	}
	if off := list[0].Text("clock_offset"); off == "" || list[0].Text("task_types", "0") != "TASK_TYPE_PROBE_NOOP" {
		t.Errorf("the admission has the offset %q: %v", off, list[0])
	}
}
