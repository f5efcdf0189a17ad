package operation

import (
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/policy"
)

// The verb that is named as the way out of a state can be done in that state, by the table of the answers to every
// request in every state.
func TestTheWayOutOfAStateIsOpen(t *testing.T) {
	stuck := []string{"creating, stuck", "retrying, stuck", "recreating, stuck", "decommissioning, stuck"}
	undone := []string{"creating, undone", "retrying, undone", "recreating, undone"}
	rows := map[string][]string{
		"WorkspaceState/provisioning": {"creating", "retrying"}, "WorkspaceState/active": {"active"},
		"WorkspaceState/failed": {"failed", "failed, reset"}, "WorkspaceState/stuck": stuck,
		"WorkspaceState/cancelling": {"creating, cancelled", "recreating, cancelled"},
		"WorkspaceState/recreating": {"recreating"}, "WorkspaceState/decommissioning": {"decommissioning"},
		"WorkspaceState/decommissioned": {"decommissioned"}, "RunState/pending": {"creating", "retrying", "recreating"},
		"RunState/compensating": undone, "RunState/stuck": stuck,
	}
	seen := 0
	for _, r := range policy.States() {
		enum := r.Enum.Name()
		if string(enum) != string(commonv1.WorkspaceState(0).Descriptor().Name()) &&
			r.Enum.Name() != commonv1.RunState(0).Descriptor().Name() {
			continue
		}
		states, ok := rows[string(enum)+"/"+r.State]
		if !ok {
			if enum == commonv1.WorkspaceState(0).Descriptor().Name() {
				t.Errorf("%s %s: no row of the matrix is known for it", enum, r.State)
			}
			continue // to the matrix, a run that runs or waits is one that is pending: no driver runs there
		}
		seen++
		if r.Verb == "" {
			continue
		}
		group, verbs, _ := strings.Cut(r.Verb, " ")
		for verb := range strings.SplitSeq(verbs, "|") {
			column := slices.Index(asked(), strings.ReplaceAll(verb, "-", "_"))
			if group != "workspaces" || column < 0 {
				t.Errorf("%s %s: %s %s is not asked in the matrix", enum, r.State, group, verb)
				continue
			}
			open := slices.ContainsFunc(states, func(state string) bool {
				return slices.Contains([]string{"does", "begins"}, strings.Fields(matrix()[state])[column])
			})
			if !open {
				t.Errorf("%s %s: %q is named as the way out, and is refused there", enum, r.State, verb)
			}
		}
	}
	if seen != len(rows) {
		t.Errorf("%d of %d states are in the policy's table", seen, len(rows))
	}
}
