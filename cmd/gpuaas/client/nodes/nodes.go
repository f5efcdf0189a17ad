package nodes

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// View is how nodes are printed.
var View = output.View[*readmodelv1.Node]{
	Name: (*readmodelv1.Node).GetName,
	ID:   "node_id",
	Columns: []output.Column[*readmodelv1.Node]{
		{Title: "NAME", Path: "name"},
		{Title: "CONNECTED", Drop: 3, Path: "connected"},
		{Title: "STATE", Path: "user_state"},
		{Title: "IDENTITY", Drop: 4, Path: "identity.state"},
		{Title: "WORK", Drop: 5, Of: nodeWork},
		{Title: "SLOTS", Drop: 7, Path: "gate.slots_used gate.slots", As: output.Share},
		{Title: "GPUS", Drop: 6, Path: "gate.gpus_used gate.gpus", As: output.Share},
		{Title: "HEARTBEAT", Drop: 8, Moves: true, Path: "last_heartbeat_at"},
		{Title: "REASON", Drop: 1, Path: "reason"},
		{Title: "WORKSPACE", Drop: 2, Path: "workspace|workspace_id", ID: true},
		{Title: "ID", Path: "node_id", Wide: true},
		{Title: "AGENT", Path: "session.agent_version", Wide: true},
		{Title: "REPLICA", Path: "replica_id", Wide: true},
	},
	More: slices.Concat([]output.Column[*readmodelv1.Node]{
		{Title: "NEXT ACTION", Path: "next_action"},
		{Title: "SINCE", Path: "since"},
		{Title: "control plane", Of: meshReasonText},
	}, verdictColumns(), healthColumns(), []output.Column[*readmodelv1.Node]{
		{Title: "identity: state", Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			return identityText(pr, n.GetIdentity())
		}},
		{Title: "identity: certificate", Of: serialText},
		{Title: "identity: alarm", Path: "identity.alarm"},
		{Title: "session: state", Of: func(_ *output.Printer, n *readmodelv1.Node) string {
			return sessionText(n)
		}},
		{Title: "session: peer", Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			session := n.GetSession()
			return human.OnlyIf(session.GetRemoteAddress() != "",
				session.GetRemoteAddress()+", opened "+pr.When(session.GetOpenedAt()))
		}},
		{Title: "session: closed", Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			session := n.GetSession()
			return human.OnlyIf(session.GetClosedAt() != nil,
				strings.Join(strings.Fields(pr.When(session.GetClosedAt())+" "+human.Enum(session.GetCloseReason())+" "+
					session.GetCloseDetail()), " "))
		}},
		{Title: "gate: cordon", Of: func(_ *output.Printer, n *readmodelv1.Node) string {
			gate := n.GetGate()
			return human.OnlyIf(gate.GetCordoned(), gate.GetCordonReason()+" (by "+gate.GetCordonedBy()+")")
		}},
		{Title: "gate: cordon waits", Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			gate := n.GetGate()
			return human.OnlyIf(gate.GetWaitingCordon() != "", gate.GetWaitingCordon()+", "+
				pr.When(gate.GetWaitingCordonSince())+"; withheld by brake.fleet_fraction")
		}},
		{Title: "gate: epochs", Of: func(_ *output.Printer, n *readmodelv1.Node) string {
			gate := n.GetGate()
			return human.OnlyIf(gate != nil, fmt.Sprintf("fence %d, session %d", gate.GetFenceEpoch(), gate.GetSessionEpoch()))
		}},
		{Title: "gate: workspace", Path: "gate.workspace_id"},
		{Title: "recovery", Of: recoveryText},
		{Title: "host", Of: hostText},
		{Title: "host: diagnostics", Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			return strings.Join(kit.TextsOf(n.GetSession().GetDiagnostics(), func(d *commonv1.Diagnostic) string {
				over := human.OnlyIf(d.GetEndedAt() != nil, " (over since "+pr.When(d.GetEndedAt())+")")
				return fmt.Sprintf("%s x%d %s %s%s", human.Enum(d.GetCode()), d.GetCount(), pr.When(d.GetObservedAt()),
					d.GetDetail(), over)
			}), "\n")
		}},
	}),
}

// meshReasonText returns why the control plane is not well, of a node that is still connected.
func meshReasonText(_ *output.Printer, n *readmodelv1.Node) string {
	reason := n.GetControlPlaneReason()
	return human.OnlyIf(reason != "", reason+", which is no reason of this node (`gpuaas status`)")
}

// nodeWork returns a text for whether the node may get work.
func nodeWork(_ *output.Printer, n *readmodelv1.Node) string {
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

func identityText(pr *output.Printer, id *recoveryv1.NodeIdentity) string {
	if id == nil {
		return ""
	}
	text := human.Enum(id.GetState()) + human.OnlyIf(id.GetFencing(), ", fence not yet acknowledged")
	if id.GetStateReason() != "" {
		text += ": " + id.GetStateReason()
	}
	if id.GetStateBy() != "" {
		text += " (by " + id.GetStateBy() + " " + pr.When(id.GetStateAt()) + ")"
	}
	return text
}

func hostText(_ *output.Printer, n *readmodelv1.Node) string {
	host := cmp.Or(n.GetSession().GetHost(), n.GetGate().GetHost())
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
		host.GetCpus(), human.Bytes(host.GetMemoryBytes()), len(host.GetGpus()))
	return text + human.OnlyIf(simulated > 0, fmt.Sprintf(" (%d simulated)", simulated))
}

// recoveryText returns what the agent reported of its automatic recovery; empty if it never attempted one.
func recoveryText(pr *output.Printer, n *readmodelv1.Node) string {
	r := n.GetSession().GetRecovery()
	if r.GetAttempts()+r.GetSuppressed() == 0 {
		return ""
	}
	text := fmt.Sprintf("%s, %d succeeded, %d failed, %d suppressed", human.Counted(r.GetAttempts(), "attempt"),
		r.GetSuccesses(), r.GetFailures(), r.GetSuppressed())
	return text + human.OnlyIf(r.GetLastAttemptAt() != nil,
		"; the last "+pr.When(r.GetLastAttemptAt())+": "+r.GetLastOutcome())
}

// Command returns the commands about nodes.
func Command(p *kit.Program) *cobra.Command {
	return kit.Group("nodes", "The fleet: machines, and instances of workspaces", []string{"node"},
		listCommand(p), getCommand(p), verdictsCommand(p), actionsCommand(p), watchCommand(p), enrollCommand(p),
		identityCommand(p, recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD,
			"Close the node's session and give it no work until it is reactivated"),
		identityCommand(p, recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE, "Set a suspicious node aside"),
		identityCommand(p, recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
			"Lock an identity out; only the security role may, and lets it in again"),
		identityCommand(p, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
			"Let a held, quarantined or fenced node in again; one that was copied needs a bundle then"),
		identityCommand(p, recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE, "End an identity for good"),
		cordonCommand(p, true), cordonCommand(p, false), acceptFactsCommand(p), probeCommand(p), diagCommand(p),
		bundleCommand(p),
	)
}

func listCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListNodesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the fleet",
		Example: "  gpuaas nodes list --connected\n  gpuaas nodes list -o json --jq '.items[].name'", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.Node]{
				View: View, Topic: readmodelv1.Topic_TOPIC_NODES, Changed: (*readmodelv1.WatchItem).GetNode,
				Keep: func(n *readmodelv1.Node) bool {
					retired := n.GetIdentity().GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
					return (n.GetConnected() || !req.GetConnectedOnly()) && (req.GetName() == "" || n.GetName() == req.GetName()) &&
						(!retired || req.GetIncludeRetired())
				},
				Fetch: kit.Method(s.Query.ListNodes, req),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().BoolVar(&req.ConnectedOnly, "connected", false, "only connected nodes")
	cmd.Flags().BoolVar(&req.IncludeRetired, "retired", false, "retired nodes too")
	cmd.Flags().StringVar(&req.Name, "name", "", "only the nodes of this name")
	return cmd
}

func getCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "get NODE", Aliases: []string{"describe"},
		Short:   "Show one node: verdict, what proves it healthy, identity, session and gate",
		Example: "  gpuaas nodes get node-1", Args: kit.Args("NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0], Health: true})
			if err != nil {
				return err
			}
			return output.One(s.Printer, withActions(ctx, s, answer.GetNode()), answer.GetNode())
		}),
	}
}

func watchCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "watch [NODE]", Short: "Print every change of a node, or of the fleet, until Ctrl-C",
		Example: "  gpuaas nodes watch node-1\n  gpuaas nodes watch -o jsonl", Args: kit.ArgsFrom(0, "NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req := &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES}}
			if len(args) == 1 {
				answer, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0]})
				if err != nil {
					return err
				}
				req.Node = answer.GetNode().GetNodeId()
			}
			return s.PrintChanges(ctx, req, func(item *readmodelv1.WatchItem) (string, []string) {
				n := item.GetNode()
				return cmp.Or(n.GetName(), item.GetId()),
					[]string{
						"connected=" + human.YesNo(n.GetConnected()), human.Enum(n.GetUserState()),
						human.Enum(n.GetIdentity().GetState()),
						n.GetReason(),
					}
			})
		}),
	}
}

func cordonCommand(p *kit.Program, cordoned bool) *cobra.Command {
	var reason string
	name, short := "cordon", "Place nothing new on a node; what runs there stays"
	if !cordoned {
		name, short = "uncordon", "Place workspaces on a node again"
	}
	cmd := &cobra.Command{
		Use: name + " NODE", Short: short, Example: "  gpuaas nodes " + name + " node-1 --reason 'disk swap'",
		Args:              kit.Args("NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Command.SetCordon(ctx,
				&readmodelv1.SetCordonRequest{Node: args[0], Cordoned: cordoned, Reason: reason})
			if err != nil {
				return err
			}
			gate := answer.GetGate()
			return nodeAfter(ctx, s, answer.GetPos(),
				&readmodelv1.Node{NodeId: gate.GetNodeId(), Name: gate.GetName(), Gate: gate}, nil)
		}),
	}
	kit.ReasonFlag(cmd, &reason, true)
	return cmd
}

const (
	// followsWithin is how long a command about a node waits until what is shown follows from it, and followsEvery the
	// first pause between its looks, which doubles.
	followsWithin = 2 * time.Second
	followsEvery  = 50 * time.Millisecond
)

// nodeAfter prints a node as it is after a command, once follows holds of it; nil: at once. The command has taken
// effect even if the read fails: if the projection does not reach its position in time, the owner's answer is printed.
// If follows does not hold within followsWithin, the node is printed as it is then, with a note.
func nodeAfter(ctx context.Context, s *kit.Session, pos string, answered *readmodelv1.Node,
	follows func(*readmodelv1.Node) bool,
) error {
	wait, stop := context.WithTimeout(ctx, followsWithin)
	defer stop()
	for pause := followsEvery; ; pause *= 2 {
		answer, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: answered.GetNodeId(), MinPos: pos})
		if err != nil {
			human.Note(s.Err, "done; the view of it is behind (%s), so only the owner's answer is shown",
				names.Of(fault.ReasonOf(err)))
			return output.One(s.Printer, View, answered)
		}
		n := answer.GetNode()
		if follows == nil || follows(n) {
			return output.One(s.Printer, View, n)
		}
		if !app.Sleep(wait, pause) {
			human.Note(s.Err, "done; what is shown of its state and its reason is from before: `gpuaas nodes get %s` shows "+
				"what follows", n.GetName())
			return output.One(s.Printer, View, n)
		}
	}
}
