package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// mostCollected is how many entries of a host's record one task collects.
const mostCollected = 64

// collected is what is stored of a task that collected diagnostics.
type collected struct {
	TaskID string `db:"task_id" expr:"@.task_id::text"`
	Type   string `db:"type"`
	State  string `db:"state"`
	Output []byte `db:"output"`
}

var readCollected = pg.Define(pg.RoleLifecycle, "dispatch.read_collected", `
	SELECT `+pg.Columns[collected]("t")+` FROM lifecycle.task t WHERE t.task_id = ANY ($1::uuid[])`)

// CollectDiagnostics queues a task that returns the newest entries of the host's record. As a probe it ignores the
// cordon, and nothing is dispatched to a node whose gate is shut.
func (s *Server) CollectDiagnostics(ctx context.Context,
	req *lifecyclev1.CollectDiagnosticsRequest,
) (*lifecyclev1.CollectDiagnosticsResponse, error) {
	key := "diagnostics/" + ids.New()
	if req.GetIdempotencyKey() != "" {
		key = "diagnostics/" + req.GetNodeId() + "/" + req.GetIdempotencyKey()
	}
	one, err := s.queueOne(ctx, task.Spec{
		Type: commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT, NodeID: req.GetNodeId(), IdempotencyKey: key,
		StartWithin: probeStartWithin, Payload: &nodev1.DiagnosticsCollect{MaxRecords: mostCollected},
		CorrelationID: obs.From(ctx).CorrelationID, CreatedBy: rpc.ActorFrom(ctx),
	}, true)
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.CollectDiagnosticsResponse{Task: one.row.Proto(), Pos: one.pos}, nil
}

// GetCollectedDiagnostics returns what a task of CollectDiagnostics returned. An output that is none of an agent's, or
// too long, is cut to what can be read of it.
func (s *Server) GetCollectedDiagnostics(ctx context.Context,
	req *lifecyclev1.GetCollectedDiagnosticsRequest,
) (*lifecyclev1.GetCollectedDiagnosticsResponse, error) {
	found, err := pg.All[collected](ctx, s.deps.DB, readCollected, []string{req.GetTaskId()})
	if err != nil {
		return nil, fmt.Errorf("read collected diagnostics: %w", err)
	}
	if len(found) == 0 || found[0].Type != names.Of(commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT) {
		return nil, fault.NoSuch("task that collects diagnostics", req.GetTaskId())
	}
	if found[0].State != names.Of(commonv1.TaskState_TASK_STATE_SUCCEEDED) {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the task has not succeeded",
			fault.Unmet("the task is "+found[0].State))
	}
	list, err := found[0].read()
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_INTERNAL, "", fault.Cause(err))
	}
	return &lifecyclev1.GetCollectedDiagnosticsResponse{Diagnostics: list}, nil
}

// read returns the newest entries of the output, cut to what can be read of them: at most mostCollected, each with less
// than a kilobyte of text, and nothing that this build does not know. The 16 records of one answer are thus far below
// the 4 MiB that a client reads.
func (c collected) read() ([]*commonv1.Diagnostic, error) {
	report := &nodev1.DiagnosticReport{}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(c.Output, report); err != nil {
		return nil, fmt.Errorf("read diagnostics: %w", err)
	}
	list := report.GetDiagnostics()
	list = list[max(len(list)-mostCollected, 0):]
	for _, d := range list {
		d.Detail = task.Clean(d.GetDetail(), 512)
		d.RetryCorrelationId, d.DedupeKeyHash = task.Clean(d.GetRetryCorrelationId(), 128),
			task.Clean(d.GetDedupeKeyHash(), 128)
	}
	return list, nil
}

// CollectRecords queues a task for each node in one transaction, and returns what those that have succeeded brought. A
// node that is refused is refused alone, and a request with the key of an earlier one queues nothing: its answer has
// that task as it is now. An output that cannot be read has no entries.
func (s *Server) CollectRecords(ctx context.Context,
	req *lifecyclev1.CollectRecordsRequest,
) (*lifecyclev1.CollectRecordsResponse, error) {
	by := rpc.ActorFrom(ctx)
	group := make([]*queued, 0, len(req.GetNodes()))
	for _, n := range req.GetNodes() {
		made, err := task.Spec{
			Type: commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT, NodeID: n.GetNodeId(),
			IdempotencyKey: "diagnostics/" + n.GetNodeId() + "/recovery/" + n.GetIdempotencyKey(),
			StartWithin:    probeStartWithin, Payload: &nodev1.DiagnosticsCollect{MaxRecords: mostCollected},
			CorrelationID: n.GetCorrelationId(), CreatedBy: by,
		}.Make()
		if err != nil {
			return nil, err
		}
		group = append(group, &queued{task: made, done: make(chan struct{})})
	}
	s.queue.write(ctx, group)
	out := &lifecyclev1.CollectRecordsResponse{}
	byTask := map[string]*lifecyclev1.CollectedRecord{}
	var ended []string
	for i, one := range group {
		answer := &lifecyclev1.CollectedRecord{NodeId: req.GetNodes()[i].GetNodeId()}
		out.Nodes = append(out.Nodes, answer)
		if one.err != nil {
			answer.Refused = cmp.Or(fault.ReasonOf(one.err), commonv1.Reason_REASON_INTERNAL)
			continue
		}
		answer.Task = one.row.Proto()
		if answer.GetTask().GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED {
			ended, byTask[answer.GetTask().GetTaskId()] = append(ended, answer.GetTask().GetTaskId()), answer
		}
	}
	if len(ended) == 0 {
		return out, nil
	}
	found, err := pg.All[collected](ctx, s.deps.DB, readCollected, ended)
	if err != nil {
		return nil, fmt.Errorf("read collected diagnostics: %w", err)
	}
	for _, c := range found {
		if byTask[c.TaskID].Diagnostics, err = c.read(); err != nil {
			s.deps.Logger.Warn("a collected record cannot be read", slog.String(obs.KeyTaskID, c.TaskID),
				slog.Any(obs.KeyError, err))
		}
	}
	return out, nil
}
