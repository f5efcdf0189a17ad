package client

import (
	"cmp"
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
)

var instanceView = view[*lifecyclev1.Instance]{
	name: (*lifecyclev1.Instance).GetInstanceId,
	columns: []column[*lifecyclev1.Instance]{
		{title: "INSTANCE", id: true, path: "instance_id"},
		{title: "WORKSPACE", id: true, of: func(_ *printer, i *lifecyclev1.Instance) string { return instanceWorkspace(i) }},
		{title: "EPOCH", drop: 5, path: "epoch"},
		{title: "STATE", path: "state"},
		{title: "PLACEMENT", drop: 4, path: "placement"},
		{title: "PROVIDER ID", drop: 2, path: "provider_id"},
		{title: "STARTED", drop: 3, moves: true, path: "started_at"},
		{title: "ENDED", drop: 6, moves: true, path: "ended_at"},
		{title: "NODE", path: "node_name|node_id", wide: true},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
		{title: "WHY ENDED", path: "end_reason", wide: true},
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
func endInstanceCommand(p *Program) *cobra.Command {
	req := &lifecyclev1.EndInstanceRequest{}
	cmd := &cobra.Command{
		Use: "end INSTANCE", Short: "End an instance that its placement runs and whose workspace is not known here; its data is lost",
		Long: "End an instance that its placement runs and that this mesh cannot account for, as `gpuaas instances list` shows it with an unknown workspace:\n" +
			"after a restore, for example, what was launched after the backup. INSTANCE is its id or the provider's. An instance of a workspace that is in use\n" +
			"is refused: recreating or decommissioning the workspace ends it.",
		Example: "  gpuaas instances end 0192f0c1-0000-7000-8000-000000000001 --reason 'launched after the backup' --yes",
		Args:    args("INSTANCE"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			// Only the placement may know an instance that no workspace accounts for, so a reference that is not found goes to
			// the owner as it is.
			instance, err := s.id(ctx, kindInstance, args[0])
			if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
				instance, err = args[0], nil
			}
			if err != nil {
				return err
			}
			req.Instance = instance
			if err := s.confirmed(ctx, losesInstance(s, req)); err != nil {
				return err
			}
			answer, err := s.client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: req})
			if err != nil {
				return err
			}
			if req.GetDryRun() {
				note(s.err, "dry run, nothing was changed: it %s", clean(answer.GetResponse().GetConsequence()))
			} else {
				note(s.err, "the instance %s has been ended, with everything that ran on it; its data is lost",
					clean(req.GetInstance()))
			}
			return one(s.printer, instanceView, answer.GetResponse().GetInstance(), with("pos", answer.GetResponse().GetPos()))
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	asks(cmd)
	reasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesInstance returns the question about an instance, with the mesh's text about what its end would do.
func losesInstance(s *session, req *lifecyclev1.EndInstanceRequest) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: dry})
		if err != nil {
			return question{}, err
		}
		return question{name: req.GetInstance(), lost: []string{
			fmt.Sprintf("The instance %s will be ended for good: what runs in it stops, and its data is lost.",
				req.GetInstance()),
			"Ending it " + answer.GetResponse().GetConsequence() + ".",
		}}, nil
	}
}

func instancesCommand(p *Program) *cobra.Command {
	var (
		page      paging
		workspace string
		live      bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List live and ended instances with their workspace, epoch and provider id; `unknown` is a workspace that this mesh does not know", Example: "  gpuaas instances list --workspace acme/demo2 --live", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			id, err := s.workspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return show(ctx, s, page, source[*lifecyclev1.Instance]{
				view: instanceView, topic: readmodelv1.Topic_TOPIC_INSTANCES, changed: (*readmodelv1.WatchItem).GetInstance,
				keep: func(i *lifecyclev1.Instance) bool {
					return (id == "" || i.GetWorkspaceId() == id) &&
						(!live || i.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED)
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Instance, string, error) {
					answer, err := s.query.ListInstances(ctx,
						&readmodelv1.ListInstancesRequest{PageSize: size, PageToken: token, WorkspaceId: id, LiveOnly: live})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	ls.Flags().BoolVar(&live, "live", false, "only those that have not ended")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	return group("instances", "Launched instances of workspaces, and those that no workspace accounts for",
		[]string{"instance"}, ls, endInstanceCommand(p))
}
