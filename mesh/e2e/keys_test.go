package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// probing sends nodes work, four times a second at most, until it is stopped. It counts the completed probes, and keeps
// the first answer that a rotation must not cause.
type probing struct {
	done atomic.Int64
	mu   sync.Mutex
	bad  error
}

func (p *probing) spoil(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bad == nil {
		p.bad = err
	}
}

func (p *probing) run(ctx context.Context, c *cluster.Cluster, node string) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	next := func() bool {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		return ctx.Err() == nil
	}
	for next() {
		asked, err := c.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: node})
		if err != nil {
			// A request to a killed replica may be repeated; a refused assertion of a person may not.
			if fault.Has(err, commonv1.Reason_REASON_ASSERTION_INVALID) ||
				fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
				p.spoil(fmt.Errorf("a person was refused: %w", err))
			}
			continue
		}
		for next() {
			got, err := c.Client.Query.GetTask(ctx,
				&readmodelv1.GetTaskRequest{TaskId: asked.GetTask().GetTaskId(), MinPos: asked.GetPos()})
			if err != nil {
				continue
			}
			switch state := got.GetTask().GetState(); state {
			case commonv1.TaskState_TASK_STATE_SUCCEEDED:
				p.done.Add(1)
			case commonv1.TaskState_TASK_STATE_FAILED, commonv1.TaskState_TASK_STATE_SUPERSEDED,
				commonv1.TaskState_TASK_STATE_CANCELLED:
				p.spoil(fmt.Errorf("a probe of %s is %s: %s", node, names.Of(state), got.GetTask().GetReason()))
			default:
				continue
			}
			break
		}
	}
}

// keysOf returns the states of a kind's keys, in the order in which they were made.
func keysOf(ctx context.Context, c *person.Client, kind recoveryv1.KeyKind) ([]*recoveryv1.SigningKey, []string,
	error,
) {
	answer, err := c.Keys.ListKeys(ctx, &readmodelv1.ListKeysRequest{})
	if err != nil {
		return nil, nil, err
	}
	var keys []*recoveryv1.SigningKey
	var states []string
	for _, key := range answer.GetKeys() {
		if key.GetKind() == kind {
			keys, states = append(keys, key), append(states, names.Of(key.GetState()))
		}
	}
	return keys, states, nil
}

// killed is a process that is killed in the middle of a rotation, and comes back.
type killed interface{ Kill9() error }

func killedOf[P killed](processes ...P) []killed {
	out := make([]killed, len(processes))
	for i, process := range processes {
		out[i] = process
	}
	return out
}

// forget has the replicas that were killed no longer count as live: gone, and all that are not the present incarnations
// of the mesh's processes. They otherwise would for keyset.LiveFor, while a rotation waits for them: the tests of
// keyset and of trust hold that it does, and for how long.
func forget(t test, c *cluster.Cluster, mesh *pgx.Conn, gone ...string) {
	t.Helper()
	var present []string
	for _, process := range c.Processes() {
		present = append(present, process.Replica())
	}
	if _, err := mesh.Exec(t.ctx, `UPDATE mesh.key_replica SET seen_at = seen_at - make_interval(secs => $3)
		WHERE (replica_id = ANY ($1) OR replica_id <> ALL ($2)) AND seen_at > mesh.clock() - make_interval(secs => $3)`,
		gone, present, keyset.LiveFor.Seconds()); err != nil {
		t.Fatal(err)
	}
}

// killAll kills processes, and has those that are replicas no longer count as live.
func killAll(t test, c *cluster.Cluster, mesh *pgx.Conn, processes ...killed) {
	t.Helper()
	var gone []string
	for _, process := range processes {
		if replica, ok := process.(*cluster.Process); ok {
			gone = append(gone, replica.Replica())
		}
		if err := process.Kill9(); err != nil {
			t.Fatal(err)
		}
	}
	forget(t, c, mesh, gone...)
}

// rollIssuer makes the next issuer of services. Each kind of service is killed while the issuer is distributed, or
// while its certificate is replaced.
func rollIssuer(t test, c *cluster.Cluster, mesh *pgx.Conn, security *person.Client) {
	states := func(ctx context.Context, want ...string) error {
		keys, states, err := keysOf(ctx, security, recoveryv1.KeyKind_KEY_KIND_SERVICES)
		if err == nil && !slices.Equal(states, want) {
			err = fmt.Errorf("the issuers are %v: %v", states, keys)
		}
		return err
	}
	t.must("the rotation of services", time.Minute, func(ctx context.Context) error {
		_, err := security.Keys.RotateKey(ctx, &readmodelv1.RotateKeyRequest{
			Kind: recoveryv1.KeyKind_KEY_KIND_SERVICES, Reason: "test", IdempotencyKey: "services",
		})
		return err
	})
	if err := c.Material.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	killAll(t, c, mesh, append(killedOf(c.Lifecycle...), killedOf(c.Readmodel...)...)...)
	t.must("the next issuer to sign", 3*time.Minute,
		func(ctx context.Context) error { return states(ctx, "verifying_after", "signing") })
	if _, err := c.Material.Renew(); err != nil {
		t.Fatal(err)
	}
	killAll(t, c, mesh, append(killedOf(c.Recovery...), killedOf(c.NodeAPI...)...)...)
}

// TestKeysRollUnderLoad rotates the keys of join states, of assertions and of tasks, and the issuer of services, while
// nodes work, replicas of the service that signs and an agent are killed in the middle, and agents come back with join
// states of either key.
func TestKeysRollUnderLoad(tt *testing.T) {
	t := beside(tt, 12*time.Minute)
	c := start(t, cluster.Config{Nodes: 2})
	security, err := c.Person(t.ctx, "", person.Session{Subject: "sam", Roles: []string{"security"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	operator, err := c.Person(t.ctx, "", person.Session{Subject: "olga", Roles: []string{"operator"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	conn := database(t, c, pg.DatabaseMesh)
	load := &probing{}
	loaded, stop := context.WithCancel(t.ctx)
	var running sync.WaitGroup
	for _, node := range []string{"n1", "n2"} {
		running.Go(func() { load.run(loaded, c, node) })
	}
	defer running.Wait()
	defer stop()
	working := func(why string) {
		before := load.done.Load()
		t.must("work "+why, time.Minute, func(context.Context) error {
			if n := load.done.Load() - before; n < 6 {
				return fmt.Errorf("%d probes", n)
			}
			return nil
		})
	}
	working("before")
	for _, kind := range []struct {
		kind   recoveryv1.KeyKind
		killed []killed
	}{
		{recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, killedOf(c.Recovery...)},
		{recoveryv1.KeyKind_KEY_KIND_ASSERTION, killedOf(c.Readmodel...)},
		// An agent that is killed while the key is distributed stores it when it comes back.
		{recoveryv1.KeyKind_KEY_KIND_TASK_SIGNING, append(killedOf(c.Lifecycle...), c.Nodes[0])},
	} {
		rotate := func(key string) error {
			_, err := security.Keys.RotateKey(t.ctx,
				&readmodelv1.RotateKeyRequest{Kind: kind.kind, Reason: "test", IdempotencyKey: key})
			return err
		}
		name := names.Of(kind.kind)
		// An operator without the role is refused.
		_, err := operator.Keys.RotateKey(t.ctx,
			&readmodelv1.RotateKeyRequest{Kind: kind.kind, Reason: "test", IdempotencyKey: name})
		if !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
			t.Errorf("%s by an operator: %v", name, err)
		}
		t.must("the rotation of "+name, time.Minute, func(context.Context) error { return rotate(name) })
		killAll(t, c, conn, kind.killed...)
		t.must("the new key of "+name+" to sign", 2*time.Minute, func(ctx context.Context) error {
			keys, states, err := keysOf(ctx, security, kind.kind)
			if err == nil && (len(states) != 2 || states[1] != "signing") {
				err = fmt.Errorf("the keys are %v: %v", states, keys)
			}
			return err
		})
		if err := rotate(name + " again"); !fault.Has(err, commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY) {
			t.Errorf("%s rotated twice: %v", name, err)
		}
		working("after the rotation of " + name)
	}
	rollIssuer(t, c, conn, security)
	working("after the rotation of services")
	// The agents come back with join states of either key, and are given join states of the new one.
	for _, agent := range c.Nodes {
		if err := agent.Kill9(); err != nil {
			t.Fatal(err)
		}
	}
	working("after the agents came back")
	// The overlap of the former keys passes at once: package keyset tests how long it is.
	if _, err := conn.Exec(t.ctx, `UPDATE mesh.signing_key SET state_at = state_at - make_interval(secs => $1)
		WHERE state = 'verifying_after'`,
		keyset.JoinState.Overlap().Seconds()); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []recoveryv1.KeyKind{
		recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, recoveryv1.KeyKind_KEY_KIND_ASSERTION,
		recoveryv1.KeyKind_KEY_KIND_TASK_SIGNING,
		recoveryv1.KeyKind_KEY_KIND_SERVICES,
	} {
		t.must("the old key of "+names.Of(kind)+" to be retired", 4*time.Minute, func(ctx context.Context) error {
			keys, states, err := keysOf(ctx, security, kind)
			if err == nil && (len(states) != 2 || states[0] != "retired" || len(keys[1].GetHeldBy()) < 4) {
				err = fmt.Errorf("the keys are %v: %v", states, keys)
			}
			return err
		})
	}
	if err := c.Material.ForgetIssuers(); err != nil {
		t.Fatal(err)
	}
	killAll(t, c, conn, append(killedOf(c.NodeAPI...), killedOf(c.Lifecycle...)...)...)
	working("at the end")
	// The agents have dropped the retired key of tasks, on their disks too: they come back with the new one alone.
	for _, agent := range c.Nodes {
		if err := agent.Kill9(); err != nil {
			t.Fatal(err)
		}
	}
	working("without the retired keys")
	stop()
	running.Wait()
	if load.bad != nil {
		t.Error(load.bad)
	}
	if held := column(t, conn, `SELECT name || ' ' || state || ' ' || state_reason FROM recovery.identity
		WHERE state <> 'active'`); len(held) > 0 {
		t.Errorf("nodes are not active: %q", held)
	}
	if refused := column(t, conn, `SELECT DISTINCT reason FROM lifecycle.task
		WHERE reason LIKE '%signature%'`); len(refused) > 0 {
		t.Errorf("tasks were refused: %q", refused)
	}
	signs := column(t, conn, `SELECT key_id FROM mesh.signing_key WHERE kind = 'task_signing' AND state = 'signing'`)
	t.must("the agents to hold the key that signs alone", time.Minute, func(context.Context) error {
		if keys := column(t, conn, `SELECT DISTINCT array_to_string(task_keys, ',')
			FROM lifecycle.node_gate`); !slices.Equal(keys, signs) {
			return fmt.Errorf("they hold %q, and %q signs", keys, signs)
		}
		return nil
	})
	if open := column(t, conn, `SELECT summary FROM recovery.incident WHERE kind = 'signing_keys'`); len(open) > 0 {
		t.Errorf("incidents: %q", open)
	}
	t.Logf("%d probes succeeded", load.done.Load())
}
