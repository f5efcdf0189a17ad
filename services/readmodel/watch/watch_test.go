package watch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

var allTopics = []readmodelv1.Topic{
	readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_WORKSPACES, readmodelv1.Topic_TOPIC_TASKS,
	readmodelv1.Topic_TOPIC_INSTANCES, readmodelv1.Topic_TOPIC_RUNS, readmodelv1.Topic_TOPIC_STEPS,
}

type kit struct {
	*projecttest.World

	t         *testing.T
	projector *project.Projector
	hub       *watch.Hub
}

// newKit runs a hub. With ours the hub is notified of this process's commits; without, it acts as the hub of another
// replica, which polls.
func newKit(t *testing.T, cfg watch.Config, ours bool) *kit {
	t.Helper()
	testkit.IO(t)
	w := projecttest.NewWorld(t)
	k := &kit{World: w, t: t, projector: w.Projector()}
	k.sync()
	pool := w.DB.Pool(pg.RoleReadmodel)
	advanced := k.projector.Advanced
	if !ours {
		never := make(chan struct{})
		advanced = func() <-chan struct{} { return never }
	}
	if cfg.Poll == 0 {
		cfg.Poll = 50 * time.Millisecond
	}
	var err error
	k.hub, err = watch.New(watch.Deps{
		Logger: testkit.Logger(t), DB: pool, Reader: view.NewReader(pool),
		Advanced: advanced,
	}, cfg)
	k.check(err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.hub.Run(ctx) }()
	t.Cleanup(func() { cancel(); k.check(<-done) })
	return k
}

func (k *kit) check(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) sync() {
	k.t.Helper()
	k.Number()
	k.check(k.projector.Drain(testkit.Context(k.t)))
}

// watcher collects frames.
type watcher struct {
	t      *testing.T
	mu     sync.Mutex
	frames []*readmodelv1.WatchResponse
	token  string
	resume chan struct{} // if set, send waits for it after the snapshot
	booted bool
	marked chan struct{} // closed by the marker at the end of the snapshot
	cancel context.CancelFunc
	done   chan error
}

func (k *kit) watch(req watch.Request, resume chan struct{}) *watcher {
	k.t.Helper()
	ctx, cancel := context.WithCancel(testkit.Context(k.t))
	w := &watcher{t: k.t, resume: resume, cancel: cancel, done: make(chan error, 1), marked: make(chan struct{})}
	go func() {
		w.done <- k.hub.Serve(ctx, req, w.send)
		close(w.done)
	}()
	k.t.Cleanup(func() { _ = w.stop() })
	return w
}

func (w *watcher) send(f *readmodelv1.WatchResponse) error {
	w.mu.Lock()
	booted, resume := w.booted, w.resume
	w.mu.Unlock()
	if booted && resume != nil {
		<-resume
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frames = append(w.frames, f)
	if !w.booted && f.GetBootstrapped() != nil {
		w.booted = true
		close(w.marked)
	}
	if f.GetResumeToken() != "" {
		w.token = f.GetResumeToken()
	}
	return nil
}

func (w *watcher) stop() error {
	w.cancel()
	return <-w.done
}

func (w *watcher) all() []*readmodelv1.WatchResponse {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*readmodelv1.WatchResponse(nil), w.frames...)
}

// until waits for a frame.
func (w *watcher) until(what string, ok func(*readmodelv1.WatchResponse) bool) *readmodelv1.WatchResponse {
	w.t.Helper()
	var found *readmodelv1.WatchResponse
	testkit.Eventually(w.t, testkit.Patience, func() error {
		for _, f := range w.all() {
			if ok(f) {
				found = f
				return nil
			}
		}
		return fmt.Errorf("no %s among %d frames", what, len(w.all()))
	})
	return found
}

func (w *watcher) bootstrapped() *readmodelv1.WatchResponse {
	w.t.Helper()
	return w.until("marker", func(f *readmodelv1.WatchResponse) bool { return f.GetBootstrapped() != nil })
}

func isWorkspace(state commonv1.WorkspaceState, change readmodelv1.Change) func(*readmodelv1.WatchResponse) bool {
	return func(f *readmodelv1.WatchResponse) bool {
		return f.GetItem().GetWorkspace().GetState() == state && f.GetItem().GetChange() == change
	}
}

func (k *kit) workspace(t projecttest.Tenant, state commonv1.WorkspaceState) *lifecyclev1.Workspace {
	return &lifecyclev1.Workspace{
		WorkspaceId: t.WorkspaceID, TenantId: t.ID, Tenant: t.Name, Name: t.WorkspaceName,
		State: state, RunId: t.RunID,
	}
}

const (
	active = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	failed = commonv1.WorkspaceState_WORKSPACE_STATE_FAILED
	over   = commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
	fresh  = commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING
)

func TestSnapshotMarkerChangesAndResume(t *testing.T) {
	for _, ours := range []bool{true, false} {
		t.Run(fmt.Sprintf("own_commits_%v", ours), func(t *testing.T) {
			k := newKit(t, watch.Config{}, ours)
			w := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics}}, nil)
			marker := w.bootstrapped()
			// 3 nodes; of both tenants a workspace, a task, an instance, a run, two steps.
			if got := marker.GetBootstrapped().GetTotal(); got != 3+2*6 {
				t.Errorf("total %d", got)
			}
			for n, f := range w.all() {
				if last := n == int(marker.GetBootstrapped().GetTotal()); !last &&
					f.GetItem().GetChange() != readmodelv1.Change_CHANGE_SNAPSHOT {
					t.Errorf("frame %d: %v", n, f)
				}
			}
			k.Put(k.workspace(k.A, active))
			k.sync()
			w.until("update", isWorkspace(active, readmodelv1.Change_CHANGE_UPDATED))
			made := ids.New()
			k.Append(&lifecyclev1.Workspace{WorkspaceId: made, TenantId: k.B.ID, Tenant: "beta", Name: "new", State: fresh})
			k.sync()
			w.until("creation", isWorkspace(fresh, readmodelv1.Change_CHANGE_CREATED))
			token := w.token
			_ = w.stop()

			// While there is no watcher, one workspace changes twice and the other is decommissioned.
			k.Append(k.workspace(k.A, failed))
			k.Append(&lifecyclev1.Workspace{WorkspaceId: made, TenantId: k.B.ID, Tenant: "beta", Name: "new", State: over})
			k.sync()
			r := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics}, Resume: token}, nil)
			r.until("failed workspace", isWorkspace(failed, readmodelv1.Change_CHANGE_UPDATED))
			r.until("destroyed workspace", isWorkspace(over, readmodelv1.Change_CHANGE_DESTROYED))
			r.until("heartbeat", func(f *readmodelv1.WatchResponse) bool { return f.GetHeartbeat().GetServerTime() != nil })
			for _, f := range r.all() {
				if id := f.GetItem().GetId(); f.GetBootstrapped() != nil || (id != "" && id != k.A.WorkspaceID && id != made) {
					t.Errorf("resume sent %v", f)
				}
			}
			k.Put(k.workspace(k.A, active))
			k.sync()
			r.until("update after resume", isWorkspace(active, readmodelv1.Change_CHANGE_UPDATED))
		})
	}
}

func TestResumeIsRefusedWhenItCannotBeKept(t *testing.T) {
	k := newKit(t, watch.Config{ResumeEvents: 5}, true)
	filter := watch.Filter{Scope: list.All(), Topics: allTopics}
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	old := w.token
	for range 6 {
		k.Append(k.workspace(k.A, active))
	}
	k.sync()
	for name, token := range map[string]string{
		"too old": old, "garbage": "garbage", "not a number": "dzEueA", "the future": "dzEuOTk5OTk5OTk5",
		"negative": "dzEuLTU",
	} {
		err := <-k.watch(watch.Request{Filter: filter, Resume: token}, nil).done
		if !fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A position that this log never had, from before a restore.
	if _, err := testkit.RaiseEra(testkit.Context(t), k.DB.OwnerPool(), "test"); err != nil {
		t.Fatal(err)
	}
	k.Put(k.workspace(k.A, active))
	k.sync()
	err := <-k.watch(watch.Request{Filter: filter, Resume: "dzEuOTk5OTk5OTk5"}, nil).done
	if !fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) {
		t.Errorf("a lost timeline: %v", err)
	}
}

func TestTenantsAndFiltersSeeTheirOwn(t *testing.T) {
	k := newKit(t, watch.Config{}, true)
	scope, err := list.ScopeOf(rpc.Person{Subject: "p", TenantID: k.A.ID, Roles: []string{"tenant", "viewer"}})
	k.check(err)
	own := k.watch(watch.Request{Filter: watch.Filter{Scope: scope, Topics: allTopics}}, nil)
	one := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics, WorkspaceID: k.B.WorkspaceID}},
		nil)
	if got := own.bootstrapped().GetBootstrapped().GetTotal(); got != 6 { // without its node
		t.Errorf("a tenant's snapshot has %d", got)
	}
	if got := one.bootstrapped().GetBootstrapped().GetTotal(); got != 7 {
		t.Errorf("a workspace's snapshot has %d", got)
	}
	for _, x := range []projecttest.Tenant{k.B, k.A} {
		k.Append(k.workspace(x, active))
		k.Append(&lifecyclev1.Instance{
			InstanceId: x.InstanceID, WorkspaceId: x.WorkspaceID, TenantId: x.ID,
			WorkspaceName: x.WorkspaceName, State: commonv1.InstanceState_INSTANCE_STATE_ENDED,
		})
		k.Append(&lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
			TaskId: x.TaskID, NodeId: x.NodeID, TenantId: x.ID,
			WorkspaceId: x.WorkspaceID, State: commonv1.TaskState_TASK_STATE_RUNNING,
		}})
		k.Append(&lifecyclev1.NodeGate{NodeId: x.NodeID, Cordoned: true, Admitted: true})
		k.Append(&lifecyclev1.StepAttempt{
			RunId: x.RunID, WorkspaceId: x.WorkspaceID, Step: 1,
			Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		})
		k.Append(&lifecyclev1.Run{
			RunId: x.RunID, WorkspaceId: x.WorkspaceID, TenantId: x.ID,
			State: commonv1.RunState_RUN_STATE_SUCCEEDED,
		})
	}
	k.sync()
	for _, w := range []*watcher{own, one} {
		for _, topic := range allTopics {
			if w == own && topic == readmodelv1.Topic_TOPIC_NODES {
				continue
			}
			w.until(topic.String(), func(f *readmodelv1.WatchResponse) bool {
				return f.GetItem().GetTopic() == topic && f.GetItem().GetChange() != readmodelv1.Change_CHANGE_SNAPSHOT
			})
		}
	}
	scan := func(w *watcher, foreign projecttest.Tenant) {
		t.Helper()
		for _, f := range w.all() {
			raw, err := protojson.Marshal(f)
			k.check(err)
			for _, canary := range []string{
				foreign.ID, foreign.Name, foreign.WorkspaceID, foreign.RunID, foreign.NodeID,
				foreign.InstanceID, foreign.TaskID, k.Shared,
			} {
				if strings.Contains(string(raw), canary) {
					t.Errorf("met %s in %s", canary, raw)
				}
			}
		}
	}
	scan(own, k.B)
	scan(one, k.A)
}

func TestASlowWatcherMustBeginAnew(t *testing.T) {
	k := newKit(t, watch.Config{Pending: 4}, true)
	resume := make(chan struct{})
	slow := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics}}, resume)
	quick := k.watch(watch.Request{Filter: watch.Filter{
		Scope:  list.All(),
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_INSTANCES},
	}}, nil)
	slow.bootstrapped()
	quick.bootstrapped()
	for n := range 12 { // many changes of one object take one place; many objects fill the limit
		last := ids.New()
		k.Append(&lifecyclev1.Instance{
			InstanceId: last, WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID,
			State: commonv1.InstanceState_INSTANCE_STATE_LIVE,
		})
		k.sync()
		quick.until(fmt.Sprintf("instance %d", n),
			func(f *readmodelv1.WatchResponse) bool { return f.GetItem().GetId() == last })
	}
	close(resume)
	if err := <-slow.done; !fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) {
		t.Errorf("the slow watcher ended with %v", err)
	}
	if got := len(slow.all()); got > 15+1+4+1 {
		t.Errorf("it was sent %d frames", got)
	}
	select {
	case err := <-quick.done:
		t.Errorf("the quick watcher ended: %v", err)
	default:
	}
}

func TestAnObjectIsSentFourTimesASecondAtMostAndItsLastStateAlways(t *testing.T) {
	k := newKit(t, watch.Config{Poll: 10 * time.Millisecond}, true)
	w := k.watch(watch.Request{Filter: watch.Filter{
		Scope:  list.All(),
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES},
	}}, nil)
	w.bootstrapped()
	began := time.Now()
	for epoch := int64(2); epoch <= 60; epoch++ {
		x := k.workspace(k.A, active)
		x.Epoch = epoch
		k.Append(x)
		k.sync()
	}
	w.until("last state", func(f *readmodelv1.WatchResponse) bool { return f.GetItem().GetWorkspace().GetEpoch() == 60 })
	took, sent := time.Since(began), 0
	for _, f := range w.all() {
		if f.GetItem().GetId() == k.A.WorkspaceID && f.GetItem().GetChange() != readmodelv1.Change_CHANGE_SNAPSHOT {
			sent++
		}
	}
	if most := int(took/(250*time.Millisecond)) + 1; sent > most {
		t.Errorf("sent %d times in %s", sent, took)
	}
}

// No event reports that a replica died: a scan finds it.
func TestWhatFollowsFromTheTimeIsSent(t *testing.T) {
	k := newKit(t, watch.Config{Scan: 50 * time.Millisecond}, true)
	w := k.watch(watch.Request{Filter: watch.Filter{
		Scope:  list.All(),
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES}, NodeID: k.A.NodeID,
	}}, nil)
	w.bootstrapped()
	reason := func(connected bool, reason string) func(*readmodelv1.WatchResponse) bool {
		return func(f *readmodelv1.WatchResponse) bool {
			n := f.GetItem().GetNode()
			return f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED && n.GetConnected() == connected &&
				n.GetReason() == reason
		}
	}
	// A change of the gate that passes through the hub shows that it has scanned while all nodes were connected.
	k.Beat(false) // a replica is silent after 15 s
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true, Slots: 2})
	k.sync()
	w.until("gate", reason(true, ""))
	testkit.SetClockOffset(k.DB, 20*time.Second)
	w.until("disconnected", reason(false, "disconnected"))
	k.judge("", commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE)
	k.sync()
	w.until("outage", reason(false, "control_plane_outage"))
	k.BeatOf(ids.New(), k.Now(), false)
	k.judge("", commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED)
	k.sync()
	w.until("its end", reason(false, "disconnected"))
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN)
	k.sync()
	w.until("verdict", reason(false, "agent_down"))
}

// The scan of all nodes is the hub's most expensive statement. While it fails, changes from the log are still sent.
func TestAFailedScanStopsNoWatch(t *testing.T) {
	k := newKit(t, watch.Config{Scan: time.Millisecond}, true)
	w := k.watch(watch.Request{Filter: watch.Filter{
		Scope:  list.All(),
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_TASKS},
	}}, nil)
	w.bootstrapped()
	if _, err := k.DB.OwnerPool().Exec(testkit.Context(t),
		"REVOKE SELECT ON readmodel.gate FROM "+pg.RoleReadmodel); err != nil {
		t.Fatal(err)
	}
	id := ids.New()
	k.Append(&lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
		TaskId: id, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: k.A.NodeID,
		State: commonv1.TaskState_TASK_STATE_QUEUED, Attempt: 1, CreatedAt: timestamppb.New(k.Now()),
		ExpiresAt: timestamppb.New(k.Now().Add(time.Hour)),
	}})
	k.sync()
	w.until("new task", func(f *readmodelv1.WatchResponse) bool { return f.GetItem().GetId() == id })
}

// TestAWorkloadThatCrashesIsAChangeOfItsWorkspace: an observation is sent if it differs from the last one, although no
// event of the workspace reports it, and is not sent if an agent repeats itself.
func TestAWorkloadThatCrashesIsAChangeOfItsWorkspace(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Millisecond}, true)
	at := k.workspace(k.A, active)
	at.NodeId, at.Spec = k.A.NodeID, &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}}}
	k.Put(at)
	k.sync()
	scope, err := list.ScopeOf(rpc.Person{Subject: "p", TenantID: k.A.ID, Roles: []string{"tenant"}})
	k.check(err)
	filter := watch.Filter{Scope: scope, Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	var restarts int32
	observe := func(loops bool) {
		restarts++
		k.Observe(k.A.NodeID, &nodev1.Observation{
			WorkspaceId: k.A.WorkspaceID, Epoch: at.GetEpoch(),
			Workloads: []*nodev1.WorkloadStatus{
				{
					Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, CrashLoop: loops, ExitCode: 3,
					Restarts: restarts,
				},
			},
		})
		k.sync()
	}
	shown := func(reason string) func(*readmodelv1.WatchResponse) bool {
		return func(f *readmodelv1.WatchResponse) bool {
			return f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED &&
				f.GetItem().GetWorkspace().GetWorkloadReason() == reason
		}
	}
	observe(true)
	w.until("crash loop", shown("workload_crash_loop"))
	w.mu.Lock()
	token := w.token
	w.mu.Unlock()
	sent := len(w.all())
	for range 5 {
		observe(true)
	}
	observe(false)
	w.until("its end", shown(""))
	if n := w.changes(sent); n != 1 {
		t.Errorf("%d changes are sent of five repetitions and the end", n)
	}
	_ = w.stop()
	k.watch(watch.Request{Filter: filter, Resume: token}, nil).until("its end, resumed", shown(""))
}

// changes counts the objects sent after the first frames.
func (w *watcher) changes(after int) int {
	count := 0
	for _, f := range w.all()[after:] {
		if f.GetItem() != nil {
			count++
		}
	}
	return count
}

func TestAStreamEndsWithItsSessionAndWithItsContext(t *testing.T) {
	k := newKit(t, watch.Config{Check: 20 * time.Millisecond, Heartbeat: 30 * time.Millisecond}, true)
	var mu sync.Mutex
	var answer error
	set := func(err error) { mu.Lock(); answer = err; mu.Unlock() }
	request := watch.Request{
		Filter: watch.Filter{Scope: list.All(), Topics: allTopics},
		Alive:  func(context.Context) error { mu.Lock(); defer mu.Unlock(); return answer },
	}
	w := k.watch(request, nil)
	beats := func(f *readmodelv1.WatchResponse) bool { return f.GetHeartbeat() != nil && f.GetResumeToken() != "" }
	w.until("heartbeat", beats)
	set(fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, ""))
	if err := <-w.done; !fault.Has(err, commonv1.Reason_REASON_UNAUTHENTICATED) {
		t.Errorf("ended with %v", err)
	}
	// A session that cannot be read ends the stream too, after a second failure.
	set(errors.New("no database"))
	if err := <-k.watch(request, nil).done; !fault.Has(err, commonv1.Reason_REASON_UNAVAILABLE) {
		t.Errorf("ended with %v", err)
	}
	set(nil)
	last := k.watch(request, nil)
	last.bootstrapped()
	if err := last.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// The end of a session ends its streams without waiting for the next check.
func TestAStreamChecksItsSessionWhenNotified(t *testing.T) {
	k := newKit(t, watch.Config{Check: time.Hour}, true)
	recheck := make(chan struct{}, 1)
	var ended atomic.Bool
	scans := make(chan struct{}, 2)
	w := k.watch(watch.Request{
		Filter: watch.Filter{Scope: list.All(), Topics: allTopics}, Recheck: recheck,
		Alive: func(context.Context) error {
			scans <- struct{}{}
			if ended.Load() {
				return fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
			}
			return nil
		},
	}, nil)
	w.bootstrapped()
	recheck <- struct{}{}
	<-scans
	ended.Store(true)
	recheck <- struct{}{}
	if err := <-w.done; !fault.Has(err, commonv1.Reason_REASON_UNAUTHENTICATED) {
		t.Errorf("ended with %v", err)
	}
}

func TestStreamsAreBounded(t *testing.T) {
	k := newKit(t, watch.Config{Limits: watch.Limits{Streams: 1, Person: 1}}, true)
	request := watch.Request{
		Filter: watch.Filter{Scope: list.All(), Topics: allTopics},
		Person: rpc.Person{Subject: "first", Roles: []string{"operator"}},
	}
	first := k.watch(request, nil)
	first.bootstrapped()
	err := <-k.watch(request, nil).done
	if !fault.Has(err, commonv1.Reason_REASON_RATE_LIMITED) || fault.RetryAfterOf(err) <= 0 {
		t.Errorf("one too many of a person: %v", err)
	}
	other := request
	other.Person.Subject = "second"
	err = <-k.watch(other, nil).done
	if !fault.Has(err, commonv1.Reason_REASON_OVERLOADED) || fault.RetryAfterOf(err) <= 0 {
		t.Errorf("one too many in all: %v", err)
	}
	_ = first.stop()
	k.watch(other, nil).bootstrapped()
}

// TestEveryEndOfAWatchReturnsItsPlace: the only place is free again, however the watch before ended.
func TestEveryEndOfAWatchReturnsItsPlace(t *testing.T) {
	k := newKit(t, watch.Config{Limits: watch.Limits{Streams: 1, Person: 1}, Check: 20 * time.Millisecond, Pending: 1},
		true)
	request := watch.Request{
		Filter: watch.Filter{Scope: list.All(), Topics: allTopics},
		Person: rpc.Person{Subject: "one", TenantID: k.A.ID, Roles: []string{"tenant"}},
	}
	broken := errors.New("connection lost")
	ends := []struct {
		name string
		end  func() error
		want func(error) bool
	}{
		{"its context ended", func() error {
			w := k.watch(request, nil)
			w.bootstrapped()
			return w.stop()
		}, func(err error) bool { return errors.Is(err, context.Canceled) }},
		{"its context had ended before", func() error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return k.hub.Serve(ctx, request, func(*readmodelv1.WatchResponse) error { return nil })
		}, func(err error) bool { return err != nil }},
		{"the token is bad", func() error {
			req := request
			req.Resume = "garbage"
			return <-k.watch(req, nil).done
		}, func(err error) bool { return fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) }},
		{"the connection broke in the snapshot", func() error {
			return k.hub.Serve(testkit.Context(t), request, func(*readmodelv1.WatchResponse) error { return broken })
		}, func(err error) bool { return errors.Is(err, broken) }},
		{"the session ended", func() error {
			req := request
			req.Alive = func(context.Context) error { return fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "") }
			return <-k.watch(req, nil).done
		}, func(err error) bool { return fault.Has(err, commonv1.Reason_REASON_UNAUTHENTICATED) }},
		{"the watcher fell behind", func() error {
			w := k.watch(request, nil)
			w.bootstrapped()
			for { // several objects that change at once are more than may wait
				for range 6 {
					k.Append(&lifecyclev1.Instance{
						InstanceId: ids.New(), WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID,
						State: commonv1.InstanceState_INSTANCE_STATE_LIVE,
					})
				}
				k.sync()
				select {
				case err := <-w.done:
					return err
				default:
				}
			}
		}, func(err error) bool { return fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) }},
		{"the sender panicked", func() (err error) { // set by the deferred recover
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("panic: %v", p)
				}
			}()
			return k.hub.Serve(testkit.Context(t), request, func(*readmodelv1.WatchResponse) error { panic("boom") })
		}, func(err error) bool { return err != nil && strings.Contains(err.Error(), "boom") }},
	}
	for _, e := range ends {
		if err := e.end(); !e.want(err) {
			t.Errorf("%s: ended with %v", e.name, err)
		}
		after := k.watch(request, nil)
		after.bootstrapped()
		_ = after.stop()
	}
}
