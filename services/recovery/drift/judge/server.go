package judge

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// Server serves HealthService.
type Server struct{ judge *Judge }

// NewServer returns the server. It reads what the judges of all replicas have stored.
func NewServer(judge *Judge) *Server { return &Server{judge: judge} }

var (
	readNode = pg.Define(pg.RoleRecovery, "drift.read_node", `
		SELECT `+pg.Columns[collect.NodeRow]("j")+` FROM recovery.judgement j WHERE j.node_id = $1`)

	readCounters = pg.Define(pg.RoleRecovery, "drift.read_counters", `
		SELECT i.mints, i.refused_registers AS refused,
			(SELECT count(*) FROM recovery.session_open s
				WHERE s.node_id = i.node_id AND s.opened_at > mesh.clock() - interval '1 day') AS last_day,
			(SELECT count(*) FROM recovery.session_open s
				WHERE s.node_id = i.node_id AND s.node_instance_id = i.node_instance_id) AS sessions
		FROM recovery.identity i WHERE i.node_id = $1`)

	countPeriods = pg.Define(pg.RoleRecovery, "drift.count_periods", `
		SELECT p.reason, count(*) AS periods FROM recovery.verdict_period p WHERE p.node_id = $1
		GROUP BY p.reason ORDER BY p.reason`)
)

type countersRow struct {
	Mints    int32 `db:"mints"`
	Refused  int32 `db:"refused"`
	LastDay  int64 `db:"last_day"`
	Sessions int64 `db:"sessions"`
}

type periodsRow struct {
	Reason  string `db:"reason"`
	Periods int64  `db:"periods"`
}

// GetNodeHealth returns what recovery knows of a node as of now. It judges nothing: whether the node is healthy is what
// the last verdict on it says, unless an item has gone since.
func (s *Server) GetNodeHealth(ctx context.Context, req *recoveryv1.GetNodeHealthRequest,
) (*recoveryv1.GetNodeHealthResponse, error) {
	out := &recoveryv1.NodeHealth{}
	err := pg.InTx(ctx, s.judge.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out = &recoveryv1.NodeHealth{}
		return s.read(ctx, tx, req.GetNodeId(), out)
	})
	if err != nil {
		return nil, err
	}
	return &recoveryv1.GetNodeHealthResponse{Health: out}, nil
}

func (s *Server) read(ctx context.Context, tx pgx.Tx, nodeID string, out *recoveryv1.NodeHealth) error {
	row, err := pg.One[collect.NodeRow](ctx, tx, readNode, nodeID)
	if errors.Is(err, pgx.ErrNoRows) {
		return fault.NoSuch("node", nodeID)
	}
	if err != nil {
		return fmt.Errorf("read node: %w", err)
	}
	seen, err := readSeen(ctx, tx)
	if err != nil {
		return err
	}
	n := &collect.Node{NodeRow: row, Stored: row}
	nodes := map[string]*collect.Node{nodeID: n}
	if err := collect.LoadEvidence(ctx, tx, nodes); err != nil {
		return err
	}
	present, err := readVerdicts(ctx, tx, []string{nodeID})
	if err != nil {
		return err
	}
	if err := s.judge.trust.learn(ctx, tx, nodes, seen.Now); err != nil {
		return err
	}
	var body *recoveryv1.NodeVerdict
	if v := present[nodeID]; v != nil {
		body = v.body
	}
	t := &takenNodes{seen: &seen, trust: &s.judge.trust, nodes: nodes}
	list, _ := t.evidenceOf(n, body.GetReason())
	h := t.healthOf(n, drift.Verdict{Reason: body.GetReason()}, list)
	out.AsOf, out.Checklist = timestamppb.New(seen.Now), itemMessages(h.items)
	if since := body.GetHealthySince(); h.proven && since != nil {
		// The heartbeat holds since the session began.
		out.HealthySince = timestamppb.New(inSession(since.AsTime(), h.items[0].ObservedAt))
	}
	for _, e := range n.Evidence {
		out.Parts = append(out.Parts, messageOf(e.Evidence))
	}
	slices.SortStableFunc(out.GetParts(), func(a, b *recoveryv1.Evidence) int {
		return int(a.GetPart()) - int(b.GetPart())
	})
	if n.Wanted {
		out.Probe = &recoveryv1.NodeProbe{Failed: n.ProbeAttempt, Note: n.ProbeNote}
		if n.ProbeDue != nil {
			out.Probe.DueAt = timestamppb.New(*n.ProbeDue)
		}
	}
	out.Counters, err = readNodeCounters(ctx, tx, nodeID)
	return err
}

func readNodeCounters(ctx context.Context, tx pgx.Tx, nodeID string) (*recoveryv1.NodeCounters, error) {
	counted, err := pg.One[countersRow](ctx, tx, readCounters, nodeID)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("count sessions: %w", err)
	}
	periods, err := pg.All[periodsRow](ctx, tx, countPeriods, nodeID)
	if err != nil {
		return nil, fmt.Errorf("count verdicts: %w", err)
	}
	out := &recoveryv1.NodeCounters{
		SessionsLastDay: counted.LastDay, Sessions: counted.Sessions, Mints: counted.Mints, RefusedRegisters: counted.Refused,
	}
	for _, p := range periods {
		reason, err := names.Parse[commonv1.DriftReason](p.Reason)
		if aside.Note(ctx, "drift.period", nodeID, err) {
			continue
		}
		out.Verdicts = append(out.Verdicts, &recoveryv1.ReasonCount{Reason: reason, Count: p.Periods})
	}
	return out, nil
}
