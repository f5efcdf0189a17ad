package enrol_test

import (
	"fmt"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// Scenario: a person is given a bundle for a node that was rejected, and the node comes back by its own token before
// that of the bundle is used. Its own action succeeds, that of the bundle is superseded and does not fail later, and
// both have the correlation id of the rejection.
func TestANodeThatComesBackBeforeItsBundleIsUsed(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	testkit.SetClockOffset(k.db, 2*time.Minute)
	j := k.withJudge()
	j.trusts(m)
	j.serves(m, commonv1.SessionState_SESSION_STATE_ADMITTED)
	j.serves(m, commonv1.SessionState_SESSION_STATE_CLOSED)
	correlation := j.refuses(m)
	j.until(func() error { return k.is(m.node, actions.ReEnrolment, actions.StateOpen) })
	k.mustBundle(m.node)
	if list := k.actions(m.node); len(list) != 2 || list[0].GetKind() != actions.Bundle ||
		list[1].GetState() != actions.StateOpen {
		t.Fatalf("%v", list)
	}
	m.mustRecover(k.csr())
	m.admit()
	j.serves(m, commonv1.SessionState_SESSION_STATE_ADMITTED)
	j.until(func() error {
		list := k.actions(m.node)
		if len(list) != 2 || list[0].GetState() != actions.StateSuperseded ||
			list[1].GetState() != actions.StateSucceeded {
			return fmt.Errorf("%v", list)
		}
		return nil
	})
	for _, a := range k.actions(m.node) {
		if a.GetCorrelationId() != correlation {
			t.Errorf("%v", a)
		}
	}
	k.mustBundle(m.node) // for a host that will be rebuilt: it waits for its use
	j.number()
	if _, err := j.judge.RunOnce(k.ctx); err != nil {
		t.Fatal(err)
	}
	if err := k.is(m.node, actions.Bundle, actions.StateOpen); err != nil {
		t.Error(err)
	}
}
