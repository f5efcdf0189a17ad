package nodeapi_test

import (
	"testing"
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
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
