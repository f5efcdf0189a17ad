package client

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

var nodeView = view[*readmodelv1.Node]{
	name: (*readmodelv1.Node).GetName,
	id:   "node_id",
	columns: []column[*readmodelv1.Node]{
		{title: "NAME", path: "name"},
		{title: "CONNECTED", drop: 3, path: "connected"},
		{title: "STATE", path: "user_state"},
		{title: "IDENTITY", drop: 4, path: "identity.state"},
		{title: "WORK", drop: 5, of: nodeWork},
		{title: "SLOTS", drop: 7, path: "gate.slots_used gate.slots", as: share},
		{title: "GPUS", drop: 6, path: "gate.gpus_used gate.gpus", as: share},
		{title: "HEARTBEAT", drop: 8, moves: true, path: "last_heartbeat_at"},
		{title: "REASON", drop: 1, path: "reason"},
		{title: "WORKSPACE", drop: 2, path: "workspace|workspace_id", id: true},
		{title: "ID", path: "node_id", wide: true},
		{title: "AGENT", path: "session.agent_version", wide: true},
		{title: "REPLICA", path: "replica_id", wide: true},
	},
	more: []column[*readmodelv1.Node]{
		{title: "NEXT ACTION", path: "next_action"},
		{title: "SINCE", path: "since"},
		{title: "identity: state", of: func(pr *printer, n *readmodelv1.Node) string { return identityText(pr, n.GetIdentity()) }},
		{title: "identity: certificate", of: func(pr *printer, n *readmodelv1.Node) string {
			id := n.GetIdentity()
			return onlyIf(id.GetCurrentSerial() != "",
				"serial "+id.GetCurrentSerial()+", expires "+pr.when(id.GetCertificateNotAfter()))
		}},
		{title: "identity: alarm", path: "identity.alarm"},
		{title: "session: state", of: func(pr *printer, n *readmodelv1.Node) string {
			session := n.GetSession()
			return onlyIf(session != nil, strings.TrimSpace(fmt.Sprintf("%s (generation %d) %s", enumText(session.GetState()),
				session.GetGeneration(), onlyIf(session.GetLate(), "late"))))
		}},
		{title: "session: peer", of: func(pr *printer, n *readmodelv1.Node) string {
			session := n.GetSession()
			return onlyIf(session.GetRemoteAddress() != "",
				session.GetRemoteAddress()+", opened "+pr.when(session.GetOpenedAt()))
		}},
		{title: "session: closed", of: func(pr *printer, n *readmodelv1.Node) string {
			session := n.GetSession()
			return onlyIf(session.GetClosedAt() != nil,
				strings.TrimSpace(pr.when(session.GetClosedAt())+" "+enumText(session.GetCloseReason())+" "+
					session.GetCloseDetail()))
		}},
		{title: "gate: cordon", of: func(_ *printer, n *readmodelv1.Node) string {
			gate := n.GetGate()
			return onlyIf(gate.GetCordoned(), gate.GetCordonReason()+" (by "+gate.GetCordonedBy()+")")
		}},
		{title: "gate: epochs", of: func(_ *printer, n *readmodelv1.Node) string {
			gate := n.GetGate()
			return onlyIf(gate != nil, fmt.Sprintf("fence %d, session %d", gate.GetFenceEpoch(), gate.GetSessionEpoch()))
		}},
		{title: "gate: workspace", path: "gate.workspace_id"},
		{title: "host", of: hostText},
		{title: "host: diagnostics", of: func(pr *printer, n *readmodelv1.Node) string {
			lines := make([]string, 0, len(n.GetSession().GetDiagnostics()))
			for _, d := range n.GetSession().GetDiagnostics() {
				over := onlyIf(d.GetEndedAt() != nil, " (over since "+pr.when(d.GetEndedAt())+")")
				lines = append(lines, fmt.Sprintf("%s x%d %s %s%s", enumText(d.GetCode()), d.GetCount(), pr.when(d.GetObservedAt()),
					d.GetDetail(), over))
			}
			return strings.Join(lines, "\n")
		}},
	},
}

// nodeWork returns a text for whether the node may get work.
func nodeWork(_ *printer, n *readmodelv1.Node) string {
	switch gate := n.GetGate(); {
	case gate == nil:
		return ""
	case gate.GetCordoned():
		return "cordoned"
	case gate.GetAdmitted():
		return "admitted"
	}
	return "shut"
}

func identityText(pr *printer, id *recoveryv1.NodeIdentity) string {
	if id == nil {
		return ""
	}
	text := enumText(id.GetState()) + onlyIf(id.GetFencing(), ", fence not yet acknowledged")
	if id.GetStateReason() != "" {
		text += ": " + id.GetStateReason()
	}
	if id.GetStateBy() != "" {
		text += " (by " + id.GetStateBy() + " " + pr.when(id.GetStateAt()) + ")"
	}
	return text
}

func hostText(_ *printer, n *readmodelv1.Node) string {
	host := n.GetSession().GetHost()
	if host == nil {
		host = n.GetGate().GetHost()
	}
	if host == nil {
		return ""
	}
	simulated := 0
	for _, g := range host.GetGpus() {
		if g.GetSimulated() {
			simulated++
		}
	}
	text := fmt.Sprintf("%s, %s %s, %d CPUs, %s memory, %d GPUs", host.GetHostname(), host.GetOs(), host.GetKernel(),
		host.GetCpus(), bytesText(host.GetMemoryBytes()), len(host.GetGpus()))
	return text + onlyIf(simulated > 0, fmt.Sprintf(" (%d simulated)", simulated))
}

func nodesCommand(p *Program) *cobra.Command {
	return group("nodes", "The fleet: machines, and instances of workspaces", []string{"node"},
		nodesList(p), nodesGet(p), nodesWatch(p), nodesEnroll(p),
		nodesIdentity(p, recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD,
			"Close the node's session and give it no work until it is reactivated"),
		nodesIdentity(p, recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE, "Set a suspicious node aside"),
		nodesIdentity(p, recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
			"Lock an identity out; only the security role lets it in again"),
		nodesIdentity(p, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, "Let a held, quarantined or fenced node in again"),
		nodesIdentity(p, recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE, "End an identity for good"),
		nodesCordon(p, true), nodesCordon(p, false), nodesProbe(p),
	)
}

func nodesList(p *Program) *cobra.Command {
	var page paging
	req := &readmodelv1.ListNodesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the fleet",
		Example: "  gpuaas nodes list --connected\n  gpuaas nodes list -o json --jq '.items[].name'", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*readmodelv1.Node]{
				view: nodeView, topic: readmodelv1.Topic_TOPIC_NODES, changed: (*readmodelv1.WatchItem).GetNode,
				keep: func(n *readmodelv1.Node) bool {
					retired := n.GetIdentity().GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
					return (n.GetConnected() || !req.GetConnectedOnly()) && (req.GetName() == "" || n.GetName() == req.GetName()) &&
						(!retired || req.GetIncludeRetired())
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.Node, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.query.ListNodes(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	cmd.Flags().BoolVar(&req.ConnectedOnly, "connected", false, "only connected nodes")
	cmd.Flags().BoolVar(&req.IncludeRetired, "retired", false, "retired nodes too")
	cmd.Flags().StringVar(&req.Name, "name", "", "only the nodes of this name")
	return cmd
}

func nodesGet(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "get NODE", Aliases: []string{"describe"}, Short: "Show one node: identity, session and gate apart",
		Example: "  gpuaas nodes get node-1", Args: args("NODE"),
		ValidArgsFunction: onlyFirst(p.completeNodes),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0]})
			if err != nil {
				return err
			}
			return one(s.printer, nodeView, answer.GetNode())
		}),
	}
}

func nodesWatch(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "watch [NODE]", Short: "Print every change of a node, or of the fleet, until Ctrl-C",
		Example: "  gpuaas nodes watch node-1\n  gpuaas nodes watch -o jsonl", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: onlyFirst(p.completeNodes),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req := &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES}}
			if len(args) == 1 {
				answer, err := s.query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0]})
				if err != nil {
					return err
				}
				req.Node = answer.GetNode().GetNodeId()
			}
			return s.printChanges(ctx, req, func(item *readmodelv1.WatchItem) (string, []string) {
				n := item.GetNode()
				return cmp.Or(n.GetName(), item.GetId()),
					[]string{
						"connected=" + yesNo(n.GetConnected()), enumText(n.GetUserState()), enumText(n.GetIdentity().GetState()),
						n.GetReason(),
					}
			})
		}),
	}
}

func nodesCordon(p *Program, cordoned bool) *cobra.Command {
	var reason string
	name, short := "cordon", "Place nothing new on a node; what runs there stays"
	if !cordoned {
		name, short = "uncordon", "Place workspaces on a node again"
	}
	cmd := &cobra.Command{
		Use: name + " NODE", Short: short, Example: "  gpuaas nodes " + name + " node-1 --reason 'disk swap'",
		Args:              args("NODE"),
		ValidArgsFunction: onlyFirst(p.completeNodes),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.command.SetCordon(ctx,
				&readmodelv1.SetCordonRequest{Node: args[0], Cordoned: cordoned, Reason: reason})
			if err != nil {
				return err
			}
			gate := answer.GetGate()
			return nodeAfter(ctx, s, answer.GetPos(),
				&readmodelv1.Node{NodeId: gate.GetNodeId(), Name: gate.GetName(), Gate: gate})
		}),
	}
	reasonFlag(cmd, &reason, true)
	return cmd
}

// nodeAfter prints a node as it is after a command. The command has taken effect even if the read fails: if the
// projection does not reach its position in time, the owner's answer is printed.
func nodeAfter(ctx context.Context, s *session, pos string, answered *readmodelv1.Node) error {
	answer, err := s.query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: answered.GetNodeId(), MinPos: pos})
	if err != nil {
		note(s.err, "done; the view of it is behind (%s), so only the owner's answer is shown", names.Of(fault.ReasonOf(err)))
		return one(s.printer, nodeView, answered)
	}
	return one(s.printer, nodeView, answer.GetNode())
}
