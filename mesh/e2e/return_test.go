package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// errOther is returned if the API answers and the answer is wrong.
var errOther = errors.New("the node is another than it should be")

// TestAReactivatedNodeReturns shuts a node out for longer than its first tries, and lets it in again. The pace of its
// tries is tested in agent/session.
func TestAReactivatedNodeReturns(tt *testing.T) {
	tt.Parallel() // it mostly waits
	t := within(tt, 8*time.Minute)
	c := start(t, cluster.Config{Nodes: 1, Replicas: 1})
	before := machines(t, c)
	change := func(verb recoveryv1.IdentityVerb) {
		t.must("the verb "+verb.String(), 20*time.Second, func(ctx context.Context) error {
			_, err := c.Client.Command.ChangeNodeIdentity(ctx,
				&readmodelv1.ChangeNodeIdentityRequest{Node: "n1", Verb: verb, Reason: "test"})
			return err
		})
	}
	connected := func(want bool) func(context.Context) error {
		return func(ctx context.Context) error {
			resp, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: "n1"})
			if err == nil && (resp.GetNode().GetConnected() != want || resp.GetNode().GetNodeId() != before["n1"]) {
				err = fmt.Errorf("%w: %v", errOther, resp.GetNode())
			}
			return err
		}
	}
	for _, verb := range []recoveryv1.IdentityVerb{
		recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD, recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
	} {
		change(verb)
		t.must("the session to close", 10*time.Second, connected(false))
		// It stays away, and tries several times.
		stays := time.Now().Add(10 * time.Second)
		t.must("the time to pass", 20*time.Second, func(ctx context.Context) error {
			if err := connected(false)(ctx); errors.Is(err, errOther) {
				t.Errorf("after %s: %v", verb, err)
			}
			if left := time.Until(stays); left > 0 {
				return fmt.Errorf("%s are left", left)
			}
			return nil
		})
		change(recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE)
		began := time.Now()
		t.must("the session to open", time.Minute, connected(true))
		t.Logf("back %.1f s after the end of %s", time.Since(began).Seconds(), verb)
	}
	checkLogs(t, c, nil)
}
