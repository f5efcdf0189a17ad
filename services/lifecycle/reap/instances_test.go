package reap

import (
	"fmt"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

func (m *morgue) instances() *Instances {
	return NewInstances(InstancesDeps{
		DB: m.db.Pool("lifecycle"), Drivers: map[commonv1.PlacementDriver]placement.Driver{byProcess: m.driver},
		Identities: m.people, Committed: func() {},
	})
}

func want(t *testing.T, err error, reason commonv1.Reason) {
	t.Helper()
	if !fault.Has(err, reason) {
		t.Fatalf("got %v, want %v", err, reason)
	}
}

// shown returns the states, in order, of an instance that events have shown as one that nothing accounts for.
func (m *morgue) shown(instanceID string) []string {
	m.t.Helper()
	var out []string
	for _, e := range testkit.Events(m.t, m.db.Pool("lifecycle"), `kind = 'instance.changed' AND aggregate_id = $1`,
		instanceID) {
		if e.Text("unaccounted") == "true" {
			out = append(out, fmt.Sprint(e.Text("state"), " ", e.AggregateVersion))
		}
	}
	return out
}

// events counts events as a service sees them, which the owner of the database does not.
func (m *morgue) events(which string, args ...any) int {
	m.t.Helper()
	var n int
	if err := m.db.Pool("lifecycle").QueryRow(m.t.Context(), `SELECT count(*) FROM events.event WHERE `+which,
		args...).Scan(&n); err != nil {
		m.t.Fatal(err)
	}
	return n
}

// An instance that the placement runs for an unknown workspace is shown, left alone by sweeps, and ended at a person's
// request, once.
func TestAnInstanceOfNoWorkspaceIsShownAndEndedByAPerson(t *testing.T) {
	m := newMorgue(t)
	foreign := placement.LaunchRequest{WorkspaceID: ids.New(), Epoch: 3, InstanceID: ids.New(), LaunchSecret: "gls_x"}
	if _, err := m.driver.Launch(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	m.sweep(Reaped{Unknown: 1})
	m.sweep(Reaped{Unknown: 1})
	if got := m.shown(foreign.InstanceID); len(got) != 1 || got[0] != "INSTANCE_STATE_LIVE 1" {
		t.Errorf("it is shown as %q", got)
	}
	server := m.instances()
	end := func(ref string, dry bool) (*lifecyclev1.EndInstanceResponse, error) {
		return server.EndInstance(rpc.WithPerson(t.Context(), rpc.Person{Subject: "olga", Roles: []string{"operator"}}),
			&lifecyclev1.EndInstanceRequest{Instance: ref, Reason: "launched after the backup", DryRun: dry})
	}
	res, err := end(foreign.InstanceID, true)
	if err != nil || !strings.Contains(res.GetConsequence(), "data on it is lost") || !m.standing()[foreign.WorkspaceID] {
		t.Fatalf("a dry run: %v %v", res, err)
	}
	_, err = end(ids.New(), false)
	want(t, err, commonv1.Reason_REASON_NOT_FOUND)
	res, err = end(res.GetInstance().GetProviderId(), false)
	if err != nil {
		t.Fatal(err)
	}
	i := res.GetInstance()
	if i.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED || !i.GetUnaccounted() ||
		!strings.Contains(i.GetEndReason(), "launched after the backup") || res.GetPos() == "" {
		t.Errorf("answered %v", res)
	}
	if m.standing()[foreign.WorkspaceID] {
		t.Error("it still stands")
	}
	if got := m.shown(foreign.InstanceID); len(got) != 2 || got[1] != "INSTANCE_STATE_ENDED 2" {
		t.Errorf("its end is shown as %q", got)
	}
	if len(m.people.retired) != 1 || m.people.retired[0] != foreign.InstanceID {
		t.Errorf("retired: %q", m.people.retired)
	}
	if n := m.events(`kind = 'audit.recorded' AND payload->>'action' = 'instance.end'`); n != 1 {
		t.Errorf("%d entries in the audit log", n)
	}
	_, err = end(foreign.InstanceID, false)
	want(t, err, commonv1.Reason_REASON_STATE_TERMINAL)
	m.sweep(Reaped{})
}

// An instance that a workspace in use or an operation accounts for is not ended by EndInstance; a superseded instance
// of a workspace that has ended is.
func TestAnInstanceThatIsAccountedForIsNotEndedByHand(t *testing.T) {
	m := newMorgue(t)
	server := m.instances()
	end := func(b placement.LaunchRequest) error {
		_, err := server.EndInstance(rpc.WithPerson(t.Context(), rpc.Person{Subject: "olga", Roles: []string{"operator"}}),
			&lifecyclev1.EndInstanceRequest{Instance: b.InstanceID, Reason: "it looks strange"})
		return err
	}
	held := m.instance(place{instance: "live", run: "failed", claimed: true})
	want(t, end(held), commonv1.Reason_REASON_PRECONDITION_FAILED)
	busy := m.instance(place{instance: "launching", run: "running", claimed: true})
	want(t, end(busy), commonv1.Reason_REASON_PRECONDITION_FAILED)
	used := m.instance(place{instance: "ended", run: "succeeded"})
	m.exec(`UPDATE lifecycle.workspace SET state = 'active' WHERE id = $1`, used.WorkspaceID)
	want(t, end(used), commonv1.Reason_REASON_PRECONDITION_FAILED)
	for _, b := range []placement.LaunchRequest{held, busy, used} {
		if !m.standing()[b.WorkspaceID] {
			t.Error("an instance that is accounted for was ended")
		}
	}
	over := m.instance(place{instance: "ended", run: "failed"})
	m.exec(`UPDATE lifecycle.workspace SET epoch = 0 WHERE id = $1`, over.WorkspaceID)
	if err := end(over); err != nil || m.standing()[over.WorkspaceID] {
		t.Errorf("one of an epoch that was never drawn here, of a workspace that has failed: %v", err)
	}
}

// An instance that was shown as unaccounted for and is superseded later is shown as ended under the same id, above the
// versions that were shown.
func TestAnUnaccountedInstanceThatIsSupersededGoesOnUnderItsId(t *testing.T) {
	m := newMorgue(t)
	b := m.instance(place{run: "failed"})
	m.exec(`UPDATE lifecycle.workspace SET epoch = 0 WHERE id = $1`, b.WorkspaceID)
	m.sweep(Reaped{Unknown: 1})
	m.exec(`UPDATE lifecycle.workspace SET epoch = 2 WHERE id = $1`, b.WorkspaceID)
	m.sweep(Reaped{Ended: 1})
	last := testkit.Events(t, m.db.Pool("lifecycle"),
		`kind = 'instance.changed' AND aggregate_id = $1 AND aggregate_version = 2`, b.InstanceID)
	if len(last) != 1 || last[0].Text("state") != "INSTANCE_STATE_ENDED" {
		t.Error("its end is not told above the versions that were shown")
	}
	if n := m.count(`SELECT count(*) FROM lifecycle.unaccounted_instance`); n != 0 {
		t.Errorf("%d are still unaccounted for", n)
	}
	m.sweep(Reaped{})
}
