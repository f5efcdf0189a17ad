package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// ActionView is how recovery actions are printed.
var ActionView = output.View[*recoveryv1.RecoveryAction]{
	Name: (*recoveryv1.RecoveryAction).GetActionId,
	Columns: []output.Column[*recoveryv1.RecoveryAction]{
		{Title: "ACTION", ID: true, Path: "action_id"},
		{Title: "NODE", Drop: 6, Of: func(_ *output.Printer, a *recoveryv1.RecoveryAction) string {
			return cmp.Or(a.GetNodeName(), a.GetNodeId(), "control plane")
		}},
		{Title: "KIND", Of: func(_ *output.Printer, a *recoveryv1.RecoveryAction) string {
			return actionKind(a)
		}},
		{Title: "STATE", Of: func(_ *output.Printer, a *recoveryv1.RecoveryAction) string {
			return human.Enum(a.GetState())
		}},
		{Title: "REASON", Drop: 4, Path: "reason"},
		{Title: "REJECTED", Drop: 3, Moves: true, Path: "first_rejected_at"},
		{Title: "BEGUN", Moves: true, Path: "begun_at"},
		{Title: "EFFECT AFTER", Drop: 5, Of: func(_ *output.Printer, a *recoveryv1.RecoveryAction) string {
			return since(a, a.GetEffectAt())
		}},
		{Title: "ENDED AFTER", Drop: 2, Of: func(_ *output.Printer, a *recoveryv1.RecoveryAction) string {
			return since(a, a.GetEndedAt())
		}},
		{Title: "OUTCOME", Drop: 1, Text: true, Path: "outcome"},
		{Title: "ATTEMPTS", Path: "attempts", Wide: true},
		{Title: "BY", Path: "requester", Wide: true},
		{Title: "FAILS AT", Path: "fails_at", Wide: true},
		{Title: "CORRELATION", Path: "correlation_id", Wide: true},
		{Title: "OF THE AGENT", Path: "agent_correlation_id", Wide: true},
	},
}

// actionKind returns the kind of an action, or what a newer build has stored where this one does not know it.
func actionKind(a *recoveryv1.RecoveryAction) string {
	if a.GetUnknown() != "" {
		return a.GetUnknown() + ofNewer
	}
	return human.Enum(a.GetKind())
}

// since returns how long after the first rejection, or where nothing was refused after its begin, an action came to a
// point; empty if it has not.
func since(a *recoveryv1.RecoveryAction, at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	from := a.GetFirstRejectedAt()
	if from == nil {
		from = a.GetBegunAt()
	}
	return at.AsTime().Sub(from.AsTime()).Round(time.Millisecond).String()
}

func actionsCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	var state string
	cmd := &cobra.Command{
		Use: "actions [NODE]", Short: "List recovery actions, the newest first: what was done to have nodes healthy again",
		Long: "List recovery actions of a node, or of all nodes and the control plane. Each is one recovery from the\n" +
			"first rejection to the healthy verdict, under one correlation id, which its events have too. It is open,\n" +
			"succeeded, failed (it did not come to its end in its time) or superseded (a person's decision or another\n" +
			"action took its place). EFFECT AFTER and ENDED AFTER are counted from the first rejection, or where nothing was\n" +
			"refused from its begin.",
		Example: "  gpuaas nodes actions node-1\n  gpuaas nodes actions --state open\n" +
			"  gpuaas nodes actions node-1 -o json --jq '.items[].correlation_id'",
		Args: kit.ArgsFrom(0, "NODE"), ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req := &readmodelv1.ListActionsRequest{}
			var err error
			if state != "" {
				if req.State, err = names.Parse[recoveryv1.RecoveryActionState](state); err != nil || req.GetState() == 0 {
					return exit.Usage(errors.New("nodes actions: --state is one of " +
						strings.Join(names.Spellings[recoveryv1.RecoveryActionState](), ", ")))
				}
			}
			if len(args) == 1 {
				if req.NodeId, err = s.Find(ctx, kit.KindNode, args[0]); err != nil {
					return err
				}
			}
			return kit.Show(ctx, s, page, kit.Source[*recoveryv1.RecoveryAction]{
				View: ActionView, Fetch: kit.Method(s.Client.Actions.ListActions, req),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&state, "state", "", "only those that are open, succeeded, failed or superseded")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(
		names.Spellings[recoveryv1.RecoveryActionState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// withActions returns the view of a node that has its open recovery actions too, for people. They are left out if they
// cannot be read.
func withActions(ctx context.Context, s *kit.Session, n *readmodelv1.Node) output.View[*readmodelv1.Node] {
	v := View
	if s.Format != output.FormatTable && s.Format != output.FormatWide {
		return v
	}
	answer, err := s.Client.Actions.ListActions(ctx, &readmodelv1.ListActionsRequest{
		NodeId: n.GetNodeId(), State: recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_OPEN,
	})
	if err != nil || len(answer.GetItems()) == 0 {
		return v
	}
	v.More = append(slices.Clone(v.More), output.Column[*readmodelv1.Node]{
		Title: "recovery: open", Of: func(pr *output.Printer, _ *readmodelv1.Node) string {
			return strings.Join(kit.TextsOf(answer.GetItems(), func(a *recoveryv1.RecoveryAction) string {
				text := fmt.Sprintf("%s since %s, %s, fails %s", actionKind(a), pr.When(a.GetBegunAt()),
					human.Counted(a.GetAttempts(), "attempt"), pr.When(a.GetFailsAt()))
				return text + human.OnlyIf(a.GetOutcome() != "", ": "+a.GetOutcome()) +
					" (correlation " + a.GetCorrelationId() + ")"
			}), "\n")
		},
	})
	return v
}
