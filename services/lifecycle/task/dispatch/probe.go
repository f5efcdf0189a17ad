package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// countExpired reads the open tasks of the named nodes and no others.
var countExpired = pg.Define(pg.RoleLifecycle, "dispatch.count_expired", `
	SELECT n.node_id::text AS node_id, mesh.clock() AS now, x.expired, x.oldest
	FROM unnest($1::uuid[]) AS n (node_id)
	CROSS JOIN LATERAL (
		SELECT count(*)::int AS expired, min(t.expires_at) AS oldest FROM lifecycle.task t
		WHERE t.node_id = n.node_id AND t.open AND t.state IN ('queued', 'dispatched') AND t.expires_at < mesh.clock()) x`)

type expiredRow struct {
	NodeID  string     `db:"node_id"`
	Now     time.Time  `db:"now"`
	Expired int32      `db:"expired"`
	Oldest  *time.Time `db:"oldest"`
}

// Probes serves ProbeService.
type Probes struct{ tasks *Server }

// NewProbes returns the server.
func NewProbes(tasks *Server) *Probes { return &Probes{tasks: tasks} }

// ProbeNodes queues a probe for each node, in one transaction, and counts the tasks that are past their time and still
// open. A request with the key of an earlier one queues nothing, and its answer has that probe as it is now.
func (p *Probes) ProbeNodes(ctx context.Context, req *lifecyclev1.ProbeNodesRequest,
) (*lifecyclev1.ProbeNodesResponse, error) {
	by := rpc.ActorFrom(ctx)
	group := make([]*queued, 0, len(req.GetNodes()))
	nodeIDs := make([]string, 0, len(req.GetNodes()))
	for _, n := range req.GetNodes() {
		made, err := task.Spec{
			Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeID: n.GetNodeId(),
			IdempotencyKey: "probe/" + n.GetNodeId() + "/recovery/" + n.GetIdempotencyKey(),
			StartWithin:    probeStartWithin, Payload: &nodev1.ProbeNoop{Nonce: ids.New()},
			CorrelationID: n.GetCorrelationId(), CreatedBy: by,
		}.Make()
		if err != nil {
			return nil, err
		}
		nodeIDs = append(nodeIDs, n.GetNodeId())
		group = append(group, &queued{task: made, done: make(chan struct{})})
	}
	p.tasks.queue.write(ctx, group)
	out := &lifecyclev1.ProbeNodesResponse{}
	for i, one := range group {
		answer := &lifecyclev1.NodeProbed{NodeId: nodeIDs[i]}
		if one.err != nil {
			answer.Refused = cmp.Or(fault.ReasonOf(one.err), commonv1.Reason_REASON_INTERNAL)
		} else {
			answer.Task = one.row.Proto()
		}
		out.Nodes = append(out.Nodes, answer)
	}
	return out, p.countExpired(ctx, nodeIDs, out)
}

func (p *Probes) countExpired(ctx context.Context, nodeIDs []string, out *lifecyclev1.ProbeNodesResponse) error {
	var rows []expiredRow
	err := pg.InTx(ctx, p.tasks.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		rows, err = pg.All[expiredRow](ctx, tx, countExpired, nodeIDs)
		return err
	})
	if err != nil {
		return fmt.Errorf("count expired tasks: %w", err)
	}
	found := make(map[string]expiredRow, len(rows))
	for _, r := range rows {
		found[r.NodeID] = r
		out.CheckedAt = timestamppb.New(r.Now)
	}
	for _, answer := range out.GetNodes() {
		r := found[answer.GetNodeId()]
		answer.ExpiredCurrent = r.Expired
		if r.Oldest != nil {
			answer.OldestExpiredAt = timestamppb.New(*r.Oldest)
		}
	}
	return nil
}
