package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
)

// withKeys restarts a bed's server with another key set.
func (b *bed) withKeys(keys *secretenv.Keys) {
	deps := b.server.deps
	deps.Secrets = keys
	b.server = NewServer(deps)
}

func TestRequestsJoinAcrossANewFirstKey(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	old, next := secretenv.NewKey(), secretenv.NewKey()
	b.withKeys(secretKeys(t, old))
	env := map[string]string{"PIN": "1234"}
	ask := func(name, key string, env map[string]string) (*lifecyclev1.Operation, error) {
		res, err := b.server.RequestOperation(t.Context(), withEnv("acme", name, key, env))
		return res.GetOperation(), err
	}
	first, err := ask("demo", "key-1", env)
	if err != nil {
		t.Fatal(err)
	}
	b.withKeys(secretKeys(t, next, old))
	again, err := ask("demo", "key-1", env)
	if err != nil || !again.GetReplayed() || again.GetOperationId() != first.GetOperationId() {
		t.Errorf("the same request under its key: %v, %v", again, err)
	}
	joins, err := ask("demo", "", env)
	if err != nil || !joins.GetJoined() || joins.GetOperationId() != first.GetOperationId() {
		t.Errorf("the same request: %v, %v", joins, err)
	}
	other := map[string]string{"PIN": "4321"}
	_, err = ask("demo", "key-1", other)
	want(t, err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
	_, err = ask("demo", "", other)
	want(t, err, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN)
	// A digest that the new first key has made can be compared without the old key; one that the old key has made cannot.
	if _, err := ask("second", "key-2", env); err != nil {
		t.Fatal(err)
	}
	b.withKeys(secretKeys(t, next))
	if again, err := ask("second", "key-2", env); err != nil || !again.GetReplayed() {
		t.Errorf("under the new key alone: %v, %v", again, err)
	}
	_, err = ask("demo", "key-1", env)
	want(t, err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN)
	_, err = ask("demo", "", env)
	want(t, err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN)
	var bare int
	err = b.db.OwnerPool().QueryRow(t.Context(),
		`SELECT count(*) FROM (SELECT spec_digest AS d FROM lifecycle.workspace UNION ALL
		SELECT split_part(digest, '/', 2) FROM lifecycle.operation_key) x WHERE d NOT LIKE 'hmac-sha256.%'`).Scan(&bare)
	if err != nil || bare != 0 {
		t.Errorf("%d digests can be made without a key (%v)", bare, err)
	}
}

func TestWhatOnlyAnswersHaveIsRefusedInRequests(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	for name, edit := range map[string]func(*nodev1.Workload){
		"names without values": func(w *nodev1.Workload) { w.EnvNames = []string{"PIN"} },
		"sealed values":        func(w *nodev1.Workload) { w.SealedEnv = map[string][]byte{"PIN": {1, 2, 3}} },
	} {
		req := withEnv("acme", "demo", "", nil)
		edit(req.GetCreate().GetSpec().GetWorkloads()[0])
		for _, dry := range []bool{true, false} {
			req.DryRun = dry
			if _, err := b.server.RequestOperation(t.Context(), req); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
				t.Errorf("%s, dry run %t: %v", name, dry, err)
			}
		}
	}
}

// TestAValueOpensInItsOwnWorkspaceAlone copies a sealed value into another workspace of the same tenant, as an attacker
// who can write the table could.
func TestAValueOpensInItsOwnWorkspaceAlone(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 5 * time.Second})
	tenant := p.tenant()
	create := func(name, value string) string {
		res, err := p.seats[0].server.RequestOperation(t.Context(),
			withEnv(tenant, name, "", map[string]string{"FOO": value}))
		if err != nil {
			t.Fatal(err)
		}
		p.rests(res.GetOperation().GetWorkspaceId(), "active")
		return res.GetOperation().GetWorkspaceId()
	}
	from, to := create("from", canary), create("to", "mine")
	p.world.mu.Lock()
	p.world.deployed = func(d *nodev1.WorkloadDeploy) { t.Errorf("an agent was given %v", d.GetWorkload()) }
	p.world.mu.Unlock()
	_, err := p.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.workspace t SET spec = f.spec FROM lifecycle.workspace f WHERE t.id = $1 AND f.id = $2`, to, from)
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.seats[0].ask(t.Context(), kRecreate, to)
	if f, ok := fault.As(err); !ok || f.Reason != commonv1.Reason_REASON_WORKLOAD_SECRET_INVALID ||
		!strings.Contains(strings.Join(f.Unmet, " "), "FOO") || strings.HasPrefix(f.Unmet[0], "every") {
		t.Errorf("got %v", err)
	}
	_, err = p.seats[0].ask(t.Context(), kRecreate, to, func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = true })
	if err == nil || !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_INVALID) {
		t.Errorf("dry run: %v", err)
	}
}

// TestWithoutItsKeyNothingIsDeployed loses the key while the task that deploys is queued: the replica that would sign
// it has another set.
func TestWithoutItsKeyNothingIsDeployed(t *testing.T) {
	old := secretenv.NewKey()
	p := newCluster(t, clusterConfig{
		seats: 1, lease: 5 * time.Second, secrets: secretKeys(t, old),
		signing: secretKeys(t, secretenv.NewKey()),
	})
	p.world.mu.Lock()
	p.world.deployed = func(d *nodev1.WorkloadDeploy) { t.Errorf("an agent was given %v", d.GetWorkload()) }
	p.world.mu.Unlock()
	tenant := p.tenant()
	res, err := p.seats[0].server.RequestOperation(t.Context(),
		withEnv(tenant, "demo", "", map[string]string{"FOO": canary}))
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	unknown := names.Of(commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN)
	testkit.Eventually(t, testkit.Patience, func() error {
		n := p.count(`SELECT count(*) FROM lifecycle.task
			WHERE workspace_id = $1 AND type = 'workload.deploy' AND state = 'failed' AND reason = $2
			AND payload = '' AND error LIKE '%FOO%' AND error LIKE '%' || $3 || '%'`, id, unknown, secretKeys(t, old).First())
		steps := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND error_code = $2`,
			res.GetOperation().GetOperationId(), unknown)
		if n == 0 || steps == 0 {
			return fmt.Errorf("%d tasks and %d attempts have failed for want of the key", n, steps)
		}
		return nil
	})
	if found := testkit.Mentions(t, p.db.AdminURL(), canary); len(found) > 0 {
		t.Errorf("the value stands in %v", found)
	}
}
