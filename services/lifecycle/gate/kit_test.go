package gate_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// foreignKey is a join state signed by a key that the replica does not have.
const foreignKey = "foreign key"

// written is a join state as these tests write it; package joinstate tests the signatures.
type written struct{}

func (written) Verify(signed []byte) (joinstate.State, error) {
	var s joinstate.State
	if string(signed) == foreignKey {
		return s, fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN, "")
	}
	parts := strings.Split(string(signed), "|")
	if len(parts) != 3 {
		return s, errors.New("no state")
	}
	s.NodeID, s.NodeInstanceID = parts[0], parts[1]
	_, err := fmt.Sscan(parts[2], &s.Generation)
	return s, err
}

// heard records the calls of Tasks and Instance within the gate's transactions.
type heard struct {
	locked    []gate.Ready
	order     []string // of the calls
	newLedger []bool
	instances []string
	failures  []string
	refuse    error
	idle      bool // no node has tasks in flight
}

func (h *heard) Lock(_ context.Context, _ pgx.Tx, ready gate.Ready) (map[string]bool, error) {
	h.locked, h.order = append(h.locked, ready), append(h.order, "lock")
	busy := map[string]bool{}
	for _, id := range ready.NodeIDs {
		busy[id] = !h.idle
	}
	return busy, nil
}

func (h *heard) Reconcile(_ context.Context, _ pgx.Tx, _ gate.Gate, newLedger bool,
	_ []*commonv1.TaskInFlight,
) (gate.Reconciled, error) {
	h.newLedger, h.order = append(h.newLedger, newLedger), append(h.order, "reconcile")
	return gate.Reconciled{}, nil
}

func (h *heard) Fenced(context.Context, pgx.Tx, string) error {
	h.order = append(h.order, "fenced")
	return nil
}

func (h *heard) SessionReady(_ context.Context, _ pgx.Tx, g gate.Gate) error {
	h.instances = append(h.instances, g.WorkspaceID)
	return h.refuse
}

func (h *heard) RegisterFailures(_ context.Context, _ pgx.Tx, ws string, epoch int64, count int32, text string) error {
	h.failures = append(h.failures, fmt.Sprintf("%s/%d %d %s", ws, epoch, count, text))
	return nil
}

type kit struct {
	t         *testing.T
	ctx       context.Context
	db        *testkit.Database
	pool      *pgxpool.Pool
	server    *gate.Server
	heard     *heard
	set       *policy.Set // nil: the defaults
	committed atomic.Int64
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{
		t: t, db: testkit.DB(t), heard: &heard{},
		ctx: rpc.WithPerson(testkit.Context(t), rpc.Person{Subject: "ann", Roles: []string{"operator"}}),
	}
	k.pool = k.db.Pool(pg.RoleLifecycle)
	k.server = gate.NewServer(gate.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Join: written{}, Tasks: k.heard, Instances: k.heard,
		Committed: func() { k.committed.Add(1) }, Slots: 4,
	})
	return k
}

func (k *kit) fence(node string, epoch int64, admitted bool) *lifecyclev1.ApplyFenceResponse {
	k.t.Helper()
	res, err := k.server.ApplyFence(k.ctx,
		&lifecyclev1.ApplyFenceRequest{NodeId: node, FenceEpoch: epoch, Admitted: admitted, Name: "n-" + node})
	if err != nil {
		k.t.Fatal(err)
	}
	return res
}

func (k *kit) node() string {
	k.t.Helper()
	id := ids.New()
	k.fence(id, 1, true)
	return id
}

// session is a SessionReady of a node, with everything in order.
func session(node, instance string, generation int64) *lifecyclev1.SessionReady {
	return &lifecyclev1.SessionReady{
		NodeId: node, NodeInstanceId: instance, SessionId: ids.New(), Generation: generation,
		LedgerId:  "01970000-0000-7000-8000-00000000000a",
		JoinState: fmt.Appendf(nil, "%s|%s|%d", node, instance, generation),
	}
}

func (k *kit) ready(replica string, sessions ...*lifecyclev1.SessionReady) []*lifecyclev1.SessionReadyResult {
	k.t.Helper()
	res, err := k.server.SessionsReady(k.ctx, &lifecyclev1.SessionsReadyRequest{ReplicaId: replica, Sessions: sessions})
	if err != nil || len(res.GetResults()) != len(sessions) {
		k.t.Fatalf("%v, %v", res, err)
	}
	for i, r := range res.GetResults() {
		if r.GetSessionId() != sessions[i].GetSessionId() || r.GetAccepted() != (r.GetDenial() == nil) {
			k.t.Fatalf("the answer to session %d is %v", i, r)
		}
	}
	return res.GetResults()
}

func (k *kit) get(node string) gate.Gate {
	k.t.Helper()
	g, ok, err := gate.Get(k.ctx, k.pool, node)
	if err != nil || !ok {
		k.t.Fatalf("gate %s: %t, %v", node, ok, err)
	}
	return g
}

// versions returns the versions of the gate in its events.
func (k *kit) versions(node string) []int64 {
	k.t.Helper()
	rows, err := k.pool.Query(k.ctx,
		`SELECT aggregate_version FROM events.event WHERE kind = 'gate.changed' AND aggregate_id = $1 ORDER BY seq`, node)
	if err != nil {
		k.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

func (k *kit) tx(fn func(ctx context.Context, tx pgx.Tx) error) {
	k.t.Helper()
	if err := pg.InTx(k.ctx, k.pool, fn); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) closed(node, sessionID string, state commonv1.SessionState) {
	k.t.Helper()
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		return gate.CloseSessions(ctx, tx, &nodev1.SessionChanged{NodeId: node, SessionId: sessionID, State: state})
	})
}

func (k *kit) connected(node string) bool {
	k.t.Helper()
	var ok bool
	if err := k.pool.QueryRow(k.ctx, `SELECT `+gate.ConnectedSQL+` FROM lifecycle.node_gate g WHERE g.node_id = $1`,
		node).Scan(&ok); err != nil {
		k.t.Fatal(err)
	}
	return ok
}
