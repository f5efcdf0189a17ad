package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// whole are the changes of an agent's identity that must be survived in the middle, by the part of a kill point's name
// that identifies the change.
var whole = []string{
	"pending_key.key-pending", "enrol.journal", "replay.cert", "replay.key", "replay.node", "replay.node-agent",
	"replay.journal", "join_state.join-state", "issued.journal", "issued.key-next", "issued.cert-next", "flip.key",
	"flip.cert", "task_keys.node-agent", "recovery_key.recovery-key", "issued.recovery-tokens", "confirm.recovery-tokens",
}

// renewal reports whether a kill point is passed by the renewal of a certificate alone, which no request brings about.
func renewal(point string) bool {
	return slices.ContainsFunc([]string{".renew.", ".issued.", ".flip.", ".confirm."},
		func(part string) bool { return strings.Contains(point, part) })
}

// TestAnAgentSurvivesBetweenAnyTwoFsyncs kills machines' agents and recovery and nodeapi at each of their points of
// enrolment, opening, working and renewing. Each machine must stay the node that it was, without an alarm.
func TestAnAgentSurvivesBetweenAnyTwoFsyncs(tt *testing.T) {
	t := beside(tt, 25*time.Minute)
	ctx := t.ctx
	c := start(t, cluster.Config{
		// A machine whose certificate ends while it and the services are killed waits for an operator: half of its life is
		// for what is slow. A renewal meets few of the points, since an agent that comes back completes it from its intent
		// log: with more machines, more renewals begin in the same half of a life.
		Nodes: 10, Policy: map[string]string{
			"node.certificate_ttl_seconds":           "90",
			"node.task_stale_sweep_interval_seconds": "2",
		},
		Env: []string{
			"GPUAAS_FAILPOINTS=agent.*=kill,recovery.renew.*=kill,nodeapi.renew.*=kill",
			// An agent that dies twenty times in a minute opens more often than one that is well may.
			"GPUAAS_NODEAPI_OPEN_EVERY=100ms", "GPUAAS_RECOVERY_CLAIM_LEASE=1s",
		},
	})
	createTenant(t, c)
	before := machines(t, c)
	security, err := c.Person(ctx, "", person.Session{Subject: "sam", Roles: []string{"security"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	// The agents store the next key of tasks, and are killed in the middle of it.
	t.must("the rotation of the key of tasks", time.Minute, func(ctx context.Context) error {
		_, err := security.Keys.RotateKey(ctx, &readmodelv1.RotateKeyRequest{
			Kind: recoveryv1.KeyKind_KEY_KIND_TASK_SIGNING, Reason: "test", IdempotencyKey: "fsyncs",
		})
		return err
	})
	began := time.Now()
	want := slices.DeleteFunc(literals(t, "agent"), func(p string) bool {
		return p == "agent.diag.after_fsync" // before a retry only, and it holds no identity
	})
	want = append(want, slices.DeleteFunc(slices.Sorted(maps.Keys(elsewhere)),
		func(p string) bool { return !strings.Contains(p, ".renew.") })...)
	missing := func() []string {
		points, _ := hits(t, c)
		out := slices.DeleteFunc(slices.Clone(want), func(p string) bool { return points[p] > 0 })
		for _, part := range whole {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(points)),
				func(p string) bool { return strings.HasPrefix(p, "agent.identity."+part+".") }) {
				out = append(out, "agent.identity."+part+".*")
			}
		}
		return out
	}
	probe := func(ctx context.Context) {
		for name := range before {
			_, _ = c.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: name})
		}
	}
	var all []*request
	for i := 0; time.Since(began) < 14*time.Minute; i++ {
		left := missing()
		t.Logf("%.0f s: %d points are to be hit: %v", time.Since(began).Seconds(), len(left), left)
		if i >= 2 && !slices.ContainsFunc(left, func(p string) bool { return !renewal(p) }) {
			break // time alone brings what is left
		}
		var batch []*request
		for n := range 4 {
			w := &request{
				name: fmt.Sprintf("s-%02d-%d", i, n), key: fmt.Sprintf("s-%02d-%d", i, n),
				spec: &lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC},
			}
			if n%2 == 1 {
				w.spec, w.doomed = doomedSpec(), true
				w.spec.Placement = commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC
			}
			batch = append(batch, w)
		}
		all = append(all, batch...)
		if err := createAll(ctx, c, batch); err != nil {
			t.Error(err)
		}
		probe(ctx)
		awaitRest(t, c, time.Minute, batch...)
		for _, w := range batch {
			if w.doomed {
				continue
			}
			t.want("the decommission of "+w.name, 30*time.Second, func(ctx context.Context) error {
				_, err := c.Client.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
					Workspace: w.workspace, Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Reason: "its turn is over",
					IdempotencyKey: "end-" + w.key,
				})
				return err
			})
		}
	}
	var probed time.Time
	_ = insist(ctx, "the points of renewals", max(0, 14*time.Minute-time.Since(began)), func(ctx context.Context) error {
		if left := missing(); len(left) > 0 {
			if time.Since(probed) > 3*time.Second { // the machines go on working
				probed = time.Now()
				probe(ctx)
			}
			return fmt.Errorf("%v", left)
		}
		return nil
	})
	if left := missing(); len(left) > 0 {
		t.Errorf("kill points that were not hit: %v", left)
	}
	points, _ := hits(t, c)
	for _, name := range slices.Sorted(maps.Keys(points)) {
		t.Logf("killed at %s", name)
	}
	t.Logf("%d kill points in %.0f s", len(points), time.Since(began).Seconds())
	awaitRest(t, c, time.Minute)
	t.want("all workspaces to be gone", time.Minute, func(context.Context) error {
		for _, ws := range workspaces(t, c) {
			if s := ws.GetState(); s == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE || !atRest(s) {
				return fmt.Errorf("%s is %s", ws.GetName(), s)
			}
		}
		return nil
	})
	healed(t, c, before)
	quiet(t, c)
	checkRequests(t, c, all)
	t.want("the new key of tasks to sign", time.Minute, func(ctx context.Context) error {
		_, states, err := keysOf(ctx, security, recoveryv1.KeyKind_KEY_KIND_TASK_SIGNING)
		if err == nil && (len(states) != 2 || states[1] != "signing") {
			err = fmt.Errorf("the keys are %v", states)
		}
		return err
	})
	mesh := database(t, c, pg.DatabaseMesh)
	for name, id := range before {
		told, err := testkit.ReadEvents(t.ctx, mesh, `kind = 'node_identity.changed' AND aggregate_id = $1`, id)
		if err != nil {
			t.Fatal(err)
		}
		instances := map[string]bool{}
		for _, e := range told {
			if instance := e.Text("node_instance_id"); instance != "" {
				instances[instance] = true
			}
		}
		if len(instances) != 1 {
			t.Errorf("machine %s was enrolled as %d instances", name, len(instances))
		}
	}
	checkWorld(t, c)
	checkLogs(t, c, nil)
}
