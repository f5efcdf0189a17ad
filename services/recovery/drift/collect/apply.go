package collect

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// ConsumerName is the key of the cursor of the consumer that keeps evidence.
const ConsumerName = "drift"

const (
	kindIdentity = "node_identity.changed"
	kindSession  = "session.changed"
	kindGate     = "gate.changed"
	kindReplica  = "replica.beat"
	kindAttempt  = "enrollment.attempted"
	kindRefused  = "task.type_refused"
	kindRejected = "ingress.rejected"
	kindBacklog  = "task_backlog.changed"
	kindTrust    = "ca_preflight.changed"
	kindProfile  = "profile.changed"
	kindIncident = "incident.changed"
)

// Kinds returns the kinds of events that are evidence. That a replica began to listen, or leaves, that the preflight of
// the authority has another state, and that an incident began or ended, as that of the rollback mode, only has the
// judge look at once, and a version of a profile has it judge the nodes that report it: all four are in rows.
func Kinds() []string {
	return []string{
		kindIdentity, kindSession, kindGate, kindReplica, kindAttempt, kindRefused, kindRejected, kindBacklog, kindTrust,
		kindProfile, kindIncident,
	}
}

// Keep keeps the evidence in events, to the same effect as one by one: it reads what is stored about all their nodes,
// and writes what has changed. The rows of nodes are locked before any evidence about them is written, as rounds of the
// judge do.
func Keep(ctx context.Context, tx pgx.Tx, records []events.Record, set Settings) error {
	set = set.defaulted()
	changes := make([]change, 0, len(records))
	var facts, profiles []string
	nodes := map[string]*Node{}
	for _, r := range records {
		c, err := read(r)
		if err != nil {
			return err
		}
		if c.nodeID != "" {
			changes = append(changes, c)
			if c.facts {
				facts = append(facts, c.nodeID)
			}
			if c.profile {
				profiles = append(profiles, c.nodeID)
			}
			nodes[c.nodeID] = &Node{}
		}
	}
	if len(changes) == 0 {
		return profilesChanged(ctx, tx, records)
	}
	if err := Lock(ctx, tx, nodes); err != nil {
		return err
	}
	if err := LoadFacts(ctx, tx, nodes, facts); err != nil {
		return err
	}
	if err := loadProfiles(ctx, tx, nodes, profiles); err != nil {
		return err
	}
	if err := compareClaims(ctx, tx, changes, nodes); err != nil {
		return err
	}
	for _, c := range changes {
		n := nodes[c.nodeID]
		if n == nil && c.identity { // it is new
			n = &Node{NodeRow: NodeRow{NodeID: c.nodeID}}
			nodes[c.nodeID] = n
		}
		if n != nil { // of a node without an identity nothing is judged
			n.settings = set
			c.apply(n)
		}
	}
	for _, n := range nodes {
		n.Due = n.news() || n.proofChanged() || n.profileNews
		n.mismatched(records[len(records)-1].CreatedAt)
	}
	if err := Save(ctx, tx, nodes); err != nil {
		return err
	}
	return profilesChanged(ctx, tx, records)
}

// change is what one event is evidence of.
type change struct {
	nodeID   string
	identity bool // it makes the node known
	facts    bool // it has facts of the host
	profile  bool // it has the profile of the node
	claim    *claim
	apply    func(*Node)
}

func read(r events.Record) (change, error) {
	switch r.Kind {
	case kindIdentity:
		i := &recoveryv1.NodeIdentity{}
		if err := r.Decode(i); err != nil {
			return change{}, err
		}
		return change{nodeID: i.GetNodeId(), identity: true, apply: func(n *Node) {
			n.identityChanged(i, r.AggregateVersion, r.CorrelationID)
		}}, nil
	case kindSession:
		s := &nodev1.SessionChanged{}
		if err := r.Decode(s); err != nil {
			return change{}, err
		}
		return change{nodeID: s.GetNodeId(), facts: reportsFacts(s), profile: s.GetProfile() != nil, apply: func(n *Node) {
			n.sessionChanged(s, r.AggregateVersion, r.CreatedAt, r.CorrelationID)
		}}, nil
	case kindGate:
		g := &lifecyclev1.NodeGate{}
		if err := r.Decode(g); err != nil {
			return change{}, err
		}
		return change{nodeID: g.GetNodeId(), apply: func(n *Node) {
			n.gateChanged(g, r.AggregateVersion, r.CreatedAt, r.CorrelationID)
		}}, nil
	case kindAttempt:
		a := &recoveryv1.EnrollmentAttempted{}
		if err := r.Decode(a); err != nil {
			return change{}, err
		}
		return change{nodeID: a.GetNodeId(), apply: func(n *Node) { n.attempted(a, r.CreatedAt, r.CorrelationID) }}, nil
	case kindRefused:
		refused := &lifecyclev1.TaskTypeRefused{}
		if err := r.Decode(refused); err != nil {
			return change{}, err
		}
		return change{nodeID: refused.GetRefusedByNodeId(), facts: true, apply: func(n *Node) {
			n.typeRefused(refused, r.CreatedAt, r.CorrelationID)
		}}, nil
	case kindRejected:
		return readRejected(r)
	case kindBacklog:
		return readBacklog(r)
	}
	return change{}, nil
}

// Lock locks the stored rows of nodes and reads what is stored about them. Nodes without a row are taken out.
func Lock(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	rows, err := pg.All[NodeRow](ctx, tx, lockNodes, IDsOf(nodes))
	if err != nil {
		return fmt.Errorf("lock nodes: %w", err)
	}
	clear(nodes)
	for _, r := range rows {
		nodes[r.NodeID] = &Node{NodeRow: r, Stored: r}
	}
	if len(nodes) == 0 {
		return nil
	}
	return LoadEvidence(ctx, tx, nodes)
}
