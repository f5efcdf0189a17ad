package client

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/spf13/cobra"
)

func workspacesCommand(p *Program) *cobra.Command {
	return group("workspaces", "Workspaces of tenants", []string{"workspace", "ws"},
		workspacesCreate(p), workspacesList(p), workspacesGet(p), workspacesWatch(p), workspacesWait(p),
		workspacesTimeline(p), workspacesLogs(p), workspacesActions(p), workspacesRecoveries(p),
		workspacesEscalate(p),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_CANCEL, "End the open operation and undo what it did"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RESET, "Make a failed workspace ready for another try"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RETRY, "Provision a failed workspace again"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO, "Try the undo of a stuck workspace again"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO,
			"Give up an undo that cannot succeed; its claims become orphans"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RECREATE,
			"End the workspace's instance and launch another with the next epoch"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, "End a workspace and give back all it holds"),
	)
}
