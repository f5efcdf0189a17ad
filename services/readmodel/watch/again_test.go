package watch_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

func (k *kit) asOwner(sql string) {
	k.t.Helper()
	_, err := k.DB.OwnerPool().Exec(testkit.Context(k.t), sql)
	k.check(err)
}

// Scenario: the last event of a workspace cannot be applied and is parked, and is applied again when the cause is
// repaired. A watcher gets the state that only then is the workspace's, and so does one that resumes from a place after
// the parked event.
func TestWhatIsReplayedIsAChange(t *testing.T) {
	k := newKit(t, watch.Config{}, false)
	filter := watch.Filter{Scope: list.All(), Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
	k.Put(k.workspace(k.A, active))
	k.sync()
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	k.asOwner(`ALTER TABLE readmodel.workspace ADD CONSTRAINT broken CHECK (state <> 'failed')`)
	k.Append(k.workspace(k.A, failed))
	k.Put(k.workspace(k.B, active))
	k.sync()
	w.until("the event behind the parked one", func(f *readmodelv1.WatchResponse) bool {
		return f.GetItem().GetId() == k.B.WorkspaceID && isWorkspace(active, readmodelv1.Change_CHANGE_UPDATED)(f)
	})
	w.mu.Lock()
	token := w.token
	w.mu.Unlock()
	parked, err := k.projector.Parked(testkit.Context(t))
	k.check(err)
	if len(parked) != 1 {
		t.Fatalf("parked are %v", parked)
	}
	k.asOwner(`ALTER TABLE readmodel.workspace DROP CONSTRAINT broken`)
	k.check(k.projector.Replay(testkit.Context(t), parked[0].Pos))
	k.sync()
	w.until("the state of the parked event", isWorkspace(failed, readmodelv1.Change_CHANGE_UPDATED))
	_ = w.stop()
	k.watch(watch.Request{Filter: filter, Resume: token}, nil).
		until("the state of the parked event, resumed", isWorkspace(failed, readmodelv1.Change_CHANGE_UPDATED))
}

// Scenario: a row of the projections is wrong, and they are made again from the log. No event changes the row, so
// watchers have to take a new snapshot, and a place from before is none to resume from.
func TestARebuildEndsWatches(t *testing.T) {
	k := newKit(t, watch.Config{}, false)
	filter := watch.Filter{Scope: list.All(), Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
	k.Put(k.workspace(k.A, active))
	k.sync()
	k.asOwner(`UPDATE readmodel.workspace SET state = 'failed',
		body = jsonb_set(body, '{state}', '"WORKSPACE_STATE_FAILED"') WHERE workspace_id = '` + k.A.WorkspaceID + `'`)
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	w.until("the wrong state", isWorkspace(failed, readmodelv1.Change_CHANGE_SNAPSHOT))
	token := w.token
	_, err := k.projector.Rebuild(testkit.Context(t))
	k.check(err)
	k.sync()
	for what, err := range map[string]error{
		"a watch": <-w.done, "a resume": <-k.watch(watch.Request{Filter: filter, Resume: token}, nil).done,
	} {
		if !fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) {
			t.Errorf("%s ended with %v", what, err)
		}
	}
	k.watch(watch.Request{Filter: filter}, nil).
		until("the state of the log", isWorkspace(active, readmodelv1.Change_CHANGE_SNAPSHOT))
}
