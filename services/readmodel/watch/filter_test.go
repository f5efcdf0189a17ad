package watch_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Scenario: all rows of one tenant's node and workspace cannot be decoded, and a read of them fails. A watch of the
// other node, or of its workspace, reads none of them: the work of a snapshot follows from what its filter selects.
func TestASnapshotReadsWhatItsFilterSelects(t *testing.T) {
	k := newKit(t, watch.Config{}, true)
	for _, table := range []string{"node", "workspace", "task", "instance", "run", "step"} {
		_, err := k.DB.OwnerPool().Exec(testkit.Context(t), "UPDATE readmodel."+table+
			` SET body = body || '{"@whole": 1}' WHERE body::text LIKE '%' || $1 || '%' OR body::text LIKE '%' || $2 || '%'`,
			k.B.NodeID, k.B.WorkspaceID)
		k.check(err)
	}
	for _, tt := range []struct {
		name  string
		of    watch.Filter
		total int32
	}{
		{"node", watch.Filter{NodeID: k.A.NodeID}, 4},                // with its workspace, task and instance
		{"workspace", watch.Filter{WorkspaceID: k.A.WorkspaceID}, 7}, // with these, its run and two steps
		{"both", watch.Filter{NodeID: k.A.NodeID, WorkspaceID: k.A.WorkspaceID}, 4},
	} {
		tt.of.Scope, tt.of.Topics = list.All(), allTopics
		w := k.watch(watch.Request{Filter: tt.of}, nil)
		select {
		case err := <-w.done:
			t.Errorf("%s: %v", tt.name, err)
			continue
		case <-w.marked:
		}
		if got := w.bootstrapped().GetBootstrapped().GetTotal(); got != tt.total {
			t.Errorf("%s: a snapshot of %d objects, want %d", tt.name, got, tt.total)
		}
	}
	all := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics}}, nil)
	select {
	case err := <-all.done:
		if err == nil {
			t.Error("a watch of everything ended without an error")
		}
	case <-all.marked:
		t.Error("a watch of everything read the rows that cannot be decoded")
	}
}
