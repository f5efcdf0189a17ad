package gate

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
)

// SetCordon keeps new workspaces off a node, or lets them on again. Workspaces on it go on running. When a person's
// cordon ends, it passes to an open finding or a verdict that cordons the node, or to resources that a release left
// there. A person may also end a cordon of these.
func (s *Server) SetCordon(ctx context.Context, req *lifecyclev1.SetCordonRequest) (*lifecyclev1.SetCordonResponse,
	error,
) {
	by := rpc.ActorFrom(ctx)
	res := &lifecyclev1.SetCordonResponse{}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		wanted, reason, next := req.GetCordoned(), req.GetReason(), by
		if !wanted {
			was, err := one(ctx, tx, lockGate, req.GetNodeId())
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return fmt.Errorf("read gate: %w", err)
			}
			if err == nil && was.Cordoned && !own(was.CordonedBy) {
				if next, reason, err = heir(ctx, tx, req.GetNodeId(), ""); err != nil {
					return err
				}
				wanted = next != ""
			}
		}
		g, err := Cordon(ctx, tx, req.GetNodeId(), wanted, reason, next)
		if err != nil {
			return err
		}
		pos, err := events.Append(ctx, tx, g.event())
		if err != nil {
			return fmt.Errorf("report gate: %w", err)
		}
		res.Gate, res.Pos = g.Proto(), pos
		asked := g
		asked.Cordoned = req.GetCordoned()
		if _, err := audit.Record(ctx, tx, cordoned(asked, req.GetReason(), "")); err != nil || asked.Cordoned == g.Cordoned {
			return err
		}
		_, err = audit.Record(ctx, tx, cordoned(g, reason, next))
		return err
	})
	if err != nil {
		return nil, err
	}
	s.deps.Committed()
	return res, nil
}

// NotEnrolled returns the refusal of a request about a node that has no gate: a gate is made as a node enrols, and ends
// with its identity.
func NotEnrolled(nodeID string) error {
	return fault.NoSuch("enrolled node", nodeID,
		fault.Unmet("the node has not enrolled, or is retired, or does not exist"),
		fault.Remedy("`gpuaas nodes get NODE` shows its identity: one that is pending enrols with its bundle first"))
}

// Cordon sets or clears the cordon in a transaction of the caller's, who appends the event.
func Cordon(ctx context.Context, tx pgx.Tx, nodeID string, cordoned bool, reason, by string) (Gate, error) {
	g, err := one(ctx, tx, setCordon, nodeID, cordoned, reason, by)
	if errors.Is(err, pgx.ErrNoRows) {
		return Gate{}, NotEnrolled(nodeID)
	}
	if err != nil {
		return Gate{}, fmt.Errorf("cordon node: %w", err)
	}
	return g, nil
}

// CordonFor cordons a node in a transaction of the caller's and appends the event and the audit entry. It does nothing
// for a node that is retired or does not exist.
func CordonFor(ctx context.Context, tx pgx.Tx, nodeID, reason, by string) error {
	g, err := Cordon(ctx, tx, nodeID, true, reason, by)
	if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := events.Append(ctx, tx, g.eventOf(ctx)); err != nil {
		return fmt.Errorf("report gate: %w", err)
	}
	_, err = audit.Record(ctx, tx, cordoned(g, reason, by))
	return err
}

// cordoned returns the audit entry of a cordon that was set or ended; if by is empty the actor is the caller of the
// request.
func cordoned(g Gate, reason, by string) audit.Entry {
	action := "node.uncordon"
	if g.Cordoned {
		action = "node.cordon"
	}
	return audit.Entry{
		Action: action, Actor: by, Reason: reason, SubjectType: "node", SubjectID: g.NodeID,
		NodeID: g.NodeID,
	}
}

// CloseSessions closes, in the gates, the sessions that nodeapi's reports say have ended: their nodes have no session
// until the next one is ready. It ignores the other reports.
func CloseSessions(ctx context.Context, tx pgx.Tx, reports ...*nodev1.SessionChanged) error {
	var nodes, sessions []string
	for _, f := range reports {
		if f.GetState() == commonv1.SessionState_SESSION_STATE_CLOSED {
			nodes, sessions = append(nodes, f.GetNodeId()), append(sessions, f.GetSessionId())
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, closeSessions, nodes, sessions); err != nil {
		return fmt.Errorf("close sessions of gates: %w", err)
	}
	return nil
}

// Conditions about replicas of nodeapi, by their beats.
var (
	// ListeningSQL is the condition that a live replica serves agents' sessions. Without one, that agents are disconnected
	// says nothing about them.
	ListeningSQL = `EXISTS (SELECT 1 FROM mesh.replica r WHERE ` + replicas.Listens("r") + `)`

	// LivingReplicaSQL is the condition, over mesh.replica s, that the replica's last beat is recent.
	LivingReplicaSQL = replicas.Lives("s")

	// ConnectedSQL is the condition, over node_gate g, that the node's session is open at a live replica.
	ConnectedSQL = `(g.session_open AND EXISTS (SELECT 1 FROM mesh.replica r WHERE r.replica_id = g.replica_id AND ` +
		replicas.Lives("r") + `))`
)
