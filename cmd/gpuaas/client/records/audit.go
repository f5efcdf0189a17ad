package records

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// AuditView is how entries of the audit log are printed.
var AuditView = output.View[*readmodelv1.AuditRow]{
	Name: func(a *readmodelv1.AuditRow) string {
		if a.GetNumber() == 0 { // people of a tenant get no numbers
			return a.GetEventId()
		}
		return human.Number(a.GetNumber())
	},
	Columns: []output.Column[*readmodelv1.AuditRow]{
		{Title: "NUMBER", Drop: 3, Path: "number", As: output.NonZero},
		{Title: "AT", Moves: true, Path: "entry.at"},
		{Title: "ACTION", Path: "entry.action"},
		{Title: "OUTCOME", Path: "entry.outcome"},
		{Title: "ACTOR", Path: "entry.actor"},
		{
			Title: "SUBJECT", Drop: 1, Below: true, ID: true,
			Path: "entry.subject_type entry.subject_id workspace node_name subject_name", As: output.Subject,
		},
		{Title: "TIMES", Drop: 4, Path: "entry.count", As: output.NonZero},
		{Title: "REASON", Drop: 2, Text: true, Path: "entry.reason"},
		{Title: "SOURCE", Path: "source", Wide: true},
		{Title: "WORKSPACE", Path: "workspace|entry.workspace_id", Wide: true},
		{Title: "NODE", Path: "node_name|entry.node_id", Wide: true},
		{Title: "CORRELATION", Path: "entry.correlation_id", Wide: true},
		{Title: "HASH", Path: "hash", Wide: true},
	},
}

// AuditCommand returns the commands about the audit log.
func AuditCommand(p *kit.Program) *cobra.Command {
	return kit.Group("audit", "The audit log: who decided what", nil, auditList(p), auditVerify(p))
}

func auditList(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListAuditRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List decisions, newest first; what repeats has its count",
		Example: "  gpuaas audit list --workspace acme/demo2\n  gpuaas audit list --action node. --limit 20 -o wide",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.AuditRow]{
				View:  AuditView,
				Fetch: kit.Method(s.Client.Audit.ListAudit, req),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&req.Workspace, "workspace", "", "only those about this workspace")
	cmd.Flags().StringVar(&req.Node, "node", "", "only those about this node")
	cmd.Flags().StringVar(&req.Action, "action", "", "only actions that begin so: tenant.provisioning")
	_ = cmd.RegisterFlagCompletionFunc("workspace", p.CompleteWorkspaces)
	_ = cmd.RegisterFlagCompletionFunc("node", p.CompleteNodes)
	return cmd
}

func auditVerify(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "verify", Short: "Walk the hash chain and compare each row with its event; exit code 5 if one does not fit",
		Example: "  gpuaas audit verify", Args: kit.Args(),
		PreRun: p.Patient,
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Audit.VerifyAudit(ctx, &readmodelv1.VerifyAuditRequest{})
			if err != nil {
				return err
			}
			if s.Structured() {
				err = output.Object(s.Printer, answer)
			} else {
				rows := [][2]string{
					{"INTACT", human.YesNo(answer.GetIntact())},
					{"ROWS", human.Number(answer.GetRows())},
					{"HEAD", answer.GetHeadHash()},
				}
				if from := answer.GetFrom(); from > 0 {
					rows = append(rows, [2]string{"BEGINS BEHIND", "signed checkpoint at row " + human.Number(from)})
				}
				if signed := answer.GetSigned(); signed > 0 {
					rows = append(rows, [2]string{
						"SIGNED UP TO",
						"row " + human.Number(signed) + " at " + human.Moment(answer.GetSignedAt()),
					})
				}
				if n := answer.GetUnsigned(); n > 0 {
					rows = append(rows, [2]string{"NOT SIGNED", human.Number(n) + ": " + answer.GetUnsignedBecause()})
				}
				if !answer.GetIntact() {
					rows = append(rows, [2]string{"BROKEN AT", human.Number(answer.GetBrokenAt())},
						[2]string{"BECAUSE", answer.GetBrokenBecause()})
				}
				err = s.Pairs(rows)
			}
			if err != nil || answer.GetIntact() {
				return err
			}
			return &exit.Error{
				Code: exit.CodeRefused, Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
				Message: fmt.Sprintf("the audit log is broken at row %d: %s", answer.GetBrokenAt(), answer.GetBrokenBecause()),
				Remedy:  "keep the database as it is, and compare the row and its event with a backup",
			}
		}),
	}
}
