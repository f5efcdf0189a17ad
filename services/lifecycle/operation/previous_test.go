package operation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
)

func powered(r *lifecyclev1.RequestOperationRequest) {
	r.FencedProof, r.Reason = commonv1.FencedProof_FENCED_PROOF_POWERED_OFF, "the rack is dark"
}

// darken disconnects a machine's agent for good; the agents of other machines connect to another replica.
func (p *cluster) darken(name string) {
	p.t.Helper()
	p.world.mu.Lock()
	delete(p.world.instances, "machine:"+name)
	p.world.replica = ids.New()
	p.world.mu.Unlock()
	p.beat(time.Hour)
}

// leave inserts the rows of what a former epoch has left on a machine: an instance, a workload and, with storage, a
// directory.
func (p *cluster) leave(id string, epoch int64, machine, node string, storage bool) {
	p.t.Helper()
	names := map[string]string{allocation.KindInstance: fmt.Sprintf("%s:%d", id, epoch), allocation.KindWorkload: "former"}
	things := []string{"workload former"}
	if storage {
		names[allocation.KindStorage], things = "former", append(things, "storage")
	}
	for kind, name := range names {
		_, err := p.db.OwnerPool().Exec(p.t.Context(), `
			INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
				epoch, node_id, confirmed_at)
			SELECT $2, id, tenant_id, run_id, 1, $3, 'node_local', $4, $5, $6, mesh.clock() FROM lifecycle.workspace
				WHERE id = $1`,
			id, ids.New(), kind, name, epoch, node)
		if err != nil {
			p.t.Fatal(err)
		}
	}
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	if b := p.world.instances["machine:"+machine]; b != nil {
		b.things = append(b.things, things...)
	}
}

func (p *cluster) claimsOn(id, node, which string) int {
	p.t.Helper()
	return p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND node_id = $2 AND `+which, id,
		node)
}

// Former instances on several machines are decided about one by one: the attestation for the dark machine does not
// cover the machine that is still connected.
func TestFormerInstancesAreDecidedEachByItsMachine(t *testing.T) {
	t.Parallel()
	const orphaned = `kind IN ('workload', 'storage') AND orphaned_at IS NOT NULL AND released_at IS NULL`
	const removed = `kind IN ('workload', 'storage') AND orphaned_at IS NULL AND released_at IS NOT NULL
		AND deterministic_name = 'former'`
	asked := `SELECT count(*) FROM lifecycle.task WHERE run_id = $1 AND node_id = $2`

	t.Run("the slot is on the dark one", func(t *testing.T) {
		p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
		dark := p.machine("m1")
		id := p.create(p.tenant(), "demo", byStatic)
		p.darken("m1")
		bright := p.machine("m2")
		p.leave(id, 2, "m2", bright, true)
		if _, err := p.db.OwnerPool().Exec(t.Context(),
			`UPDATE lifecycle.workspace SET epoch = 2, version = version + 1 WHERE id = $1`, id); err != nil {
			t.Fatal(err)
		}
		_, err := p.seats[0].ask(operator(t.Context()), kRecreate, id)
		want(t, err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE)
		op, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, powered)
		if err != nil {
			t.Fatal(err)
		}
		if w := p.rests(id, "active"); w.NodeID != bright || w.Epoch != 3 {
			t.Errorf("it is in epoch %d on %s", w.Epoch, w.NodeID)
		}
		if n, m := p.claimsOn(id, dark, orphaned), p.claimsOn(id, bright, orphaned); n != 2 || m != 0 {
			t.Errorf("%d orphans on the dark machine and %d on the other, want 2 and none", n, m)
		}
		if n := p.claimsOn(id, bright, removed); n != 2 {
			t.Errorf("%d of 2 were removed from the machine that answers", n)
		}
		if !p.cordoned(dark) || p.cordoned(bright) {
			t.Errorf("cordoned: the dark one %v, the other %v", p.cordoned(dark), p.cordoned(bright))
		}
		if n, m := p.count(asked, op.GetOperationId(), dark),
			p.count(asked+` AND type IN ('workload.remove', 'storage.release')`, op.GetOperationId(), bright); n != 0 || m != 2 {
			t.Errorf("%d tasks for the dark machine, %d removals asked of the other", n, m)
		}
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		if got := p.world.instances["machine:m2"].things; len(got) != 2 || slices.Contains(got, "workload former") {
			t.Errorf("on the machine there stand %q", got)
		}
	})

	t.Run("the slot is on the one that answers", func(t *testing.T) {
		p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
		dark := p.machine("m2")
		p.darken("m2")
		bright := p.machine("m1")
		id := p.create(p.tenant(), "demo", byStatic)
		p.recreated(id)
		p.leave(id, 1, "m2", dark, true)
		var storage string
		if err := p.db.OwnerPool().QueryRow(t.Context(),
			`SELECT id::text FROM lifecycle.resource_claim
				WHERE workspace_id = $1 AND kind = 'storage'
				AND deterministic_name = $2`, id, provision.StorageName).Scan(&storage); err != nil {
			t.Fatal(err)
		}
		dry, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, powered,
			func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = true })
		if err != nil || !strings.Contains(dry.GetConsequence(), "m2") ||
			strings.Contains(dry.GetConsequence(), "on m1 as ended") {
			t.Errorf("the dry run says %v, %v", dry, err)
		}
		op, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, powered)
		if err != nil {
			t.Fatal(err)
		}
		if w := p.rests(id, "active"); w.NodeID != bright || w.Epoch != 3 {
			t.Errorf("it is in epoch %d on %s", w.Epoch, w.NodeID)
		}
		if n, m := p.claimsOn(id, dark, orphaned), p.claimsOn(id, bright, orphaned); n != 2 || m != 0 {
			t.Errorf("%d orphans on the dark machine and %d on the other, want 2 and none", n, m)
		}
		if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
			WHERE id = $1 AND epoch = 3 AND released_at IS NULL AND orphaned_at IS NULL`, storage); n != 1 {
			t.Error("the storage on the machine that answers did not go over to this epoch")
		}
		if n := p.count(asked+` AND type = 'storage.release'`, op.GetOperationId(), bright); n != 0 {
			t.Error("the storage that is kept was released")
		}
		if n := p.count(`SELECT count(*) FROM lifecycle.static_placement
			WHERE workspace_id = $1 AND epoch = 2 AND ended_at IS NOT NULL AND fence_word = ''`, id); n != 1 {
			t.Error("the box that answered was not ended, but fenced")
		}
		if !p.cordoned(dark) || p.cordoned(bright) {
			t.Errorf("cordoned: the dark one %v, the other %v", p.cordoned(dark), p.cordoned(bright))
		}
	})
}

// The next attempt does not keep the claims that an attempt has given up on a dark machine.
func TestAFencedMachineIsNotKeptByTheNextAttempt(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	dark := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	p.darken("m1")
	bright := p.machine("m2")
	exec := func(sql string) {
		t.Helper()
		if _, err := p.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`CREATE FUNCTION lifecycle.no_end() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION
		'the disk is full'; END $$;
		CREATE TRIGGER no_end BEFORE UPDATE ON lifecycle.allocation
			FOR EACH ROW WHEN (NEW.state = 'released') EXECUTE FUNCTION lifecycle.no_end()`)
	if _, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, powered); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE workspace_id = $1 AND name = $2 AND state = 'failed'`, id,
			provision.StepPrevious) == 0 {
			return fmt.Errorf("no attempt has failed")
		}
		return nil
	})
	if n := p.claimsOn(id, dark, `orphaned_at IS NOT NULL`); n != 2 {
		t.Errorf("%d orphans on the dark machine", n)
	}
	exec(`DROP TRIGGER no_end ON lifecycle.allocation`)
	if w := p.rests(id, "active"); w.NodeID != bright {
		t.Errorf("it is on %s, not on %s", w.NodeID, bright)
	}
}
