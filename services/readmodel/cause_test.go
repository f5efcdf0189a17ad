package readmodel_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Only people of the operator see the cause of a failure, in the timeline and in the bundle, because it may name
// systems behind the mesh.
func TestTheCauseOfAFailureIsForOperators(t *testing.T) {
	k := newKit(t)
	const cause = `migration 2: relation "kv" already exists (SQLSTATE 42P07)`
	last := k.Append(&lifecyclev1.StepAttempt{
		RunId: k.A.RunID, WorkspaceId: k.A.WorkspaceID, Step: 1, Name: "Allocate storage",
		Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED,
		Error: "no schema today", ErrorCode: "schema_failed", Cause: cause,
	})
	k.awaitProjected()
	for tenantID, want := range map[string]string{"": cause, k.A.ID: ""} {
		roles := []string{"operator"}
		if tenantID != "" {
			roles = []string{"tenant", "operator"}
		}
		token := k.token(tenantID, roles...)
		timeline, err := k.query(token).GetTimeline(testkit.Context(t),
			&readmodelv1.GetTimelineRequest{Workspace: k.A.WorkspaceID, MinPos: last})
		k.check(err)
		item := timeline.GetItems()[1]
		if item.GetCause() != want || item.GetError() != "no schema today" {
			t.Errorf("a person of tenant %q reads %q under %q", tenantID, item.GetCause(), item.GetError())
		}
		files, err := k.escalate(token, k.A.WorkspaceID)
		k.check(err)
		for _, name := range []string{"timeline.json", "summary.json"} {
			if got := strings.Contains(string(files[name]), "42P07"); got != (want != "") {
				t.Errorf("a person of tenant %q finds the cause in %s: %v", tenantID, name, got)
			}
		}
	}
}
