package reap

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/obs/obstest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
)

const byProcess = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS

func TestBelongs(t *testing.T) {
	ended := time.Unix(1, 0)
	for name, tc := range map[string]struct {
		instance placement.Instance
		o        Owner
		want     Verdict
	}{
		"a foreign workspace is no orphan": {placement.Instance{Epoch: 1}, Owner{}, Unknown},
		"an epoch that was never drawn is no orphan": {
			placement.Instance{Epoch: 3}, Owner{Known: true, Epoch: 2, Instance: "ended"}, Unknown,
		},
		"nor if a run is open in an earlier one": {
			placement.Instance{Epoch: 3}, Owner{Known: true, Epoch: 2, RunOpen: true, RunEpoch: 2}, Unknown,
		},
		"between launch and record it is the run's": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, RunOpen: true, RunEpoch: 1, Instance: "launching"}, Owned,
		},
		"so it is before its row is read": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, RunOpen: true, RunEpoch: 1}, Owned,
		},
		"and while the run gives it up": {
			placement.Instance{Epoch: 1}, Owner{
				Known: true, Epoch: 1, RunOpen: true, RunEpoch: 1, Instance: "ending", GivenUp: true,
			}, Owned,
		},
		"a live instance owns it": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, Instance: "live", Claimed: true}, Owned,
		},
		"a live instance owns it without a claim": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, Instance: "live"}, Owned,
		},
		"a retry adopts what is held": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, Instance: "launching", Claimed: true}, Owned,
		},
		"held in an earlier epoch, it is undone by who holds": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 2, Instance: "ended", Claimed: true}, Owned,
		},
		"given up, and no run left": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, Instance: "live", GivenUp: true}, Orphan,
		},
		"ended by its row, and there": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1, Instance: "ended"}, Orphan,
		},
		"never recorded, and no run left": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 1}, Orphan,
		},
		"superseded, whatever runs in the next epoch": {
			placement.Instance{Epoch: 1}, Owner{Known: true, Epoch: 2, RunOpen: true, RunEpoch: 2, Instance: "ended"}, Orphan,
		},
		"ended and recorded": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{Known: true, Epoch: 1, Instance: "ended"}, Gone,
		},
		"ended in an earlier epoch, its row cut since": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{Known: true, Epoch: 2}, Gone,
		},
		"ended, and its end not yet recorded": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{
				Known: true, Epoch: 1, Instance: "ending", GivenUp: true,
			}, Orphan,
		},
		"ended under a run that has not yet recorded it": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{
				Known: true, Epoch: 1, RunOpen: true, RunEpoch: 1, Instance: "ending", Claimed: true,
			}, Owned,
		},
		"ended and never recorded at all": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{Known: true, Epoch: 1}, Orphan,
		},
		"ended and recorded, but a claim says it may be there": {
			placement.Instance{Epoch: 1, EndedAt: ended}, Owner{Known: true, Epoch: 1, Instance: "ended", GivenUp: true}, Orphan,
		},
		"a stuck run owns the workspace, hence its present box": {
			placement.Instance{Epoch: 2}, Owner{Known: true, Epoch: 2, RunOpen: true, RunEpoch: 2, Instance: "ended"}, Owned,
		},
	} {
		got, why := Belongs(tc.instance, tc.o)
		if got != tc.want {
			t.Errorf("%s: got %s (%s), want %s", name, got, why, tc.want)
		}
		if (got == Orphan || got == Unknown) != (why != "") {
			t.Errorf("%s: %s says %q", name, got, why)
		}
	}
}

// register is recovery, as far as a reaper uses it.
type register struct {
	mu      sync.Mutex
	refuse  error
	retired []string
}

func (r *register) PrepareInstance(context.Context,
	*recoveryv1.PrepareInstanceRequest,
) (*recoveryv1.PrepareInstanceResponse, error) {
	return nil, errors.New("not asked")
}

func (r *register) RetireInstance(_ context.Context,
	req *recoveryv1.RetireInstanceRequest,
) (*recoveryv1.RetireInstanceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse != nil {
		return nil, r.refuse
	}
	r.retired = append(r.retired, req.GetInstanceId())
	return &recoveryv1.RetireInstanceResponse{}, nil
}

// morgue is a database, a real driver of processes, and a reaper over both.
type morgue struct {
	t      *testing.T
	db     *testkit.Database
	tenant string
	driver *process.Driver
	people *register
	reaper *Reaper
	reg    *obs.Registry
}

func newMorgue(t *testing.T) *morgue {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	dir := t.TempDir()
	agent, ca := filepath.Join(dir, "agent"), filepath.Join(dir, "ca.pem")
	// The driver recognizes an agent by its command line, so a shell that waits is enough.
	// it is to be run
	if err := os.WriteFile(agent, []byte("#!/bin/sh\nsleep 3600 &\nwait\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca, []byte("trust"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := process.New(testkit.Logger(t), process.Config{
		Dir: filepath.Join(dir, "p"), AgentBinary: agent, EnrollURL: "https://127.0.0.1:1", APIURL: "127.0.0.1:2", CAFile: ca,
		MaxInstances: 16,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.PowerOff(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	reg, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	m := &morgue{t: t, db: db, tenant: ids.New(), driver: d, people: &register{}, reg: reg}
	m.exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'acme')`, m.tenant)
	m.reaper, err = NewReaper(ReaperDeps{
		Logger: testkit.Logger(t), DB: db.Pool("lifecycle"),
		Drivers: map[commonv1.PlacementDriver]placement.Driver{byProcess: d}, Identities: m.people,
		Metrics: reg.ForService("lifecycle"), Committed: func() {},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *morgue) exec(sql string, args ...any) {
	m.t.Helper()
	if _, err := m.db.OwnerPool().Exec(m.t.Context(), sql, args...); err != nil {
		m.t.Fatalf("%s: %v", sql, err)
	}
}

func (m *morgue) count(sql string) int {
	m.t.Helper()
	var n int
	if err := m.db.OwnerPool().QueryRow(m.t.Context(), sql).Scan(&n); err != nil {
		m.t.Fatal(err)
	}
	return n
}

// place is the state of a workspace with an instance.
type place struct {
	epoch              int64
	instance, run      string // states; empty instance: no row
	claimed, orphaned  bool
	allocation, occupy string
}

// instance makes a workspace and launches a real instance for its first epoch.
func (m *morgue) instance(p place) placement.LaunchRequest {
	m.t.Helper()
	b := placement.LaunchRequest{
		WorkspaceID: ids.New(), TenantID: m.tenant, Epoch: 1, InstanceID: ids.New(),
		LaunchSecret: "gls_x",
	}
	run := ids.New()
	m.exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch, run_id)
		VALUES ($1, $2, $3, 'failed', $4, $5)`,
		b.WorkspaceID, m.tenant, "w-"+b.WorkspaceID, max(p.epoch, 1), run)
	if p.run != "" {
		m.exec(`INSERT INTO lifecycle.saga_run (id, workspace_id, tenant_id, kind, definition, def_version, step_names, epoch,
			state, why_waiting, stuck_reason, next_at, finished_at)
			VALUES ($1, $2, $3, 'create', 'provision', 1, '{a}', $4, $5, 'a test', 'a test', mesh.clock() + interval '1 hour',
				CASE WHEN $5 IN ('failed', 'succeeded') THEN mesh.clock()
					END)`, run, b.WorkspaceID, m.tenant, max(p.epoch, 1), p.run)
	}
	if p.instance != "" {
		m.exec(`INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state, placement)
			VALUES ($1, $2, $3, 1, $4, 'process')`,
			b.InstanceID, b.WorkspaceID, m.tenant, p.instance)
	}
	if p.claimed {
		for _, kind := range []string{
			allocation.KindSlot, allocation.KindIdentity, allocation.KindInstance,
			allocation.KindStorage,
		} {
			m.exec(`INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope,
				deterministic_name, epoch, orphaned_at)
				VALUES ($1, $2, $3, $4, 1, $5, 'shared', $5, 1, CASE WHEN $6 THEN mesh.clock() END)`,
				ids.New(), b.WorkspaceID, m.tenant, run, kind, p.orphaned)
		}
	}
	if p.allocation != "" {
		m.exec(`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, occupancy)
			VALUES ($1, $2, $3, 1, $4, 'process', $5)`,
			ids.New(), b.WorkspaceID, m.tenant, p.allocation, p.occupy)
	}
	if _, err := m.driver.Launch(m.t.Context(), b); err != nil {
		m.t.Fatal(err)
	}
	return b
}

// standing returns the workspaces whose instance has not ended by the driver's own list.
func (m *morgue) standing() map[string]bool {
	m.t.Helper()
	list, err := m.driver.List(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	out := map[string]bool{}
	for _, i := range list {
		if i.EndedAt.IsZero() {
			out[i.WorkspaceID] = true
		}
	}
	return out
}

func (m *morgue) sweep(want Reaped) {
	m.t.Helper()
	got, err := m.reaper.Sweep(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.t.Fatalf("swept (-want +got):\n%s", diff)
	}
}

// ends returns the end reasons of the workspace's instances, as events have reported them.
func (m *morgue) ends(workspaceID string) []string {
	m.t.Helper()
	var out []string
	for _, e := range testkit.Events(m.t, m.db.Pool("lifecycle"), `kind = 'instance.changed' AND workspace_id = $1`,
		workspaceID) {
		if e.Text("state") == "INSTANCE_STATE_ENDED" {
			out = append(out, e.Text("end_reason"))
		}
	}
	return out
}

func TestSweepEndsOrphansAndNothingElse(t *testing.T) {
	m := newMorgue(t)
	kept := map[string]placement.LaunchRequest{
		"launched and not yet recorded": m.instance(place{instance: "launching", run: "running", claimed: true}),
		"being undone":                  m.instance(place{instance: "ending", run: "compensating", claimed: true}),
		"held by a run that is stuck":   m.instance(place{instance: "ending", run: "stuck", claimed: true, orphaned: true}),
		"live":                          m.instance(place{instance: "live", run: "succeeded", claimed: true}),
		"kept for a retry":              m.instance(place{instance: "live", run: "failed", claimed: true}),
	}
	foreign := placement.LaunchRequest{WorkspaceID: ids.New(), Epoch: 1, InstanceID: ids.New(), LaunchSecret: "gls_x"}
	if _, err := m.driver.Launch(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	kept["of a workspace that this database does not know"] = foreign
	ahead := m.instance(place{instance: "ended", run: "failed"})
	m.exec(`UPDATE lifecycle.workspace SET epoch = 0 WHERE id = $1`, ahead.WorkspaceID)
	kept["of an epoch that this database has not drawn"] = ahead

	ended := map[string]placement.LaunchRequest{
		"given up": m.instance(place{
			instance: "ending", run: "failed", claimed: true, orphaned: true,
			allocation: "release_failed", occupy: "cleanup",
		}),
		"never recorded":   m.instance(place{run: "failed"}),
		"ended by its row": m.instance(place{instance: "ended", run: "failed"}),
		"superseded":       m.instance(place{epoch: 2, instance: "ended", run: "running"}),
	}
	m.sweep(Reaped{Ended: len(ended), Unknown: 2})

	standing := m.standing()
	for name, b := range kept {
		if !standing[b.WorkspaceID] {
			t.Errorf("a box that is %s was ended", name)
		}
		if got := m.ends(b.WorkspaceID); len(got) > 0 {
			t.Errorf("a box that is %s is told as ended: %q", name, got)
		}
	}
	for name, b := range ended {
		if standing[b.WorkspaceID] {
			t.Errorf("a box that is %s still stands", name)
		}
		if got := m.ends(b.WorkspaceID); len(got) != 1 || !strings.HasPrefix(got[0], "orphan: ") {
			t.Errorf("the end of a box that is %s is told as %q", name, got)
		}
		if n := m.count(`SELECT count(*) FROM lifecycle.instance WHERE state <> 'ended' AND workspace_id = '` +
			b.WorkspaceID + `'`); n != 0 {
			t.Errorf("a box that is %s has a row that has not ended", name)
		}
		if _, err := m.driver.Launch(t.Context(), b); err == nil {
			t.Errorf("a box that is %s was launched again in its epoch", name)
		}
	}
	given := ended["given up"].WorkspaceID
	if n := m.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE released_at IS NULL AND workspace_id = '` +
		given + `'`); n != 0 {
		t.Errorf("%d claims on the box that was given up are open", n)
	}
	if n := m.count(`SELECT count(*) FROM lifecycle.allocation
		WHERE state = 'released' AND occupancy = 'none' AND workspace_id = '` + given + `'`); n != 1 {
		t.Error("the hold of the box that was given up was not given back")
	}
	if len(m.people.retired) != len(ended) {
		t.Errorf("%d identities were retired, want %d", len(m.people.retired), len(ended))
	}
	m.sweep(Reaped{Unknown: 2})
	for _, p := range mustProblems(t, m.reg) {
		t.Error(p)
	}
}

func TestAnEndThatWasNotRecordedIsFinishedByTheNextSweep(t *testing.T) {
	m := newMorgue(t)
	recorded := m.instance(place{instance: "live", run: "failed", claimed: true, orphaned: true})
	unrecorded := m.instance(place{run: "failed"})
	m.people.refuse = errors.New("recovery is away")
	m.sweep(Reaped{Left: 2})
	for _, b := range []placement.LaunchRequest{recorded, unrecorded} {
		if m.standing()[b.WorkspaceID] || len(m.ends(b.WorkspaceID)) != 0 {
			t.Fatal("the box is to be ended, and not recorded so while its identity lives")
		}
	}
	m.people.refuse = nil
	m.sweep(Reaped{Ended: 2})
	for _, b := range []placement.LaunchRequest{recorded, unrecorded} {
		if got := m.ends(b.WorkspaceID); len(got) != 1 {
			t.Fatalf("told as %q", got)
		}
	}
	m.sweep(Reaped{})
}

// TestAnOperationThatBeginsMeanwhileKeepsItsInstance: the list was read and judged before the operation began; the
// second judgement is the one that counts.
func TestAnOperationThatBeginsMeanwhileKeepsItsInstance(t *testing.T) {
	m := newMorgue(t)
	b := m.instance(place{instance: "ended", run: "failed"})
	list, err := m.driver.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	owners, err := OwnersOf(t.Context(), m.db.Pool("lifecycle"), list)
	if err != nil {
		t.Fatal(err)
	}
	if v, _ := Belongs(list[0], owners[0]); v != Orphan {
		t.Fatalf("it is %s at first", v)
	}
	m.exec(`UPDATE lifecycle.saga_run SET state = 'running', finished_at = NULL WHERE workspace_id = $1`, b.WorkspaceID)
	ended, err := m.reaper.reap(t.Context(), byProcess, m.driver, list[0])
	if err != nil {
		t.Fatal(err)
	}
	if ended || !m.standing()[b.WorkspaceID] {
		t.Fatal("the box of an open run was ended")
	}
}

func mustProblems(t *testing.T, reg *obs.Registry) []string {
	t.Helper()
	problems, err := obstest.Problems(reg.Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	return problems
}
