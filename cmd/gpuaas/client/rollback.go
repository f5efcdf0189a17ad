package client

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

var rollbackView = view[*recoveryv1.RollbackMode]{
	name: rollbackState,
	columns: []column[*recoveryv1.RollbackMode]{
		{title: "STATE", of: func(_ *printer, m *recoveryv1.RollbackMode) string { return rollbackState(m) }},
		{title: "SET BY", of: func(_ *printer, m *recoveryv1.RollbackMode) string {
			switch {
			case m.GetReportedBy() == "":
				return ""
			case m.GetDeclared():
				return m.GetReportedBy() + ", with `gpuaas migrate restored`"
			}
			return m.GetReportedBy() + ", on evidence"
		}},
		{title: "SINCE", path: "since"},
		{title: "REASON", path: "reason"},
		{title: "ERA", path: "era"},
		{title: "EVIDENCE", of: func(_ *printer, m *recoveryv1.RollbackMode) string {
			return onlyIf(m.GetEvidenceTotal() > 0, fmt.Sprintf("%d, the newest %d are shown", m.GetEvidenceTotal(),
				len(m.GetEvidence())))
		}},
		{title: "INCIDENT", path: "incident_id"},
		{title: "NEXT ACTION", of: func(_ *printer, m *recoveryv1.RollbackMode) string {
			return onlyIf(m.GetActive(), "follow docs/restore.md, then `gpuaas rollback accept --reason TEXT`")
		}},
	},
	more: []column[*recoveryv1.RollbackMode]{
		{title: "ACCEPTED BY", path: "accepted_by"},
		{title: "ACCEPTED", path: "accepted_at"},
		{title: "ACCEPTED FOR", path: "accept_reason"},
	},
}

var rollbackEvidenceColumns = []column[*recoveryv1.RollbackEvidence]{
	{title: "EVIDENCE", path: "kind"},
	{title: "SUBJECT", path: "subject"},
	{title: "DETAIL", text: true, path: "detail"},
	{title: "LAST SEEN", drop: 1, moves: true, path: "last_seen_at"},
	{title: "SEEN", drop: 2, path: "count", as: nonzero},
}

func rollbackState(m *recoveryv1.RollbackMode) string {
	if m.GetActive() {
		return "active"
	}
	return "none"
}

func rollbackCommand(p *Program) *cobra.Command {
	status := &cobra.Command{
		Use: "status", Aliases: []string{"get"},
		Short:   "Show whether the database is known to be older than what others remember, and by what",
		Example: "  gpuaas rollback status\n  gpuaas rollback status -o json --jq '.evidence[].detail'", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
			if err != nil {
				return err
			}
			mode := answer.GetRollback()
			if err := one(s.printer, rollbackView, mode); err != nil || s.structured() || s.format == formatName ||
				len(mode.GetEvidence()) == 0 {
				return err
			}
			return under(s.printer, rollbackEvidenceColumns, mode.GetEvidence())
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
		Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			if err := s.confirmed(ctx, losesRollback(s)); err != nil {
				return err
			}
			answer, err := s.client.Rollback.AcceptRollback(ctx, req)
			if err != nil {
				return err
			}
			return one(s.printer, rollbackView, answer.GetRollback(), with("pos", answer.GetPos()))
		}),
	}
	asks(accept)
	reasonFlag(accept, &req.Reason, true)
	const short = "Rollback mode: what stops launches and remedies when the database is older than what nodes remember"
	return group("rollback", short, nil, status, accept)
}

// losesRollback returns the question about accepting the rollback, and an error if rollback mode is not active.
func losesRollback(s *session) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		answer, err := s.client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
		if err != nil {
			return question{}, err
		}
		if !answer.GetRollback().GetActive() {
			return question{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "rollback mode is not active",
				fault.Unmet("no rollback mode is there to accept"), fault.Remedy("nothing is to be done: the mesh is at work"))
		}
		return question{name: "rollback", lost: []string{
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
