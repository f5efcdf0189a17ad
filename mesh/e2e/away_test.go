package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// TestAnAgentFollowsTwoRotationsThatItMissed rotates the key of tasks twice while the agent of one node is away, until
// both former keys are retired: the rotations do not wait for it, and it returns to work by the endorsements of keys
// that verify no signatures now.
func TestAnAgentFollowsTwoRotationsThatItMissed(tt *testing.T) {
	t := beside(tt, 8*time.Minute)
	c := start(t, cluster.Config{Nodes: 2, Replicas: 1})
	security, err := c.Person(t.ctx, "", person.Session{Subject: "sam", Roles: []string{"security"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	conn := database(t, c, pg.DatabaseMesh)
	keysOfNode := func(name string) []string {
		return column(t, conn, fmt.Sprintf(`SELECT COALESCE(array_to_string(task_keys, ','), '') FROM lifecycle.node_gate
			WHERE name = '%s'`, name))
	}
	const kind = recoveryv1.KeyKind_KEY_KIND_TASK_SIGNING
	away := c.Nodes[1]
	var first []string
	// A rotation waits for agents that have never reported their keys.
	t.must(away.Name()+" to report the keys that it trusts", time.Minute, func(context.Context) error {
		if first = keysOfNode(away.Name()); len(first) != 1 || first[0] == "" {
			return fmt.Errorf("it holds %q", first)
		}
		return nil
	})
	if err := away.Stop(t.ctx); err != nil {
		t.Fatal(err)
	}
	t.must("the session of "+away.Name()+" to end", time.Minute, func(context.Context) error {
		if open := column(t, conn, `SELECT name FROM lifecycle.node_gate WHERE session_open`); slices.Contains(open,
			away.Name()) {
			return fmt.Errorf("open are %q", open)
		}
		return nil
	})
	for nth := 1; nth <= 2; nth++ {
		t.must(fmt.Sprintf("rotation %d", nth), time.Minute, func(ctx context.Context) error {
			_, err := security.Keys.RotateKey(ctx,
				&readmodelv1.RotateKeyRequest{Kind: kind, Reason: "test", IdempotencyKey: fmt.Sprintf("away-%d", nth)})
			return err
		})
		states := func(ctx context.Context, former string) error {
			keys, states, err := keysOf(ctx, security, kind)
			if err == nil && (len(states) != nth+1 || states[nth] != "signing" || states[nth-1] != former) {
				err = fmt.Errorf("the keys are %v: %v", states, keys)
			}
			return err
		}
		t.must("the key to sign", 2*time.Minute,
			func(ctx context.Context) error { return states(ctx, keyset.VerifyingAfter) })
		// The overlap passes at once: package keyset tests how long it is.
		if _, err := conn.Exec(t.ctx, `UPDATE mesh.signing_key SET state_at = state_at - make_interval(secs => $1)
			WHERE state = 'verifying_after'`,
			keyset.TaskSigning.Overlap().Seconds()); err != nil {
			t.Fatal(err)
		}
		t.must("the former key to be retired", 2*time.Minute,
			func(ctx context.Context) error { return states(ctx, keyset.Retired) })
	}
	if got := keysOfNode(away.Name()); !slices.Equal(got, first) {
		t.Errorf("the node that is away holds %q, want %q", got, first)
	}
	if err := away.Start(); err != nil {
		t.Fatal(err)
	}
	load := &probing{}
	loaded, stop := context.WithCancel(t.ctx)
	var running sync.WaitGroup
	for _, node := range c.Nodes {
		running.Go(func() { load.run(loaded, c, node.Name()) })
	}
	t.must("work on both nodes", 2*time.Minute, func(context.Context) error {
		done := column(t, conn, `SELECT DISTINCT g.name FROM lifecycle.task t JOIN lifecycle.node_gate g USING (node_id)
			WHERE t.state = 'succeeded'`)
		if len(done) != 2 {
			return fmt.Errorf("it was done on %q", done)
		}
		return nil
	})
	stop()
	running.Wait()
	if load.bad != nil {
		t.Error(load.bad)
	}
	// It may have come while a replica of nodeapi had not read yet that the last of the former keys is retired.
	signs := column(t, conn, `SELECT key_id FROM mesh.signing_key WHERE kind = 'task_signing' AND state = 'signing'`)
	t.must("the node that was away to hold the key that signs alone", time.Minute, func(context.Context) error {
		if got := keysOfNode(away.Name()); !slices.Equal(got, signs) {
			return fmt.Errorf("it holds %q, and %q signs", got, signs)
		}
		return nil
	})
}
