package judge

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/shown"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// HostFacts implements HostFactsService.
type HostFacts struct {
	judge *Judge
	audit *audit.Log // records refusals; nil: none are recorded
}

// NewHostFacts returns the server; judge is told to judge the nodes whose facts were accepted.
func NewHostFacts(judge *Judge, log *audit.Log) *HostFacts {
	return &HostFacts{judge: judge, audit: log}
}

// AcceptHostFacts takes the runtime that a node reports now for the one that it is to have, on a person's word. If the
// request names what the person saw, and the runtime differs in another way by now, nothing is accepted.
func (h *HostFacts) AcceptHostFacts(ctx context.Context, req *recoveryv1.AcceptHostFactsRequest) (
	*recoveryv1.AcceptHostFactsResponse, error,
) {
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	entry := audit.Entry{
		Action: "node.accept_facts", Reason: reason, SubjectType: "node", SubjectID: req.GetNodeId(),
		NodeID: req.GetNodeId(),
	}
	if reason == "" {
		return nil, h.audit.Refuse(ctx, entry, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, ""))
	}
	var out *recoveryv1.AcceptHostFactsResponse
	err := pg.InTx(ctx, h.judge.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out = &recoveryv1.AcceptHostFactsResponse{}
		changes, err := accept(ctx, tx, req, by, reason)
		if err != nil || changes == "" {
			return err
		}
		out.Accepted = changes
		done := entry
		done.Actor, done.Reason = by, reason+" ("+changes+")"
		out.Pos, err = audit.Record(ctx, tx, done)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("accept facts of a host: %w", h.audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	if out.GetPos() != "" {
		h.judge.deps.Wake.Notify()
		h.judge.news.Notify()
	}
	return out, nil
}

// accept makes the present facts of a node the accepted ones and returns the differences; empty: there are none.
func accept(ctx context.Context, tx pgx.Tx, req *recoveryv1.AcceptHostFactsRequest, by, reason string) (string, error) {
	nodeID := req.GetNodeId()
	nodes := map[string]*collect.Node{nodeID: nil}
	if err := collect.Lock(ctx, tx, nodes); err != nil {
		return "", err
	}
	n := nodes[nodeID]
	if n == nil {
		return "", fault.NoSuch("node", nodeID)
	}
	if err := collect.LoadFacts(ctx, tx, nodes, []string{nodeID}); err != nil {
		return "", err
	}
	if n.Facts == nil || n.Facts.Present == "" {
		return "", nil
	}
	present, err := collect.RuntimeFrom(n.Facts.Present)
	if err != nil {
		return "", err
	}
	was, err := collect.RuntimeFrom(n.Facts.Accepted)
	if err != nil {
		return "", err
	}
	changes := present.Differences(was)
	if saw := req.GetSeen(); saw != "" && saw != shown.Fingerprint(changes) {
		return "", fault.New(commonv1.Reason_REASON_CONFLICT,
			"the host differs in another way than was shown; now: "+changes,
			fault.Remedy("look at the node again (`gpuaas nodes get`), and accept what it has now if that is meant"))
	}
	now, err := pg.Value[time.Time](ctx, tx, collect.ReadClock)
	if err != nil {
		return "", fmt.Errorf("read clock: %w", err)
	}
	f := n.Facts
	f.Accepted, f.Present = present.Completed(was).Text(), ""
	f.AcceptedAt, f.AcceptedBy, f.Reason = now, by, collect.Cut(reason, collect.MostDetail)
	n.NoteTopic(collect.TopicRuntime, drift.Evidence{
		NodeID: nodeID, Part: commonv1.DriftPart_DRIFT_PART_HOST, Source: drift.FromSession, ObservedAt: now,
	})
	n.Due = true
	return changes, collect.Save(ctx, tx, nodes)
}
