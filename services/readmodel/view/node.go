package view

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// NodeFilter narrows a list of nodes. Zero fields do not.
type NodeFilter struct {
	ConnectedOnly  bool
	Disconnected   bool
	IncludeRetired bool
	Name, ID       string
	WorkspaceID    string   // the workspace that they were launched for
	IDs            []string // nil: any
}

// nodeSession joins the node n with its gate, with the session that serves it (else its newest), and with that
// session's replica, as of now. $2 is how old a fresh beat may be. During a hand-over a node has two sessions: the
// newer one counts once it is admitted, so that the node's state does not flap.
func nodeSession(now string) string {
	return `
	LEFT JOIN readmodel.gate g ON g.node_id = n.node_id
	LEFT JOIN LATERAL (
		SELECT c.session_id, c.version, c.xmin, c.body, c.since, c.replica_id,
			COALESCE(c.serving AND NOT r.leaving AND r.beat_at > ` + now + ` - $2::interval, false) AS connected
		FROM (SELECT x.session_id, x.version, x.xmin, x.generation, x.serving, x.since, x.replica_id, x.body
			FROM readmodel.session x
			WHERE x.node_id = n.node_id ORDER BY x.generation DESC, x.version DESC, x.session_id DESC LIMIT 5) c
		LEFT JOIN mesh.replica r ON r.replica_id = c.replica_id
		ORDER BY connected DESC, c.generation DESC, c.version DESC, c.session_id DESC LIMIT 1) s ON true
	LEFT JOIN mesh.replica b ON b.replica_id = s.replica_id`
}

// nodeFrom is a node with the joins of nodeSession, with the number of its allocated slots and GPUs, and with its
// verdict. $1 is the time.
var nodeFrom = `readmodel.node n` + nodeSession("$1::timestamptz") + `
	LEFT JOIN LATERAL (
		SELECT count(*) AS slots, COALESCE(sum(jsonb_array_length(COALESCE(a.body->'gpu_device_ids', '[]'))), 0) AS gpus
			FROM readmodel.allocation a
		WHERE a.body->>'node_id' = n.node_id::text AND a.body->>'state' <> 'ALLOCATION_STATE_RELEASED') u ON true
	LEFT JOIN readmodel.verdict v ON v.node_id = n.node_id`

type nodeDetail struct {
	nodeColumns
	Slots   int32  `db:"slots" expr:"u.slots"`
	GPUs    int32  `db:"gpus" expr:"u.gpus"`
	Verdict []byte `db:"verdict" expr:"v.body"`
}

type nodeRow struct {
	list.Place
	nodeDetail
}

const (
	nodesConnected    list.Condition = "s.connected"
	nodesDisconnected list.Condition = "NOT COALESCE(s.connected, false)"
	nodesNotRetired   list.Condition = "n.state <> 'retired'"
	nodesOfName       list.Condition = "n.name = ?"
	theNode           list.Condition = "n.node_id = ?::uuid"
	nodesOfWorkspace  list.Condition = "n.workspace_id = ?::uuid"
	nodesByID         list.Condition = "n.node_id = ANY(?::uuid[])"
)

var nodeLayout = list.Layout{
	Name: "nodes", Columns: pg.Columns[nodeDetail]("n"), From: nodeFrom, Sort: "n.name", ID: "n.node_id", Lead: 3,
	Tenant: "n.tenant_id",
	Conditions: []list.Condition{
		nodesConnected, nodesDisconnected, nodesNotRetired, nodesOfName, theNode, nodesOfWorkspace, nodesByID,
	},
}

var listNodes = pg.DefineDynamic(pg.RoleReadmodel, "view.list_nodes", nodeLayout.Compose, nodeLayout.Samples()...)

// Nodes returns one page of nodes, ordered by name. It refuses a scope that is bound to a tenant: what a tenant needs
// to know of a node, its workspaces show.
func (s *Snapshot) Nodes(ctx context.Context, f NodeFilter, page list.Page) ([]*readmodelv1.Node, string, error) {
	if !s.scope.Everything() {
		return nil, "", list.OperatorsOnly()
	}
	s.with = &pg.Batch{}
	all, stale := s.verdictOfAll(), s.verdictsStaleSince()
	l := list.Request{Layout: &nodeLayout, Statement: listNodes, Args: []any{s.Now, BeatFresh, s.scope.Arg()}}
	l.When(f.ConnectedOnly, nodesConnected)
	l.When(f.Disconnected, nodesDisconnected)
	l.When(!f.IncludeRetired, nodesNotRetired)
	l.When(f.Name != "", nodesOfName, f.Name)
	l.When(f.ID != "", theNode, list.OptionalID(f.ID))
	l.When(f.WorkspaceID != "", nodesOfWorkspace, list.OptionalID(f.WorkspaceID))
	l.When(f.IDs != nil, nodesByID, f.IDs)
	items, next, err := run(ctx, s, l, page,
		func(row nodeRow) (*readmodelv1.Node, error) {
			n, err := s.readNode(row, *all, *stale)
			if err == nil {
				status.ShownHealth(n)
			}
			return n, err
		})
	return lookup.NamePage(ctx, s.find(), func(n *readmodelv1.Node) lookup.Nameless {
		return lookup.Nameless{WorkspaceID: n.GetWorkspaceId(), Workspace: &n.Workspace}
	}, items, next, err)
}

// readNode returns the node of a row, with the verdict about the control plane, and the time up to which everything is
// judged if that is too long ago.
func (s *Snapshot) readNode(row nodeRow, all *recoveryv1.NodeVerdict, stale time.Time) (*readmodelv1.Node, error) {
	f, err := row.facts(all)
	if err != nil {
		return nil, err
	}
	if f.Gate != nil {
		f.Gate.SlotsUsed, f.Gate.GpusUsed = row.Slots, row.GPUs
	}
	d := status.Describe(f)
	n := &readmodelv1.Node{
		NodeId: f.Identity.GetNodeId(), Name: f.Identity.GetName(), Connected: f.Connected, UserState: d.UserState,
		Reason: d.Reason, LastHeartbeatAt: stamp(d.LastHeartbeat), Identity: f.Identity, Session: f.Session, Gate: f.Gate,
		ReplicaId: f.Session.GetReplicaId(), NextAction: d.NextAction, Since: stamp(d.Since),
		WorkspaceId:       cmp.Or(f.Gate.GetWorkspaceId(), f.Identity.GetWorkspaceId()),
		VerdictStaleSince: stamp(status.EarlierStale(stale, timeOf(f.Verdict.GetStaleSince()))),
	}
	verdict := d.Verdict
	if verdict == nil && f.Verdict.GetReason() == commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
		verdict = f.Verdict // that nothing is wrong
	}
	n.Verdict = present(verdict)
	if f.Connected && all.GetReason() != commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
		n.ControlPlaneReason = names.Of(all.GetReason())
	}
	if f.Gate.GetWaitingCordon() != "" {
		n.NextAction = strings.TrimPrefix(n.GetNextAction()+waitingCordon, "; ")
	}
	return n, nil
}

// waitingCordon is added to what is to be done about a node whose cordon waits.
const waitingCordon = "; it is not cordoned, since verdicts would cordon more of the fleet at once than " +
	policy.BrakeFleetFraction + " allows: `gpuaas nodes cordon NODE --reason TEXT` if it is to take no workspace meanwhile"

// rowsOf runs the statement of a list, in one batch with the queries of s.with.
func rowsOf[R any](ctx context.Context, s *Snapshot, statement *pg.Statement, args ...any) ([]R, error) {
	with := s.with
	if with == nil {
		return pg.All[R](ctx, s.tx, statement, args...)
	}
	s.with = nil
	var items []R
	with.Queue(statement, args...).Query(func(rows pgx.Rows) error {
		var err error
		items, err = pgx.CollectRows(rows, pgx.RowToStructByName[R])
		return err
	})
	err := with.Send(ctx, s.tx)
	return items, err
}

// Replica is one replica of nodeapi, as its last beat reported it.
type Replica struct {
	ID     string    `db:"replica_id" expr:"@.replica_id::text"`
	BeatAt time.Time `db:"beat_at"`
	// Fresh: it beats, and is not leaving.
	Fresh    bool  `db:"fresh" expr:"NOT @.leaving AND @.beat_at > $1::timestamptz - $2::interval"`
	Sessions int32 `db:"sessions"`
	Late     int32 `db:"late"` // of its sessions
}

var listReplicas = pg.Define(pg.RoleReadmodel, "view.list_replicas", `
	SELECT `+pg.Columns[Replica]("r")+` FROM mesh.replica r
		WHERE r.service = 'nodeapi' AND r.beat_at > $1::timestamptz - interval '10 minutes' ORDER BY r.replica_id`)

// Replicas returns the replicas of nodeapi that beat within the last ten minutes.
func (s *Snapshot) Replicas(ctx context.Context) ([]Replica, error) {
	rows, err := pg.All[Replica](ctx, s.tx, listReplicas, s.Now, BeatFresh)
	if err != nil {
		return nil, fmt.Errorf("read replicas: %w", err)
	}
	return rows, nil
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// timeOf returns the time of a message; nil for none.
func timeOf(at *timestamppb.Timestamp) *time.Time {
	if at == nil {
		return nil
	}
	t := at.AsTime()
	return &t
}

// nodeColumns are the facts of a node in what nodeSession joins.
type nodeColumns struct {
	Identity []byte `db:"identity" expr:"n.body"`
	Gate     []byte `db:"gate" expr:"g.body"`
	Session  []byte `db:"session" expr:"s.body"`
	nodeTimes
}

// nodeTimes are the time since which a node is connected or disconnected, and the last beat of its replica.
type nodeTimes struct {
	Since     time.Time  `db:"since" expr:"COALESCE(s.since, 'epoch')"`
	Connected bool       `db:"connected" expr:"COALESCE(s.connected, false)"`
	BeatAt    *time.Time `db:"beat_at" expr:"b.beat_at"`
}

// facts decodes the columns into NodeFacts.
func (n *nodeDetail) facts(all *recoveryv1.NodeVerdict) (status.NodeFacts, error) {
	f := status.NodeFacts{ControlPlane: all, Since: n.Since, Connected: n.Connected}
	var err error
	if f.Identity, err = decode[recoveryv1.NodeIdentity](n.Identity); err != nil {
		return f, err
	}
	if n.Gate != nil {
		if f.Gate, err = decode[lifecyclev1.NodeGate](n.Gate); err != nil {
			return f, err
		}
	}
	if n.Session != nil {
		if f.Session, err = decode[nodev1.SessionChanged](n.Session); err != nil {
			return f, err
		}
	}
	if n.Verdict != nil {
		if f.Verdict, err = decode[recoveryv1.NodeVerdict](n.Verdict); err != nil {
			return f, err
		}
	}
	if n.BeatAt != nil {
		f.BeatAt = *n.BeatAt
	}
	return f, nil
}

// Node returns one node by name, by id or by a part of the id. Of a name it is the node that is not retired; only if
// there is none, the last that was retired. It refuses a scope that is bound to a tenant, whatever the name is.
func (s *Snapshot) Node(ctx context.Context, ref string) (*readmodelv1.Node, error) {
	if !s.scope.Everything() {
		return nil, list.OperatorsOnly()
	}
	id, err := s.find().IDOf(ctx, readmodelv1.ObjectKind_OBJECT_KIND_NODE, ref)
	if err != nil {
		return nil, err
	}
	found, _, err := s.Nodes(ctx, NodeFilter{ID: id, IncludeRetired: true}, list.Page{Size: 1})
	return only(found, err, "node", ref)
}
