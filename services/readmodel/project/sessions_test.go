package project_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// TestSessionsThatWaitTogether checks that events of sessions which are applied together have the same effect as one by
// one: a session serves since it began to, and of a node's closed sessions the newest eight stay.
func TestSessionsThatWaitTogether(t *testing.T) {
	testkit.IO(t)
	const nodes, each = 3, 12
	var list []*nodev1.SessionChanged
	var node [nodes]string
	for n := range node {
		node[n] = ids.New()
	}
	for g := range int64(each) {
		for n := range node {
			s := &nodev1.SessionChanged{
				SessionId: ids.New(), NodeId: node[n], ReplicaId: ids.New(), Generation: g + 1,
				State: commonv1.SessionState_SESSION_STATE_ADMITTED,
			}
			late := &nodev1.SessionChanged{
				SessionId: s.GetSessionId(), NodeId: node[n], ReplicaId: s.GetReplicaId(), Generation: g + 1, State: s.GetState(),
				Late: n == 1,
			}
			closed := &nodev1.SessionChanged{
				SessionId: s.GetSessionId(), NodeId: node[n], Generation: g + 1,
				State: commonv1.SessionState_SESSION_STATE_CLOSED,
			}
			list = append(list, s, late)
			if n < 2 || g < each-1 {
				list = append(list, closed)
			}
		}
	}
	result := func(after func(l *projecttest.Log, p *project.Projector)) string {
		t.Helper()
		l := projecttest.New(t)
		p := l.Projector()
		for _, s := range list {
			l.Append(s)
			after(l, p)
		}
		l.Number()
		must(t, p.Drain(testkit.Context(t)))
		if report, err := p.Verify(testkit.Context(t)); err != nil || !report.Equal() {
			t.Fatalf("the rebuild differs: %+v, %v", report, err)
		}
		// The events that the database numbered in turn say when a state of serving began.
		return text(t, l, `SELECT string_agg(concat_ws(' ', s.session_id, s.version, s.state, s.serving,
				(SELECT count(*) FROM events.event e WHERE e.created_at < s.since)), E'\n' ORDER BY s.session_id)
			FROM readmodel.session s`)
	}
	single := result(func(l *projecttest.Log, p *project.Projector) {
		l.Number()
		must(t, p.Drain(testkit.Context(t)))
	})
	together := result(func(*projecttest.Log, *project.Projector) {})
	if single != together {
		t.Errorf("one by one\n%s\ntogether\n%s", single, together)
	}
	if got := strings.Count(together, "\n") + 1; got != 8*nodes {
		t.Errorf("%d sessions stay, want %d:\n%s", got, 8*nodes, together)
	}
}
