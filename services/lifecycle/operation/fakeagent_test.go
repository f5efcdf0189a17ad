package operation

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// world is everything outside lifecycle: a provider of instances, the agents on them, and recovery's register. It keeps
// its own record, and refuses nothing that a real provider or agent would not refuse: a resource that is made twice
// exists twice in it.
type world struct {
	mu         sync.Mutex
	instances  map[string]*worldInstance // by workspace:epoch
	identities map[string]string         // instance → node
	launches   map[string]int
	// launches while an earlier epoch stood and was not fenced, which no real driver does
	overlaps []string
	refuse   string          // the type of task that fails at every agent
	reason   commonv1.Reason // of that failure; unspecified: none is given
	mute     bool            // no agent takes work
	unready  bool            // workloads that run are never ready
	// how every workload is reported, if set; its restarts grow by one with each report up to crashes
	workload  *nodev1.WorkloadStatus
	crashes   int32
	restarted int32
	deadTo    int64  // the agents of instances up to this epoch never connect
	played    int64  // turns of all agents
	endless   bool   // no instance can be confirmed ended
	refusals  int    // of launches, where the world is strict
	cutOff    int    // how many more calls do not reach recovery
	replica   string // at which agents have their sessions; empty: each at another that never lived
	gates     *gate.Server
	tasks     *dispatch.Server
	deployed  func(*nodev1.WorkloadDeploy) // called with each deploy, as its agent got it, before it is done. May be nil
}

type worldInstance struct {
	instance, node string
	ended, fenced  bool
	things         []string // what stands on it
	ledger         string
	results        map[string]*nodev1.TaskResult
}

func newWorld() *world {
	return &world{instances: map[string]*worldInstance{}, identities: map[string]string{}, launches: map[string]int{}}
}

// PrepareInstance registers a node and opens its gate, as recovery would once it has enrolled.
func (w *world) PrepareInstance(ctx context.Context,
	req *recoveryv1.PrepareInstanceRequest,
) (*recoveryv1.PrepareInstanceResponse, error) {
	if err := w.reachRecovery(); err != nil {
		return nil, err
	}
	w.mu.Lock()
	node, ok := w.identities[req.GetInstanceId()]
	if !ok {
		node = ids.New()
		w.identities[req.GetInstanceId()] = node
	}
	w.mu.Unlock()
	_, err := w.gates.ApplyFence(ctx, &lifecyclev1.ApplyFenceRequest{
		NodeId: node, FenceEpoch: 1, Admitted: true, Name: req.GetNodeName(),
		InstanceId: req.GetInstanceId(), WorkspaceId: req.GetWorkspaceId(), Epoch: req.GetEpoch(),
	})
	return &recoveryv1.PrepareInstanceResponse{NodeId: node}, err
}

// reachRecovery fails as long as calls do not reach recovery.
func (w *world) reachRecovery() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cutOff == 0 {
		return nil
	}
	w.cutOff--
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.Cause(errors.New("connection refused")))
}

// RetireInstance forgets a node.
func (w *world) RetireInstance(_ context.Context,
	req *recoveryv1.RetireInstanceRequest,
) (*recoveryv1.RetireInstanceResponse, error) {
	if err := w.reachRecovery(); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.identities, req.GetInstanceId())
	return &recoveryv1.RetireInstanceResponse{}, nil
}

// Launch makes an instance.
func (w *world) Launch(_ context.Context, b placement.LaunchRequest) (placement.Launched, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := fmt.Sprintf("%s:%d", b.WorkspaceID, b.Epoch)
	have := w.instances[k]
	if have != nil && have.ended {
		return placement.Launched{}, fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "ended")
	}
	if have == nil {
		for other, o := range w.instances {
			if strings.HasPrefix(other, b.WorkspaceID+":") && !o.ended && !o.fenced {
				w.overlaps = append(w.overlaps, k+" beside "+other)
			}
		}
		w.launches[k]++
		w.instances[k] = &worldInstance{
			instance: b.InstanceID, node: w.identities[b.InstanceID], ledger: ids.New(),
			results: map[string]*nodev1.TaskResult{},
		}
	}
	return placement.Launched{ProviderID: "fake:" + k}, nil
}

// End ends an instance and all that stands on it.
func (w *world) End(_ context.Context, workspaceID string, epoch int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := fmt.Sprintf("%s:%d", workspaceID, epoch)
	if w.endless {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the provider does not answer")
	}
	if w.instances[k] == nil {
		w.instances[k] = &worldInstance{}
	}
	w.instances[k].ended, w.instances[k].things = true, nil
	return nil
}

// Fence lets the next epoch be launched though this one stands.
func (w *world) Fence(_ context.Context, workspaceID string, epoch int64, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.instances[fmt.Sprintf("%s:%d", workspaceID, epoch)]; b != nil {
		b.fenced = true
	}
	return nil
}

// List is not called by the saga.
func (w *world) List(context.Context) ([]placement.Instance, error) {
	return nil, errors.New("not asked")
}

// Standing is not called.
func (w *world) Standing(context.Context) ([]placement.Instance, error) {
	return nil, errors.New("not asked")
}

// standing lists everything that exists: instances, what is on them, registered nodes.
func (w *world) standing() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for k, b := range w.instances {
		if b.ended {
			continue
		}
		out = append(out, "box "+k)
		for _, t := range b.things {
			out = append(out, k+" "+t)
		}
	}
	for i := range w.identities {
		out = append(out, "identity "+i)
	}
	sort.Strings(out)
	return out
}

// anyJoin takes the place of recovery's signature, which other tests check: the state names what the session names.
type anyJoin struct{}

// Verify reads the state that the fake agent wrote.
func (anyJoin) Verify(signed []byte) (joinstate.State, error) {
	part := strings.Split(string(signed), "|")
	if len(part) != 2 {
		return joinstate.State{}, errors.New("no state")
	}
	return joinstate.State{NodeID: part[0], NodeInstanceID: part[1], Generation: 1}, nil
}

// play runs the agents of all instances: they connect, take tasks, do them, and report the results, until ctx ends.
func (w *world) play(ctx context.Context) {
	connected := map[string]string{}
	worked := time.Now()
	for ctx.Err() == nil {
		for _, b := range w.live() {
			if connected[b.node] == "" {
				connected[b.node], worked = w.connect(ctx, b), time.Now()
				continue
			}
			if w.work(ctx, b, connected[b.node]) {
				worked = time.Now()
			}
		}
		w.mu.Lock()
		w.played++
		w.mu.Unlock()
		select {
		case <-time.After(testkit.Pause(time.Since(worked))): // each lease is a transaction
		case <-ctx.Done():
		}
	}
}

// turns waits until every agent has finished what it had begun.
func (w *world) turns(t *testing.T) {
	t.Helper()
	played := func() int64 {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.played
	}
	before := played()
	testkit.Eventually(t, testkit.Patience, func() error {
		if now := played(); now < before+2 {
			return fmt.Errorf("%d turns since", now-before)
		}
		return nil
	})
}

// dead reports whether some instances never connect.
func (w *world) dead() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.deadTo > 0
}

// impaired reports whether a run may fail although none of its steps was made to fail: no agent takes work, or no
// instance connects.
func (w *world) impaired() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mute || w.deadTo > 0
}

func (w *world) live() []*worldInstance {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*worldInstance
	for k, b := range w.instances {
		if !b.ended && b.node != "" && epochOf(k) > w.deadTo {
			out = append(out, b)
		}
	}
	return out
}

// epochOf returns the epoch of an instance by its key; a machine is of no epoch, and gets a number above all of them.
func epochOf(key string) int64 {
	_, text, _ := strings.Cut(key, ":")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return math.MaxInt64
	}
	return n
}

func (w *world) connect(ctx context.Context, b *worldInstance) string {
	session, instance, replica := ids.New(), ids.New(), w.replica
	if replica == "" {
		replica = ids.New()
	}
	res, err := w.gates.SessionsReady(ctx,
		&lifecyclev1.SessionsReadyRequest{ReplicaId: replica, Sessions: []*lifecyclev1.SessionReady{{
			NodeId: b.node, NodeInstanceId: instance, SessionId: session, Generation: 1,
			JoinState: []byte(b.node + "|" + instance), LedgerId: b.ledger,
			Host: &commonv1.HostFacts{Gpus: []*commonv1.Gpu{{DeviceId: "gpu-0"}, {DeviceId: "gpu-1"}}},
		}}})
	if err != nil || !res.GetResults()[0].GetAccepted() {
		return ""
	}
	return session
}

// work has an agent do its tasks, and reports whether there were any.
func (w *world) work(ctx context.Context, b *worldInstance, session string) bool {
	w.mu.Lock()
	mute := w.mute
	w.mu.Unlock()
	if mute {
		return false
	}
	res, err := w.tasks.LeaseTasks(ctx,
		&lifecyclev1.LeaseTasksRequest{Nodes: []*lifecyclev1.NodeLease{{
			NodeId: b.node, SessionId: session, Generation: 1,
			MaxTasks: 8,
		}}})
	if err != nil {
		return false
	}
	report := &lifecyclev1.NodeReport{NodeId: b.node, NodeInstanceId: ids.New(), SessionId: session, Generation: 1}
	for _, t := range res.GetTasks() {
		report.Delivered = append(report.Delivered, t.GetTask())
		report.Results = append(report.Results, w.act(b, t))
	}
	if len(report.GetResults()) == 0 {
		return false
	}
	// A report that was not accepted is sent again, as an agent does from its ledger.
	for ctx.Err() == nil {
		if _, err := w.tasks.ReportTasks(ctx,
			&lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{report}}); err == nil {
			return true
		}
	}
	return true
}

// act carries a task out, once for each attempt.
func (w *world) act(b *worldInstance, t *lifecyclev1.LeasedTask) *nodev1.TaskResult {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := fmt.Sprint(t.GetTask().GetTaskId(), t.GetTask().GetAttempt())
	if r := b.results[k]; r != nil {
		return r
	}
	r := &nodev1.TaskResult{Task: t.GetTask(), State: commonv1.TaskState_TASK_STATE_SUCCEEDED}
	out, err := w.effect(b, t.GetOffer())
	if err == nil {
		r.Output, err = proto.Marshal(out)
	}
	if err != nil {
		r.State, r.Error = commonv1.TaskState_TASK_STATE_FAILED, err.Error()
		if f, ok := fault.As(err); ok {
			r.Reason = f.Reason
		}
	}
	b.results[k] = r
	return r
}

func (b *worldInstance) has(thing string) bool {
	return slices.Contains(b.things, thing)
}

func (b *worldInstance) drop(thing string) {
	kept := b.things[:0]
	for _, t := range b.things {
		if t != thing {
			kept = append(kept, t)
		}
	}
	b.things = kept
}

func (w *world) effect(b *worldInstance, o *nodev1.TaskOffer) (proto.Message, error) {
	t, err := envelope.Verify(fakeAgentVerifiers, o.GetEnvelope(), o.GetSignature(), o.GetKeyId())
	if err != nil {
		return nil, err
	}
	if t.Type == w.refuse {
		err := fmt.Errorf("%s is refused here", t.Type)
		if w.reason != commonv1.Reason_REASON_UNSPECIFIED {
			return nil, fault.New(w.reason, err.Error())
		}
		return nil, err
	}
	switch t.Type {
	case "storage.allocate":
		if !b.has("storage") {
			b.things = append(b.things, "storage")
		}
		return &nodev1.StorageAllocateOutput{Path: "/boxes/data"}, nil
	case "storage.release":
		b.drop("storage")
		return &nodev1.StorageReleaseOutput{}, nil
	case "workload.deploy":
		p := &nodev1.WorkloadDeploy{}
		if err := proto.Unmarshal(t.Payload, p); err != nil {
			return nil, err
		}
		if w.deployed != nil {
			w.deployed(p)
		}
		if thing := "workload " + p.GetWorkload().GetName(); !b.has(thing) {
			b.things = append(b.things, thing)
		}
		return &nodev1.WorkloadStatusOutput{}, nil
	case "workload.remove":
		p := &nodev1.WorkloadRef{}
		if err := proto.Unmarshal(t.Payload, p); err != nil {
			return nil, err
		}
		b.drop("workload " + p.GetName())
		return &nodev1.WorkloadStatusOutput{}, nil
	case "workload.status":
		out := &nodev1.WorkloadStatusOutput{}
		for _, thing := range b.things {
			if name, ok := strings.CutPrefix(thing, "workload "); ok {
				if w.workload != nil {
					out.Workloads = append(out.Workloads, w.crashing(name))
					continue
				}
				out.Workloads = append(out.Workloads, &nodev1.WorkloadStatus{
					Name: name, Ready: !w.unready, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING,
					Ports: []*nodev1.Port{{Name: "http", Port: 8080}},
				})
			}
		}
		return out, nil
	default:
		return nil, fmt.Errorf("the fake agent does not do %s", t.Type)
	}
}

// crashing returns the status of a workload that exits again and again, and is ready once it has been restarted as
// often as it is to crash.
func (w *world) crashing(name string) *nodev1.WorkloadStatus {
	st := proto.CloneOf(w.workload)
	st.Name = name
	if w.restarted < w.crashes {
		w.restarted++
	} else if w.crashes > 0 {
		st.Ready, st.Phase, st.Detail, st.LastOutput = true, nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, "", ""
	}
	st.Restarts = w.restarted
	return st
}
