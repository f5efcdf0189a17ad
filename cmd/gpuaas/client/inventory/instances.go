package inventory

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// InstanceView is how instances are printed.
var InstanceView = output.View[*lifecyclev1.Instance]{
	Name: (*lifecyclev1.Instance).GetInstanceId,
	Columns: []output.Column[*lifecyclev1.Instance]{
		{Title: "INSTANCE", ID: true, Path: "instance_id"},
		{
			Title: "WORKSPACE", ID: true,
			Of: func(_ *output.Printer, i *lifecyclev1.Instance) string { return instanceWorkspace(i) },
		},
		{Title: "EPOCH", Drop: 5, Path: "epoch"},
		{Title: "STATE", Path: "state"},
		{Title: "PLACEMENT", Drop: 4, Path: "placement"},
		{Title: "PROVIDER ID", Drop: 2, Path: "provider_id"},
		{Title: "STARTED", Drop: 3, Moves: true, Path: "started_at"},
		{Title: "ENDED", Drop: 6, Moves: true, Path: "ended_at"},
		{Title: "NODE", Path: "node_name|node_id", Wide: true},
		{Title: "WORKSPACE ID", Path: "workspace_id", Wide: true},
		{Title: "NODE ID", Path: "node_id", Wide: true},
		{Title: "WHY ENDED", Path: "end_reason", Wide: true},
	},
}

// instanceWorkspace returns the workspace of an instance. For an instance that no workspace accounts for it returns the
// name that the placement gives.
func instanceWorkspace(i *lifecyclev1.Instance) string {
	switch {
	case !i.GetUnaccounted():
		return cmp.Or(i.GetWorkspace(), i.GetWorkspaceName())
	case i.GetWorkspaceName() == "":
		return "unknown (" + i.GetWorkspaceId() + ")"
	default:
		return i.GetWorkspaceName() + " (epoch unknown)"
	}
}

// endInstanceCommand returns the command that ends an instance that its placement runs and that no workspace accounts
// for.
func endInstanceCommand(p *kit.Program) *cobra.Command {
	req := &lifecyclev1.EndInstanceRequest{}
	cmd := &cobra.Command{
		Use: "end INSTANCE", Short: "End an instance that its placement runs and whose workspace is not known here; its " +
			"data is lost",
		Long: "End an instance that its placement runs and that this mesh cannot account for, as `gpuaas instances list` " +
			"shows it with an unknown workspace:\n" +
			"after a restore, for example, what was launched after the backup. INSTANCE is its id or the provider's. An " +
			"instance of a workspace that is in use\n" +
			"is refused: recreating or decommissioning the workspace ends it.",
		Example: "  gpuaas instances end 0192f0c1-0000-7000-8000-000000000001 --reason 'launched after the backup' --yes",
		Args:    kit.Args("INSTANCE"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			// Only the placement may know an instance that no workspace accounts for, so a reference that is not found goes to
			// the owner as it is.
			instance, err := s.ID(ctx, kit.KindInstance, args[0])
			if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
				instance, err = args[0], nil
			}
			if err != nil {
				return err
			}
			req.Instance = instance
			if err := s.Confirmed(ctx, losesInstance(s, req)); err != nil {
				return err
			}
			answer, err := s.Client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: req})
			if err != nil {
				return err
			}
			if req.GetDryRun() {
				human.Note(s.Err, "dry run, nothing was changed: it %s", human.Clean(answer.GetResponse().GetConsequence()))
			} else {
				human.Note(s.Err, "the instance %s has been ended, with everything that ran on it; its data is lost",
					human.Clean(req.GetInstance()))
			}
			return output.One(s.Printer, InstanceView, answer.GetResponse().GetInstance(),
				output.With("pos", answer.GetResponse().GetPos()))
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	kit.Asks(cmd)
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesInstance returns the question about an instance, with the mesh's text about what its end would do.
func losesInstance(s *kit.Session, req *lifecyclev1.EndInstanceRequest) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.Client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: dry})
		if err != nil {
			return kit.Question{}, err
		}
		return kit.Question{Name: req.GetInstance(), Lost: []string{
			fmt.Sprintf("The instance %s will be ended for good: what runs in it stops, and its data is lost.",
				req.GetInstance()),
			"Ending it " + answer.GetResponse().GetConsequence() + ".",
		}}, nil
	}
}

// InstancesCommand returns the commands about instances.
func InstancesCommand(p *kit.Program) *cobra.Command {
	var (
		page      kit.Paging
		workspace string
		live      bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List live and ended instances with their workspace, epoch and provider id; `unknown` is a workspace that " +
			"this mesh does not know", Example: "  gpuaas instances list --workspace acme/demo2 --live", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			id, err := s.WorkspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return kit.Show(ctx, s, page, kit.Source[*lifecyclev1.Instance]{
				View: InstanceView, Topic: readmodelv1.Topic_TOPIC_INSTANCES, Changed: (*readmodelv1.WatchItem).GetInstance,
				Keep: func(i *lifecyclev1.Instance) bool {
					return (id == "" || i.GetWorkspaceId() == id) &&
						(!live || i.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED)
				},
				Fetch: kit.Method(s.Query.ListInstances, &readmodelv1.ListInstancesRequest{WorkspaceId: id, LiveOnly: live}),
			})
		}),
	}
	page.Flags(ls)
	p.WorkspaceFlag(ls, &workspace)
	ls.Flags().BoolVar(&live, "live", false, "only those that have not ended")
	return kit.Group("instances", "Launched instances of workspaces, and those that no workspace accounts for",
		[]string{"instance"}, ls, endInstanceCommand(p))
}
