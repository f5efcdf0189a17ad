package findings

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// wantOnly compares the open findings, by kind and subject, and returns them.
func wantOnly(t *testing.T, got map[string]finding.Row, want ...string) []finding.Row {
	t.Helper()
	var out []finding.Row
	for _, k := range want {
		f, ok := got[k]
		if !ok {
			t.Errorf("not found: %s", k)
			continue
		}
		if f.Summary == "" || f.NextAction == "" {
			t.Errorf("%s says neither what nor what to do: %+v", k, f)
		}
		out = append(out, f)
		delete(got, k)
	}
	for k, f := range got {
		t.Errorf("found as well: %s: %s", k, f.Summary)
	}
	if t.Failed() {
		t.FailNow()
	}
	return out
}

func TestNothingIsFoundOnWhatIsWell(t *testing.T) {
	b := newBed(t, Config{})
	b.live("one")
	ended := b.live("two")
	if err := b.operate(t.Context(), kDecommission, ended); err != nil {
		t.Fatal(err)
	}
	b.until(ended, gone)
	wantOnly(t, b.seen())
}

// TestASweepThatSeesNothingWritesNothing: it does not wait for the lock of findings, which another session holds.
func TestASweepThatSeesNothingWritesNothing(t *testing.T) {
	b := newBed(t, Config{})
	b.live("one")
	b.sweep()
	if n := b.text(`SELECT count(*)::text FROM lifecycle.suspicion`); n != "0" {
		t.Fatalf("%s suspicions", n)
	}
	tx, err := b.db.OwnerPool().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), finding.TakeTurn.SQL()); err != nil {
		t.Fatal(err)
	}
	b.sweep()
	if err := tx.Commit(t.Context()); err != nil { // the server ends it if the sweep waits for it
		t.Errorf("the sweep has waited for its turn: %v", err)
	}
}

func TestAnInstanceThatEndedBehindTheProductsBack(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	if s := b.sweep(); s.Suspected != 2 || s.Open != 0 {
		t.Errorf("the first look makes %+v, want two suspicions", s)
	}
	b.pass(b.sweeper.cfg.Grace / 2)
	if s := b.sweep(); s.Open != 0 {
		t.Errorf("a second look within the grace makes %+v", s)
	}
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'instance'`, id)
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	found := wantOnly(t, b.seen(), "allocation_without_occupancy allocation "+allocation,
		"claim_without_resource claim "+claim)
	if f := found[0]; f.Severity != finding.P1 || !f.Cordoned || f.NodeID != node || f.AllocationID != allocation ||
		f.WorkspaceID != id || !strings.Contains(f.Summary, "it ended at") {
		t.Errorf("got %+v", f)
	}
	g, _, err := gate.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), node)
	if err != nil || !g.Cordoned || g.CordonedBy != finding.CordonBy(found[0].ID) {
		t.Errorf("the node is cordoned %v by %q (%v)", g.Cordoned, g.CordonedBy, err)
	}
	// Its decommission brings rows and instance together again; the finding and its cordon end.
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	wantOnly(t, b.seen())
	if g, _, err = gate.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), node); err != nil || g.Cordoned {
		t.Errorf("the finding is over and the node is still cordoned (%v)", err)
	}
	b.numbered()
	if n := b.text(`SELECT count(*)::text FROM lifecycle.finding WHERE resolved_at IS NOT NULL`); n != "2" {
		t.Errorf("%s findings are resolved", n)
	}
}

// A workspace with a live run has no finding, however long the run takes.
func TestWhatARunHoldsIsPassedOver(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	run := b.text(`SELECT run_id::text FROM lifecycle.workspace WHERE id = $1`, id)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.saga_run
		SET state = 'stuck', finished_at = NULL, stuck_reason = 'a test', why_waiting = 'a test' WHERE id = $1`, run)
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id)
	if _, err := b.workloads.Exec(t.Context(),
		`DROP SCHEMA `+b.text(`SELECT deterministic_name FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND kind = 'schema'`, id)+` CASCADE`); err != nil {
		t.Fatal(err)
	}
	wantOnly(t, b.seen(), "row_changed_outside run "+run)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.saga_run
		SET state = 'succeeded', finished_at = mesh.clock(), stuck_reason = '', why_waiting = '' WHERE id = $1`, run)
	if found := without(b.seen(), "row_changed_outside"); len(found) != 4 {
		t.Errorf("no run holds it and %d things are found: %v", len(found), found)
	}
}

func TestACordonOfAPersonStays(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	if _, err := b.world.gates.SetCordon(t.Context(),
		&lifecyclev1.SetCordonRequest{NodeId: node, Cordoned: true, Reason: "maintenance"}); err != nil {
		t.Fatal(err)
	}
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	if len(b.seen()) != 2 {
		t.Fatal("not found")
	}
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	wantOnly(t, b.seen())
	if g, _, err := gate.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), node); err != nil || !g.Cordoned ||
		g.CordonReason != "maintenance" {
		t.Errorf("the person's cordon is gone: %+v (%v)", g, err)
	}
}

// TestACordonPassesToTheNextRequester: a machine takes new workspaces again only when no request for its cordon is
// left.
func TestACordonPassesToTheNextRequester(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	set := func(cordoned bool) *lifecyclev1.SetCordonResponse {
		t.Helper()
		res, err := b.world.gates.SetCordon(t.Context(),
			&lifecyclev1.SetCordonRequest{NodeId: node, Cordoned: cordoned, Reason: "maintenance"})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	by := func() string { return b.text(`SELECT cordoned_by FROM lifecycle.node_gate WHERE node_id = $1`, node) }
	set(true)
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	b.seen()
	finding := b.text(`SELECT 'finding:' || finding_id FROM lifecycle.finding WHERE cordoned AND resolved_at IS NULL`)
	if res := set(false); !res.GetGate().GetCordoned() || by() != finding {
		t.Errorf("the maintenance is over and the node is cordoned %v by %q; %q wants it", res.GetGate().GetCordoned(), by(),
			finding)
	}
	// Another workspace's release has given up its storage here.
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope,
		deterministic_name, epoch, node_id, orphaned_at)
		SELECT $1, $2, tenant_id, run_id, step, 'storage', 'node_local', 'left', epoch, $3, mesh.clock()
		FROM lifecycle.resource_claim WHERE workspace_id = $4 AND kind = 'instance'`, ids.New(), ids.New(), node, id)
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	b.seen()
	if by() != gate.Release {
		t.Errorf("the finding is over and the node is cordoned by %q; what a release left is still there", by())
	}
	// A person may end the cordon of a release as well.
	if res := set(false); res.GetGate().GetCordoned() {
		t.Errorf("the judgement of a person was overruled by %q", by())
	}
}

func TestAnInstanceBesideTheProduct(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	stranger := ids.New()
	for _, instance := range []placement.LaunchRequest{
		{WorkspaceID: stranger, Epoch: 1, InstanceID: ids.New()},
		{WorkspaceID: id, Epoch: 2, InstanceID: ids.New()},
	} {
		if _, err := b.world.Launch(t.Context(), instance); err != nil {
			t.Fatal(err)
		}
	}
	found := wantOnly(t, b.seen(), "instance_without_row instance "+stranger+":1",
		"instance_without_row instance "+id+":2")
	if found[0].Severity != finding.P1 || found[0].WorkspaceID != "" ||
		!strings.Contains(found[0].Summary, "not known here") {
		t.Errorf("got %+v", found[0])
	}
	if found[1].Severity != finding.P1 || found[1].WorkspaceID != id ||
		!strings.Contains(found[1].Summary, "no row names it") {
		t.Errorf("got %+v", found[1])
	}
	if found[1].After["provider_id"] != "fake:"+id+":2" {
		t.Errorf("the evidence is %v", found[1].After)
	}
}

func TestSilenceOfAProviderConcludesNothing(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.world.silence(true)
	for range 3 {
		b.pass(2 * time.Minute)
		if _, err := b.sweeper.Sweep(t.Context()); err == nil || !strings.Contains(err.Error(), "does not answer") {
			t.Fatalf("the sweep says %v", err)
		}
	}
	wantOnly(t, b.open())
	b.world.silence(false)
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	if len(b.seen()) != 2 {
		t.Fatal("not found")
	}
	b.world.silence(true)
	if _, err := b.sweeper.Sweep(t.Context()); err == nil {
		t.Fatal("the sweep succeeds")
	}
	if len(b.open()) != 2 {
		t.Error("silence ended findings")
	}
}

func TestSchemasAndTheirClaims(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	schema := b.text(`SELECT deterministic_name FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'schema'`,
		id)
	claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'schema'`, id)
	loose := "t_" + b.tenant + "_byhand"
	for _, sql := range []string{
		`CREATE SCHEMA ` + loose,
		`DROP SCHEMA ` + pgx.Identifier{schema}.Sanitize() + ` CASCADE`,
	} {
		if _, err := b.workloads.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	found := wantOnly(t, b.seen(), "resource_without_claim schema "+loose, "claim_without_resource claim "+claim)
	if found[0].After["schema"] != true || found[0].After["role"] != false {
		t.Errorf("the evidence is %v", found[0].After)
	}
	if found[1].WorkspaceID != id || found[1].After["schema"] != false || found[1].After["role"] != true {
		t.Errorf("the evidence is %v", found[1].After)
	}
	if _, err := b.workloads.Exec(t.Context(), `DROP SCHEMA `+loose); err != nil {
		t.Fatal(err)
	}
	wantOnly(t, b.seen(), "claim_without_resource claim "+claim)
}

// The schema that a forced release leaves behind has a finding until both the schema and its role are gone.
func TestSchemasThatWereLeftBehind(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	schema := b.text(`SELECT deterministic_name FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'schema'`,
		id)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.resource_claim
		SET orphaned_at = mesh.clock(), orphaned_by = 'ana', orphan_reason = 'the host burnt'
		WHERE workspace_id = $1 AND kind = 'schema'`, id)
	tenant := b.text(`SELECT tenant_id::text FROM lifecycle.workspace WHERE id = $1`, id)
	found := wantOnly(t, b.seen(), "resource_without_claim schema "+schema)
	if f := found[0]; f.WorkspaceID != id || f.TenantID != tenant || f.NextAction != detect.NextLeftBehind ||
		f.Before["claim"] != "given up" {
		t.Errorf("the finding is %+v", f)
	}
	name := pgx.Identifier{schema}.Sanitize()
	for _, sql := range []string{
		`DROP SCHEMA ` + name + ` CASCADE`,
		`GRANT ` + name + ` TO CURRENT_USER; DROP OWNED BY ` + name + `; DROP ROLE ` + name,
	} {
		wantOnly(t, b.seen(), "resource_without_claim schema "+schema)
		if _, err := b.workloads.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	wantOnly(t, b.seen())
}

func TestNodesThatAreOccupiedWithoutAnAllocation(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	workload := b.text(`SELECT deterministic_name FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = 'workload'`, id)
	// An agent's report from before a release is no evidence after it.
	b.observed(node, id, workload)
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	wantOnly(t, b.seen())
	// A later report still has the workload: it outlived its release. And a device is still reserved.
	b.pass(time.Minute)
	b.observed(node, id, workload)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) VALUES ($1, 'gpu-7', $2)`,
		node, allocation)
	b.sweep()
	b.pass(time.Minute + time.Second)
	b.observed(node, id, workload)
	b.sweep()
	found := wantOnly(t, without(b.open(), "row_changed_outside"), "node_occupied_without_allocation node "+node)
	if f := found[0]; !f.Cordoned || !strings.Contains(f.Summary, "devices are held") {
		t.Errorf("got %+v", f)
	}
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`, allocation)
	b.observed(node, id, workload)
	wantOnly(t, without(b.seen(), "row_changed_outside"), "node_occupied_without_allocation node "+node)
	b.observed(node, id)
	wantOnly(t, b.seen())
}

func without(found map[string]finding.Row, kind string) map[string]finding.Row {
	for k := range found {
		if strings.HasPrefix(k, kind) {
			delete(found, k)
		}
	}
	return found
}

func TestWorkloadsAndTheirClaims(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'workload'`, id)
	b.observed(node, id, "miner") // too soon after the claim to count
	wantOnly(t, without(b.seen(), "resource_without_claim"))
	b.pass(time.Minute)
	b.observed(node, id, "miner")
	b.sweep()
	b.pass(time.Minute + time.Second)
	b.observed(node, id, "miner")
	b.sweep()
	wantOnly(t, b.open(), "claim_without_resource claim "+claim, "resource_without_claim workload "+node+"/"+id+"/miner")
}

func TestRecordsThatContradictEachOther(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	handle := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'handle'`, id)
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id)
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`, allocation)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.resource_claim SET released_at = mesh.clock()
		WHERE workspace_id = $1 AND kind = 'slot'`, id)
	found := wantOnly(t, b.seen(), "claim_without_resource claim "+handle,
		"allocation_without_occupancy allocation "+allocation,
		"resource_without_claim allocation "+allocation, "row_changed_outside allocation "+allocation)
	if f := found[3]; len(f.Before) != 1 || !strings.Contains(f.Summary, "device ") || f.AllocationID != allocation ||
		f.WorkspaceID != id {
		t.Errorf("before %v, after %v: %s", f.Before, f.After, f.Summary)
	}
}

func TestSuccessiveProvisions(t *testing.T) {
	b := newBed(t, Config{ProvisionLimit: 3})
	tenant := b.text(`SELECT id::text FROM lifecycle.tenant WHERE name = $1`, b.tenant)
	for n := range 3 {
		wantOnly(t, without(b.seen(), "none"))
		id := b.live("again")
		if n < 2 {
			if err := b.operate(t.Context(), kDecommission, id); err != nil {
				t.Fatal(err)
			}
			b.until(id, gone)
		}
	}
	b.sweep()
	found := wantOnly(t, b.open(), "successive_provisions name "+tenant+"/again")
	if runs, _ := found[0].After["runs"].([]any); len(runs) != 3 || found[0].Severity != finding.P2 {
		t.Errorf("got %+v", found[0])
	}
	b.pass(20 * time.Minute)
	wantOnly(t, b.seen())
}

func TestASightIsWrittenWhenItChangesAndRarelyElse(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	if len(b.seen()) != 2 {
		t.Fatal("not found")
	}
	for range 14 {
		b.sweep()
	}
	var f finding.Row
	for _, f = range b.open() {
		if f.Count != 16 || f.Version != 4 { // the 2nd, 4th, 8th and 16th scan
			t.Errorf("seen %d times, version %d", f.Count, f.Version)
		}
	}
	n := b.text(`SELECT count(*)::text FROM events.event WHERE kind = 'finding.changed' AND aggregate_id = $1`, f.ID)
	if n != "4" {
		t.Errorf("told %s times", n)
	}
	b.numbered()
	families, err := b.reg.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	open := 0.0
	for _, m := range families {
		if m.GetName() == "gpuaas_findings_open" {
			for _, one := range m.GetMetric() {
				open += one.GetGauge().GetValue()
			}
		}
	}
	if open != 2 {
		t.Errorf("the metric says %v", open)
	}
}

// TestWorkUnderWayIsNoFinding is the control: sweeps without pause, with next to no grace, over operations that begin,
// end, fail and cross each other.
func TestWorkUnderWayIsNoFinding(t *testing.T) {
	b := newBed(t, Config{Grace: 100 * time.Millisecond, ProvisionLimit: 1000})
	stop := make(chan struct{})
	var sweeps atomic.Int64
	var opened []string
	var wg sync.WaitGroup
	ctx := context.WithoutCancel(t.Context())
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			out, err := b.sweeper.Sweep(ctx)
			two, errTwo := b.sweeper.SweepTwoInstances(ctx)
			if err = errors.Join(err, errTwo); err != nil {
				t.Errorf("sweep: %v", err)
				return
			}
			out.add(two)
			sweeps.Add(1)
			if out.Opened > 0 {
				for k, f := range b.open() {
					opened = append(opened, k+": "+f.Summary)
				}
			}
		}
	})
	// However slow the machine is, there is work until enough sweeps have run over it.
	const operations, enough = 50, 10
	var all sync.Map
	work := make(chan int)
	wg.Go(func() {
		defer close(work)
		for n := 0; n < operations || sweeps.Load() < enough && !t.Failed(); n++ {
			work <- n
		}
	})
	var workers sync.WaitGroup
	for w := range 5 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 7))
			var mine []string
			for n := range work {
				if len(mine) == 0 || rng.IntN(3) == 0 {
					id, err := b.create(ctx, "w"+strings.ReplaceAll(ids.New(), "-", "")[20:])
					if err != nil {
						t.Errorf("create: %v", err)
						continue
					}
					mine = append(mine, id)
					all.Store(id, n)
					continue
				}
				kind := []commonv1.OperationKind{kCancel, kReset, kRetry, kRecreate, kDecommission, kDecommission}[rng.IntN(6)]
				_ = b.operate(ctx, kind, mine[rng.IntN(len(mine))]) // most are refused at one moment or another
				awaitEnd(ctx, b, mine[rng.IntN(len(mine))], rng.IntN(2) == 0)
			}
		})
	}
	workers.Wait()
	n := 0
	all.Range(func(id, _ any) bool {
		n++
		awaitEnd(ctx, b, id.(string), true)
		return true
	})
	for range 5 {
		b.sweep()
	}
	close(stop)
	wg.Wait()
	b.pass(2 * time.Minute)
	for k, f := range b.seen() {
		opened = append(opened, "at the end "+k+": "+f.Summary)
	}
	if len(opened) > 0 {
		t.Errorf("found on work under way: %s", strings.Join(opened, "\n"))
	}
	if total := b.text(`SELECT count(*)::text FROM lifecycle.finding`); total != "0" {
		t.Errorf("%s findings were ever written", total)
	}
	if left := b.text(`SELECT count(*)::text FROM lifecycle.row_evidence`); left != "0" {
		t.Errorf("operations left evidence of %s changes by hand: %s", left,
			b.text(`SELECT jsonb_agg(e)::text FROM (SELECT * FROM lifecycle.row_evidence LIMIT 5) e`))
	}
	for _, table := range []string{"workspace", "saga_run", "allocation"} {
		if broken := b.text(`SELECT count(*)::text FROM lifecycle.` + table +
			` x WHERE NOT lifecycle.seal_fits(x)`); broken != "0" {
			t.Errorf("%s rows of %s are not sealed", broken, table)
		}
	}
	if sweeps.Load() < enough || n < 5 {
		t.Errorf("%d sweeps over %d workspaces show nothing", sweeps.Load(), n)
	}
	t.Logf("%d sweeps over %d workspaces", sweeps.Load(), n)
}

// awaitEnd waits until the workspace is active, decommissioned or failed, if wait is set.
func awaitEnd(ctx context.Context, b *bed, workspaceID string, wait bool) {
	if !wait {
		return
	}
	testkit.Eventually(b.t, 2*time.Minute, func() error {
		w, err := workspace.Get(ctx, b.db.Pool(pg.RoleLifecycle), workspaceID)
		if err != nil {
			return err
		}
		switch w.State {
		case names.Of(active), names.Of(gone), "failed":
			return nil
		}
		return fmt.Errorf("it is %s", w.State)
	})
}
