package client

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var allocationView = view[*lifecyclev1.Allocation]{
	name: (*lifecyclev1.Allocation).GetAllocationId,
	columns: []column[*lifecyclev1.Allocation]{
		{title: "ALLOCATION", id: true, path: "allocation_id"},
		{title: "WORKSPACE", id: true, path: "workspace|workspace_id"},
		{title: "EPOCH", drop: 7, path: "epoch"},
		{title: "STATE", path: "state"},
		{title: "OCCUPANCY", drop: 4, path: "occupancy"},
		{title: "PLACEMENT", drop: 6, path: "placement"},
		{title: "NODE", drop: 2, id: true, path: "node_name|node_id"},
		{title: "GPUS", path: "gpu_device_ids", wide: true},
		{title: "FENCE", drop: 3, path: "fence"},
		{title: "SINCE", drop: 5, moves: true, path: "state_at"},
		{title: "ORPHANS", path: "orphans", wide: true},
		{title: "LAST ERROR", text: true, path: "last_error"},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
	},
}

func allocationsCommand(p *Program) *cobra.Command {
	var (
		page      paging
		workspace string
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List allocations of slots and GPUs",
		Example: "  gpuaas allocations list --workspace acme/demo2", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			id, err := s.workspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return show(ctx, s, page, source[*lifecyclev1.Allocation]{
				view: allocationView,
				fetch: func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Allocation, string, error) {
					answer, err := s.query.ListAllocations(ctx,
						&readmodelv1.ListAllocationsRequest{PageSize: size, PageToken: token, WorkspaceId: id})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	get := &cobra.Command{
		Use: "get ALLOC", Short: "Show one allocation, with its fence and the claims that are not released",
		Example: "  gpuaas allocations get 0192f0c1-0000-7000-8000-000000000001 -o json", Args: args("ALLOC"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			id, err := s.id(ctx, kindAllocation, args[0])
			if err != nil {
				return err
			}
			answer, err := s.client.Release.GetAllocation(ctx, &readmodelv1.GetAllocationRequest{AllocationId: id})
			if err != nil {
				return err
			}
			if s.printer.structured() {
				return object(s.printer, answer.GetAllocation(), with("claims", messages(answer.GetClaims()...)))
			}
			if err := one(s.printer, allocationView, answer.GetAllocation()); err != nil || s.format == formatName ||
				len(answer.GetClaims()) == 0 {
				return err
			}
			return under(s.printer, claimView.columns, answer.GetClaims())
		}),
	}
	return group("allocations", "Allocations of slots and GPUs to workspaces", []string{"allocation", "alloc"}, ls, get,
		retryReleaseCommand(p), forceReleaseCommand(p))
}

func retryReleaseCommand(p *Program) *cobra.Command {
	req := &lifecyclev1.RetryReleaseRequest{}
	cmd := &cobra.Command{
		Use: "retry-release ALLOC", Short: "Clean up again what a failed release has left",
		Example: "  gpuaas allocations retry-release 0192f0c1-0000-7000-8000-000000000001 --reason 'the machine is back'",
		Args:    args("ALLOC"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			id, err := s.id(ctx, kindAllocation, args[0])
			if err != nil {
				return err
			}
			req.AllocationId = id
			answer, err := s.client.Release.RetryRelease(ctx, &readmodelv1.RetryReleaseRequest{Request: req})
			if err != nil {
				return err
			}
			return printOperation(ctx, s, answer.GetResponse().GetOperation(), "")
		}),
	}
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why, for the audit log")
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	return cmd
}

func forceReleaseCommand(p *Program) *cobra.Command {
	req := &lifecyclev1.ForceReleaseRequest{}
	var proof string
	cmd := &cobra.Command{
		Use: "force-release ALLOC", Short: "Free an allocation on your own statement that nothing of it runs; what cannot be cleaned becomes orphan claims",
		Example: "  gpuaas allocations force-release 0192f0c1-0000-7000-8000-000000000001 --expected-fence 5 --fenced-proof powered_off --ack-orphan CLAIM --reason 'rack 12 is dead' --dry-run",
		Args:    args("ALLOC"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			given, err := parseEnum[commonv1.FencedProof]("fenced-proof", proof)
			if err != nil {
				return err
			}
			if req.AllocationId, err = s.id(ctx, kindAllocation, args[0]); err != nil {
				return err
			}
			for i, claim := range req.GetAckOrphans() {
				if req.AckOrphans[i], err = s.id(ctx, kindClaim, claim); err != nil {
					return err
				}
			}
			req.FencedProof = given
			if err := s.confirmed(ctx, losesAllocation(s, req)); err != nil {
				return err
			}
			answer, err := s.client.Release.ForceRelease(ctx, &readmodelv1.ForceReleaseRequest{Request: req})
			if err != nil {
				return err
			}
			if s.printer.structured() {
				return object(s.printer, answer.GetResponse().GetOperation(),
					with("claims", messages(answer.GetResponse().GetClaims()...)))
			}
			if err := printOperation(ctx, s, answer.GetResponse().GetOperation(), ""); err != nil || s.format == formatName ||
				len(answer.GetResponse().GetClaims()) == 0 {
				return err
			}
			return under(s.printer, claimView.columns, answer.GetResponse().GetClaims())
		}),
	}
	flags := cmd.Flags()
	flags.Int64Var(&req.ExpectedFence, "expected-fence", 0, "fence of the allocation as you saw it")
	flags.StringVar(&proof, "fenced-proof", "",
		"why nothing of it runs any more: powered_off, network_isolated, reimaged, operator_asserts")
	flags.StringSliceVar(&req.AckOrphans, "ack-orphan", nil, "claim that may be left behind; give each")
	flags.StringVar(&req.Reason, "reason", "", "why, for the audit log")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only show what it would do, and which claims it may leave behind")
	asks(cmd)
	next := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var missing []string
		for flag, given := range map[string]bool{
			"expected-fence F": req.GetExpectedFence() > 0,
			"fenced-proof P":   proof != "", "reason TEXT": req.GetReason() != "",
		} {
			if !given {
				missing = append(missing, "--"+flag)
			}
		}
		if len(missing) > 0 {
			slices.Sort(missing)
			return Usage(fmt.Errorf("force-release needs %s: `gpuaas allocations get %s` shows the fence and the claims",
				strings.Join(missing, ", "), args[0]))
		}
		return next(cmd, args)
	}
	return cmd
}

// losesAllocation returns the question about an allocation: its name is that of the workspace, or the allocation's id
// if the workspace is not known. It returns an error if the mesh refuses to force the release now.
func losesAllocation(s *session, req *lifecyclev1.ForceReleaseRequest) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		answer, err := s.client.Release.GetAllocation(ctx,
			&readmodelv1.GetAllocationRequest{AllocationId: req.GetAllocationId()})
		if err != nil {
			return question{}, err
		}
		dry := proto.CloneOf(req)
		dry.DryRun = true
		if _, err := s.client.Release.ForceRelease(ctx, &readmodelv1.ForceReleaseRequest{Request: dry}); err != nil {
			return question{}, err
		}
		name := req.GetAllocationId()
		if w, err := s.query.GetWorkspace(ctx,
			&readmodelv1.GetWorkspaceRequest{Workspace: answer.GetAllocation().GetWorkspaceId()}); err == nil {
			name = fullName(w.GetWorkspace())
		}
		return question{name: name, lost: []string{
			fmt.Sprintf("The slot and the GPUs of %s will be free for others, on your statement that nothing of it runs any more.", name),
			"What could not be cleaned stays behind as orphan claims. If something does run, two workspaces share a machine.",
		}}, nil
	}
}
