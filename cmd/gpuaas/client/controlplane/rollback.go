package controlplane

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// RollbackView is how the rollback mode is printed.
var RollbackView = output.View[*recoveryv1.RollbackMode]{
	Name: rollbackState,
	Columns: []output.Column[*recoveryv1.RollbackMode]{
		{Title: "STATE", Of: func(_ *output.Printer, m *recoveryv1.RollbackMode) string { return rollbackState(m) }},
		{Title: "SET BY", Of: func(_ *output.Printer, m *recoveryv1.RollbackMode) string {
			switch {
			case m.GetReportedBy() == "":
				return ""
			case m.GetDeclared():
				return m.GetReportedBy() + ", with `gpuaas migrate restored`"
			}
			return m.GetReportedBy() + ", on evidence"
		}},
		{Title: "SINCE", Path: "since"},
		{Title: "REASON", Path: "reason"},
		{Title: "ERA", Path: "era"},
		{Title: "EVIDENCE", Of: func(_ *output.Printer, m *recoveryv1.RollbackMode) string {
			return human.OnlyIf(m.GetEvidenceTotal() > 0, fmt.Sprintf("%d, the newest %d are shown", m.GetEvidenceTotal(),
				len(m.GetEvidence())))
		}},
		{Title: "INCIDENT", Path: "incident_id"},
		{Title: "NEXT ACTION", Of: func(_ *output.Printer, m *recoveryv1.RollbackMode) string {
			return human.OnlyIf(m.GetActive(), "follow docs/restore.md, then `gpuaas rollback accept --reason TEXT`")
		}},
	},
	More: []output.Column[*recoveryv1.RollbackMode]{
		{Title: "ACCEPTED BY", Path: "accepted_by"},
		{Title: "ACCEPTED", Path: "accepted_at"},
		{Title: "ACCEPTED FOR", Path: "accept_reason"},
	},
}

// RollbackEvidenceColumns are the columns of the evidence of a rollback.
var RollbackEvidenceColumns = []output.Column[*recoveryv1.RollbackEvidence]{
	{Title: "EVIDENCE", Path: "kind"},
	{Title: "SUBJECT", Path: "subject"},
	{Title: "DETAIL", Text: true, Path: "detail"},
	{Title: "LAST SEEN", Drop: 1, Moves: true, Path: "last_seen_at"},
	{Title: "SEEN", Drop: 2, Path: "count", As: output.NonZero},
}

func rollbackState(m *recoveryv1.RollbackMode) string {
	if m.GetActive() {
		return "active"
	}
	return "none"
}

// RollbackCommand returns the commands about the rollback mode.
func RollbackCommand(p *kit.Program) *cobra.Command {
	status := &cobra.Command{
		Use: "status", Aliases: []string{"get"},
		Short:   "Show whether the database is known to be older than what others remember, and by what",
		Example: "  gpuaas rollback status\n  gpuaas rollback status -o json --jq '.evidence[].detail'", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
			if err != nil {
				return err
			}
			mode := answer.GetRollback()
			err = output.One(s.Printer, RollbackView, mode)
			return output.Under(s.Printer, err, RollbackEvidenceColumns, mode.GetEvidence())
		}),
	}
	req := &readmodelv1.AcceptRollbackRequest{}
	accept := &cobra.Command{
		Use: "accept", Short: "End rollback mode: launches, releases and remedies go on with what the database knows",
		Long: "accept ends rollback mode. From then on the database is believed: what it does not know may be released,\n" +
			"and what it knows and is not there is recreated. Look at `gpuaas rollback status`, at the open findings and at\n" +
			"the machines first (docs/restore.md). It cannot be taken back.",
		Example: "  gpuaas rollback accept --reason 'restored from the dump of 03:00; machines and fences compared'\n" +
			"  gpuaas rollback accept --reason 'restored from the dump of 03:00; machines and fences compared' --yes",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if err := s.Confirmed(ctx, losesRollback(s)); err != nil {
				return err
			}
			answer, err := s.Client.Rollback.AcceptRollback(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, RollbackView, answer.GetRollback(), output.With("pos", answer.GetPos()))
		}),
	}
	kit.Asks(accept)
	kit.ReasonFlag(accept, &req.Reason, true)
	const short = "Rollback mode: what stops launches and remedies when the database is older than what nodes remember"
	return kit.Group("rollback", short, nil, status, accept)
}

// losesRollback returns the question about accepting the rollback, and an error if rollback mode is not active.
func losesRollback(s *kit.Session) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		answer, err := s.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
		if err != nil {
			return kit.Question{}, err
		}
		if !answer.GetRollback().GetActive() {
			return kit.Question{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "rollback mode is not active",
				fault.Unmet("no rollback mode is there to accept"), fault.Remedy("nothing is to be done: the mesh is at work"))
		}
		return kit.Question{Name: "rollback", Lost: []string{
			"Rollback mode will end, and the database will be believed: what it does not know may be released,",
			"and what it knows and is not there is recreated. This cannot be taken back.",
		}}, nil
	}
}

// rollbackLines returns the first lines of the status while rollback mode is active.
func rollbackLines(components []*readmodelv1.ComponentStatus) [][2]string {
	reason := names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK)
	i := slices.IndexFunc(components, func(c *readmodelv1.ComponentStatus) bool {
		return !c.GetOk() &&
			c.GetReason() == reason
	})
	if i < 0 {
		return nil
	}
	return [][2]string{{"ROLLBACK MODE", "ACTIVE: " + components[i].GetDetail() + " (`gpuaas rollback status`)"}}
}
