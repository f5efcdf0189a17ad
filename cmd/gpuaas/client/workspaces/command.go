package workspaces

import (
	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Command returns the commands about workspaces.
func Command(p *kit.Program) *cobra.Command {
	return kit.Group("workspaces", "Workspaces of tenants", []string{"workspace", "ws"},
		createCommand(p), listCommand(p), getCommand(p), watchCommand(p), waitCommand(p),
		timelineCommand(p), logsCommand(p), actionsCommand(p), records.RecoveriesCommand(p),
		records.EscalateCommand(p),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_CANCEL, "End the open operation and undo what it did"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_RESET, "Make a failed workspace ready for another try"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_RETRY, "Provision a failed workspace again"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO, "Try the undo of a stuck workspace again"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO,
			"Give up an undo that cannot succeed; its claims become orphans"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_RECREATE,
			"End the workspace's instance and launch another with the next epoch"),
		operateCommand(p, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, "End a workspace and give back all it holds"),
	)
}
