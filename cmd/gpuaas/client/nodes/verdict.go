package nodes

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/shown"
)

// VerdictsView is how the times for which a node was not healthy are printed.
var VerdictsView = output.View[*recoveryv1.VerdictPeriod]{
	Name: func(p *recoveryv1.VerdictPeriod) string { return strconv.FormatInt(p.GetVersion(), 10) },
	Columns: []output.Column[*recoveryv1.VerdictPeriod]{
		{Title: "REASON", Path: "reason"},
		{Title: "SEVERITY", Drop: 5, Path: "severity", As: output.Upper},
		{Title: "OBSERVED", Drop: 3, Moves: true, Path: "observed_at"},
		{Title: "DETECTED", Moves: true, Path: "detected_at"},
		{Title: "AFTER", Drop: 4, Of: func(_ *output.Printer, p *recoveryv1.VerdictPeriod) string {
			return between(p.GetDetectedAt().AsTime(), p.GetObservedAt().AsTime())
		}},
		{Title: "ENDED", Drop: 2, Moves: true, Path: "ended_at"},
		{Title: "LASTED", Drop: 1, Of: func(_ *output.Printer, p *recoveryv1.VerdictPeriod) string {
			if p.GetEndedAt() == nil {
				return "it lasts"
			}
			return between(p.GetEndedAt().AsTime(), p.GetDetectedAt().AsTime())
		}},
		{Title: "VERSION", Path: "version", Wide: true},
		{Title: "CORRELATION", Path: "correlation_id", Wide: true},
	},
}

// between returns how long before end something began, as text.
func between(end, begin time.Time) string { return end.Sub(begin).Round(time.Millisecond).String() }

// verdictColumns returns the details of a node's verdict. Those of a healthy node are empty, except since when recovery
// has not judged.
func verdictColumns() []output.Column[*readmodelv1.Node] {
	return []output.Column[*readmodelv1.Node]{
		{Title: "verdict: reason", Path: "verdict.reason"},
		verdictColumn("family", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string {
			return human.Enum(v.GetUserState())
		}),
		verdictColumn("severity", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string {
			return strings.ToUpper(human.Enum(v.GetSeverity()))
		}),
		verdictColumn("owner", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string { return v.GetOwner() }),
		verdictColumn("since", func(pr *output.Printer, v *recoveryv1.NodeVerdict) string {
			return "observed " + pr.When(v.GetObservedAt()) + ", detected " + pr.When(v.GetDetectedAt())
		}),
		verdictColumn("budgets", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string {
			text := "detect within " + v.GetDetectWithin().AsDuration().String()
			if v.GetRecoverWithin() == nil {
				return text + ", a person decides on the recovery"
			}
			return text + ", recover within " + v.GetRecoverWithin().AsDuration().String()
		}),
		verdictColumn("next action", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string { return v.GetNextAction() }),
		verdictColumn("evidence", func(pr *output.Printer, v *recoveryv1.NodeVerdict) string {
			return strings.Join(kit.TextsOf(v.GetEvidence(), func(e *recoveryv1.Evidence) string {
				return strings.TrimSpace(human.Enum(e.GetSource()) + ", " + human.Enum(e.GetPart()) + ": " +
					cmp.Or(human.Enum(e.GetReason()), "well") + " " + pr.When(e.GetObservedAt()) + " " + e.GetDetail())
			}), "\n")
		}),
		verdictColumn("facts", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string {
			text, ok := runtimeDrift(v)
			// While a copy is looked for, they may be those of the other machine.
			ok = ok && v.GetUserState() != commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
			return human.OnlyIf(ok, "accept them with --seen "+shown.Fingerprint(text))
		}),
		verdictColumn("missing", func(_ *output.Printer, v *recoveryv1.NodeVerdict) string {
			return strings.Join(v.GetMissing(), "\n")
		}),
		{Title: "verdict: stale since", Path: "verdict_stale_since"},
	}
}

// runtimeDrift returns in what the runtime of a node differs from what was accepted, and whether it does.
func runtimeDrift(v *recoveryv1.NodeVerdict) (string, bool) {
	for _, e := range v.GetEvidence() {
		if e.GetReason() == commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT {
			return e.GetDetail(), true
		}
	}
	return "", false
}

// verdictColumn returns a detail of the verdict about a node of which something is wrong.
func verdictColumn(title string, text func(*output.Printer, *recoveryv1.NodeVerdict) string,
) output.Column[*readmodelv1.Node] {
	return output.Column[*readmodelv1.Node]{
		Title: "verdict: " + title, Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			v := n.GetVerdict()
			if v.GetReason() == commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
				return ""
			}
			return text(pr, v)
		},
	}
}

func verdictsCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	cmd := &cobra.Command{
		Use: "verdicts NODE", Short: "Show why and for how long a node was not healthy, the newest time first",
		Example: "  gpuaas nodes verdicts node-1\n  gpuaas nodes verdicts node-1 --limit 5 -o json", Args: kit.Args("NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			return kit.Show(ctx, s, page, kit.Source[*recoveryv1.VerdictPeriod]{
				View:  VerdictsView,
				Fetch: kit.Method(s.Query.ListNodeVerdicts, &readmodelv1.ListNodeVerdictsRequest{Node: args[0]}),
			})
		}),
	}
	page.Flags(cmd)
	return cmd
}
