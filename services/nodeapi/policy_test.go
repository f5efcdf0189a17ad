package nodeapi_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
)

// Scenario: the policy changes while a session is being opened, after Welcome has carried the former policy and before
// the session is among those that changes are sent to. The agent has the policy in force once its session is admitted.
func TestAPolicyThatChangesWhileASessionOpensIsSent(t *testing.T) {
	t.Parallel()
	k := newKit(t)
	r := k.replica()
	standing, opening := k.session(r), k.node()
	k.connect(opening, r.AgentAddr(), true)
	opening.send(opening.hello())
	w := opening.exactly("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome()
	if _, err := k.db.OwnerPool().Exec(t.Context(),
		`INSERT INTO mesh.policy (key, value, updated_by)
			VALUES ('node.stream_max_age_seconds', '7200', 'test')`); err != nil {
		t.Fatal(err)
	}
	changed := func(f *nodev1.ConnectResponse) bool {
		return f.GetPolicyUpdate().GetPolicy().GetStreamMaxAge().AsDuration() == 2*time.Hour
	}
	standing.next("PolicyUpdate", changed)
	opening.send(ready(w.GetGeneration()))
	opening.exactly("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })
	opening.next("PolicyUpdate", changed)
}

// TestAgentsAreSentThePolicy checks that the parts of the policy by which agents act are sent to them when a key
// changes.
func TestAgentsAreSentThePolicy(t *testing.T) {
	t.Parallel()
	k := newKit(t)
	standing := k.session(k.replica())
	for _, c := range []struct {
		key, value string
		good       func(*commonv1.NodePolicy) bool
	}{
		{policy.TrustDwellSeconds, "45", func(p *commonv1.NodePolicy) bool {
			return p.GetTrustDwell().AsDuration() == 45*time.Second
		}},
		{policy.WorkloadCrashLoopRestarts, "9", func(p *commonv1.NodePolicy) bool { return p.GetCrashLoopRestarts() == 9 }},
		{policy.AutoRecovery, "false", func(p *commonv1.NodePolicy) bool { return !p.GetAutoRecovery() }},
		{policy.RecoveryAttemptsPerHour, "2", func(p *commonv1.NodePolicy) bool {
			return p.GetRecoveryAttemptsPerHour() == 2
		}},
		{policy.CertificateTTLSeconds, "7200", func(p *commonv1.NodePolicy) bool {
			return p.GetCertificateTtl().AsDuration() == 2*time.Hour
		}},
	} {
		if err := policystore.Put(t.Context(), k.db.OwnerPool(), c.key, c.value, "test", "test"); err != nil {
			t.Fatal(err)
		}
		standing.next("PolicyUpdate of "+c.key, func(f *nodev1.ConnectResponse) bool {
			return f.GetPolicyUpdate() != nil && c.good(f.GetPolicyUpdate().GetPolicy())
		})
	}
}

// TestAStreamIsReplacedAtTheAgeOfThePolicy: the agent of a session that was opened after the key was set to ten seconds
// is asked to replace it, and that of the session opened before is not.
func TestAStreamIsReplacedAtTheAgeOfThePolicy(t *testing.T) {
	t.Parallel()
	k := newKit(t)
	r := k.replica()
	standing := k.session(r)
	if err := policystore.Put(t.Context(), k.db.OwnerPool(), policy.StreamMaxAgeSeconds, "10", "test",
		"test"); err != nil {
		t.Fatal(err)
	}
	standing.next("PolicyUpdate", func(f *nodev1.ConnectResponse) bool {
		return f.GetPolicyUpdate().GetPolicy().GetStreamMaxAge().AsDuration() == 10*time.Second
	})
	short := k.session(r)
	short.next("Reconnect", func(f *nodev1.ConnectResponse) bool { return f.GetReconnect() != nil })
	for {
		select {
		case f := <-standing.frames:
			if f.GetReconnect() != nil {
				t.Fatal("the session opened before is replaced too")
			}
			continue
		default:
		}
		break
	}
}
