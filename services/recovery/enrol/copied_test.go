package enrol_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
)

// reactivate has a person with the security role reactivate a node.
func (k *kit) reactivate(node string) {
	k.t.Helper()
	identities, err := identity.New(identity.Deps{Logger: testkit.Logger(k.t), Pool: k.pool, Keys: k.keys})
	k.must(err)
	_, _, err = identities.Change(k.ctx, node, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, "the copy is found",
		identity.Actor{Subject: "ada", Roles: []string{verbs.RoleSecurity}})
	k.must(err)
}

// TestNothingOfACopyEnrolsAfterItsReactivation: neither what the hosts have used nor what an operator had issued brings
// a node back that was copied. A bundle, or a token of `nodes enroll`, makes another node instance of it, also on the
// host that has its join state, and the copy raises no alarm beside that.
func TestNothingOfACopyEnrolsAfterItsReactivation(t *testing.T) {
	for _, alarm := range []string{identity.AlarmClone, identity.AlarmTokenReuse} {
		for _, way := range []string{"bundle", "enroll"} {
			t.Run(alarm+", "+way, func(t *testing.T) {
				k := newKit(t)
				m := k.machine()
				first, used := k.bootstrap("node-1").Token, k.csr()
				m.took(m.mustEnroll(first, used))
				m.admit()
				unused := k.mustBundle(m.node).Token
				k.hold(m.node, alarm)
				k.reactivate(m.node)
				copied := *m
				out := func() {
					t.Helper()
					for what, attempt := range map[string]func() error{
						"the recovery token":              func() error { _, err := copied.recover(k.csr()); return err },
						"the bundle of before":            func() error { _, err := k.enroll(unused, k.csr()); return err },
						"the first token, with its key":   func() error { _, err := k.enroll(first, used); return err },
						"the first token, with a new key": func() error { _, err := k.enroll(first, k.csr()); return err },
						"a renewal over the former stream": func() error {
							_, err := k.enroller.Renew(k.ctx, copied.renewal(k.csr()))
							return err
						},
					} {
						if err := attempt(); err == nil {
							t.Errorf("%s was served", what)
						}
					}
					r := k.record(m.node)
					if r.Alarm != "" || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
						t.Errorf("the node is %s, alarm %q", r.State, r.Alarm)
					}
				}
				out()
				if got := m.states(); got != "revoked:operator+" {
					t.Errorf("the recovery tokens are %s", got)
				}
				token := ""
				if way == "bundle" {
					token = k.mustBundle(m.node).Token
				} else {
					token = k.bootstrap("node-1").Token
				}
				resp := m.mustEnroll(token, k.csr())
				if resp.GetNodeId() != copied.node || resp.GetNodeInstanceId() == copied.instance {
					t.Errorf("it is %s/%s now", resp.GetNodeId(), resp.GetNodeInstanceId())
				}
				m.took(resp)
				m.joinState = nil // as the agent of another node instance
				m.admit()
				out()
				m.admit()
			})
		}
	}
}
