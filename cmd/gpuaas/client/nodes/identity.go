package nodes

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

func identityCommand(p *kit.Program, verb recoveryv1.IdentityVerb, short string) *cobra.Command {
	var reason string
	name, lost := names.Of(verb), nodeLostBy[verb]
	why := "two machines show its key"
	if verb == recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE {
		why = "the second machine is found and wiped"
	}
	example := "  gpuaas nodes " + name + " node-1 --reason '" + why + "'"
	if lost != "" {
		example += "\n" + example + " --yes"
	}
	cmd := &cobra.Command{
		Use: name + " NODE", Short: short, Example: example, Args: kit.Args("NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			node := args[0]
			if lost != "" {
				if err := s.Confirmed(ctx, losesNode(s, &node, verb)); err != nil {
					return err
				}
			}
			answer, err := s.Command.ChangeNodeIdentity(ctx,
				&readmodelv1.ChangeNodeIdentityRequest{Node: node, Verb: verb, Reason: reason})
			if err != nil {
				return err
			}
			id := answer.GetNode()
			return nodeAfter(ctx, s, answer.GetPos(),
				&readmodelv1.Node{NodeId: id.GetNodeId(), Name: id.GetName(), Identity: id},
				func(n *readmodelv1.Node) bool { return judgedSince(n, id) })
		}),
	}
	if lost != "" {
		kit.Asks(cmd)
	}
	kit.ReasonFlag(cmd, &reason, true)
	return cmd
}

// judgedSince reports whether what is shown of a node follows from a decision about its identity: recovery has judged
// it with the decision as evidence, and its session is closed unless the decision lets it have one. A node that was
// never judged has nothing to wait for.
func judgedSince(n *readmodelv1.Node, decided *recoveryv1.NodeIdentity) bool {
	if n.GetVerdict() == nil {
		return true
	}
	if n.GetConnected() && decided.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		return false
	}
	return slices.ContainsFunc(n.GetVerdict().GetEvidence(), func(e *recoveryv1.Evidence) bool {
		return e.GetSource() == commonv1.EvidenceSource_EVIDENCE_SOURCE_IDENTITY &&
			!e.GetObservedAt().AsTime().Before(decided.GetStateAt().AsTime())
	})
}

// nodeLostBy has the text about the loss for each decision about a node that must be confirmed.
var nodeLostBy = map[recoveryv1.IdentityVerb]string{
	recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE: "%s will be locked out: it gets no session and no work, and only the " +
		"security role lets it in again. What runs there goes on.",
	recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE: "The identity of %s will be ended for good: the machine can come " +
		"back only as a new node.",
}

// losesNode returns the question about a node, whose name is the node's, and puts the node's id in the reference. It
// shows the node's state and never refuses because of it: the view may be behind, and the owner decides.
func losesNode(s *kit.Session, ref *string, verb recoveryv1.IdentityVerb) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		answer, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: *ref})
		if err != nil {
			return kit.Question{}, err
		}
		n := answer.GetNode()
		*ref = n.GetNodeId()
		lost := nodeLostBy[verb]
		state := fmt.Sprintf("Its identity is %s and it is %sconnected, with %d of its %d slots in use, as last seen.",
			cmp.Or(human.Enum(n.GetIdentity().GetState()), "unknown"), human.OnlyIf(!n.GetConnected(), "not "),
			n.GetGate().GetSlotsUsed(),
			n.GetGate().GetSlots())
		return kit.Question{
				Name: cmp.Or(n.GetName(), n.GetNodeId()),
				Lost: []string{fmt.Sprintf(lost, cmp.Or(n.GetName(), n.GetNodeId())), state},
			},
			nil
	}
}
