package client

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var auditView = view[*readmodelv1.AuditRow]{
	name: func(a *readmodelv1.AuditRow) string { return number(a.GetNumber()) },
	columns: []column[*readmodelv1.AuditRow]{
		{title: "NUMBER", drop: 3, path: "number"},
		{title: "AT", moves: true, path: "entry.at"},
		{title: "ACTION", path: "entry.action"},
		{title: "OUTCOME", path: "entry.outcome"},
		{title: "ACTOR", path: "entry.actor"},
		{
			title: "SUBJECT", drop: 1, below: true, id: true,
			path: "entry.subject_type entry.subject_id workspace node_name subject_name", as: subject,
		},
		{title: "TIMES", drop: 4, path: "entry.count", as: nonzero},
		{title: "REASON", drop: 2, text: true, path: "entry.reason"},
		{title: "SOURCE", path: "source", wide: true},
		{title: "WORKSPACE", path: "workspace|entry.workspace_id", wide: true},
		{title: "NODE", path: "node_name|entry.node_id", wide: true},
		{title: "CORRELATION", path: "entry.correlation_id", wide: true},
		{title: "HASH", path: "hash", wide: true},
	},
}

func auditCommand(p *Program) *cobra.Command {
	return group("audit", "The audit log: who decided what", nil, auditList(p), auditVerify(p))
}

func auditList(p *Program) *cobra.Command {
	var page paging
	req := &readmodelv1.ListAuditRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List decisions, newest first; what repeats has its count",
		Example: "  gpuaas audit list --workspace acme/demo2\n  gpuaas audit list --action node. --limit 20 -o wide",
		Args:    args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*readmodelv1.AuditRow]{
				view: auditView,
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.AuditRow, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.client.Audit.ListAudit(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	cmd.Flags().StringVar(&req.Workspace, "workspace", "", "only those about this workspace")
	cmd.Flags().StringVar(&req.Node, "node", "", "only those about this node")
	cmd.Flags().StringVar(&req.Action, "action", "", "only actions that begin so: tenant.provisioning")
	_ = cmd.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	_ = cmd.RegisterFlagCompletionFunc("node", p.completeNodes)
	return cmd
}

func auditVerify(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "verify", Short: "Walk the hash chain and compare each row with its event; exit code 5 if one does not fit",
		Example: "  gpuaas audit verify", Args: args(),
		PreRun: p.patient,
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Audit.VerifyAudit(ctx, &readmodelv1.VerifyAuditRequest{})
			if err != nil {
				return err
			}
			if s.structured() {
				err = object(s.printer, answer)
			} else {
				rows := [][2]string{
					{"INTACT", yesNo(answer.GetIntact())},
					{"ROWS", number(answer.GetRows())},
					{"HEAD", answer.GetHeadHash()},
				}
				if from := answer.GetFrom(); from > 0 {
					rows = append(rows, [2]string{"BEGINS BEHIND", "signed checkpoint at row " + number(from)})
				}
				if signed := answer.GetSigned(); signed > 0 {
					rows = append(rows, [2]string{
						"SIGNED UP TO",
						"row " + number(signed) + " at " + spelledMoment(answer.GetSignedAt()),
					})
				}
				if n := answer.GetUnsigned(); n > 0 {
					rows = append(rows, [2]string{"NOT SIGNED", number(n) + ": " + answer.GetUnsignedBecause()})
				}
				if !answer.GetIntact() {
					rows = append(rows, [2]string{"BROKEN AT", number(answer.GetBrokenAt())},
						[2]string{"BECAUSE", answer.GetBrokenBecause()})
				}
				err = s.pairs(rows)
			}
			if err != nil || answer.GetIntact() {
				return err
			}
			return &exitError{
				code: ExitRefused, reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
				message: fmt.Sprintf("the audit log is broken at row %d: %s", answer.GetBrokenAt(), answer.GetBrokenBecause()),
				remedy:  "keep the database as it is, and compare the row and its event with a backup",
			}
		}),
	}
}
