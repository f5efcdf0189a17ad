package findings

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
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

// The key that the fake agent's tasks are signed with.
var (
	fakeAgentKey          = envelope.NewKey(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)))
	fakeAgentVerifiers, _ = envelope.NewVerifierSet(fakeAgentKey.Public())
)

// instanceOf identifies an instance.
type instanceOf struct {
	workspaceID string
	epoch       int64
}

func (k instanceOf) String() string { return fmt.Sprintf("%s:%d", k.workspaceID, k.epoch) }

// world is everything outside lifecycle: a provider of instances, the agents on them, and recovery's register. It keeps
// its own list, and refuses nothing that a real one would not refuse: a thing that is made twice is in the list twice.
type world struct {
	mu         sync.Mutex
	instances  map[string]*worldInstance // by workspace:epoch
	identities map[string]string         // instance → node
	launches   map[string]int
	gates      *gate.Server
	tasks      *dispatch.Server
	silent     bool
	strays     map[instanceOf]int // processes of ended instances that the provider found and ended
	straysAt   time.Time
}

type worldInstance struct {
	instance, node string
	ended, fenced  bool
	things         []string // that are on it
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

// RetireInstance forgets a node.
func (w *world) RetireInstance(_ context.Context,
	req *recoveryv1.RetireInstanceRequest,
) (*recoveryv1.RetireInstanceResponse, error) {
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
		w.launches[k]++
		w.instances[k] = &worldInstance{
			instance: b.InstanceID, node: w.identities[b.InstanceID], ledger: ids.New(),
			results: map[string]*nodev1.TaskResult{},
		}
	}
	return placement.Launched{ProviderID: "fake:" + k}, nil
}

// End ends an instance and everything on it.
func (w *world) End(_ context.Context, workspaceID string, epoch int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := fmt.Sprintf("%s:%d", workspaceID, epoch)
	if w.instances[k] == nil {
		w.instances[k] = &worldInstance{}
	}
	w.instances[k].ended, w.instances[k].things = true, nil
	return nil
}

// Fence lets the next epoch be launched though this one has not ended.
func (w *world) Fence(_ context.Context, workspaceID string, epoch int64, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.instances[fmt.Sprintf("%s:%d", workspaceID, epoch)]; b != nil {
		b.fenced = true
	}
	return nil
}

// List returns everything that was ever launched.
func (w *world) List(context.Context) ([]placement.Instance, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.silent {
		return nil, errors.New("the provider does not answer")
	}
	var out []placement.Instance
	for k, b := range w.instances {
		workspaceID, epoch, _ := strings.Cut(k, ":")
		n, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return nil, err
		}
		i := placement.Instance{
			WorkspaceID: workspaceID, Epoch: n, InstanceID: b.instance, ProviderID: "fake:" + k,
			StartedAt: time.Unix(1, 0),
		}
		if b.ended {
			i.EndedAt = time.Unix(2, 0)
		}
		out = append(out, i)
	}
	for k, n := range w.strays {
		out = append(out, placement.Instance{
			WorkspaceID: k.workspaceID, Epoch: k.epoch, ProviderID: "fake:" + k.String(), StartedAt: time.Unix(1, 0),
			EndedAt: time.Unix(2, 0), Strays: n,
			StraysAt: w.straysAt,
		})
	}
	return out, nil
}

// Standing returns the instances that have not ended, and those with strays.
func (w *world) Standing(ctx context.Context) ([]placement.Instance, error) {
	list, err := w.List(ctx)
	return slices.DeleteFunc(list, func(i placement.Instance) bool { return !i.EndedAt.IsZero() && i.Strays == 0 }), err
}

// anyJoin replaces the check of recovery's signature, which other tests cover: the state has the ids of the session.
type anyJoin struct{}

// Verify reads the state that the fake agent wrote.
func (anyJoin) Verify(signed []byte) (joinstate.State, error) {
	part := strings.Split(string(signed), "|")
	if len(part) != 2 {
		return joinstate.State{}, errors.New("no state")
	}
	return joinstate.State{NodeID: part[0], NodeInstanceID: part[1], Generation: 1}, nil
}

// play is the agents of all instances: they connect, take work, do it, and report it, until ctx ends.
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
		select {
		case <-time.After(testkit.Pause(time.Since(worked))): // each lease is a transaction
		case <-ctx.Done():
		}
	}
}

func (w *world) live() []*worldInstance {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*worldInstance
	for _, b := range w.instances {
		if !b.ended && b.node != "" {
			out = append(out, b)
		}
	}
	return out
}

func (w *world) connect(ctx context.Context, b *worldInstance) string {
	session, instance := ids.New(), ids.New()
	res, err := w.gates.SessionsReady(ctx,
		&lifecyclev1.SessionsReadyRequest{ReplicaId: ids.New(), Sessions: []*lifecyclev1.SessionReady{{
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
	// A report that was not acknowledged is sent again, as an agent's ledger does.
	for ctx.Err() == nil {
		if _, err := w.tasks.ReportTasks(ctx,
			&lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{report}}); err == nil {
			return true
		}
	}
	return true
}

// act does what a task asks, once for each attempt.
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
				out.Workloads = append(out.Workloads, &nodev1.WorkloadStatus{
					Name: name, Ready: true, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING,
					Ports: []*nodev1.Port{{Name: "http", Port: 8080}},
				})
			}
		}
		return out, nil
	default:
		return nil, fmt.Errorf("the fake agent does not do %s", t.Type)
	}
}

// silence makes the provider's list hang or work again.
func (w *world) silence(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.silent = on
}
