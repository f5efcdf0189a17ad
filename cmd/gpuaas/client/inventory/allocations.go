package inventory

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// AllocationView is how allocations are printed.
var AllocationView = output.View[*lifecyclev1.Allocation]{
	Name: (*lifecyclev1.Allocation).GetAllocationId,
	Columns: []output.Column[*lifecyclev1.Allocation]{
		{Title: "ALLOCATION", ID: true, Path: "allocation_id"},
		{Title: "WORKSPACE", ID: true, Path: "workspace|workspace_id"},
		{Title: "EPOCH", Drop: 7, Path: "epoch"},
		{Title: "STATE", Path: "state"},
		{Title: "OCCUPANCY", Drop: 4, Path: "occupancy"},
		{Title: "PLACEMENT", Drop: 6, Path: "placement"},
		{Title: "NODE", Drop: 2, ID: true, Path: "node_name|node_id"},
		{Title: "GPUS", Path: "gpu_device_ids", Wide: true},
		{Title: "FENCE", Drop: 3, Path: "fence"},
		{Title: "SINCE", Drop: 5, Moves: true, Path: "state_at"},
		{Title: "ORPHANS", Path: "orphans", Wide: true},
		{Title: "LAST ERROR", Text: true, Path: "last_error"},
		{Title: "WORKSPACE ID", Path: "workspace_id", Wide: true},
		{Title: "NODE ID", Path: "node_id", Wide: true},
	},
}

// AllocationsCommand returns the commands about allocations.
func AllocationsCommand(p *kit.Program) *cobra.Command {
	var (
		page      kit.Paging
		workspace string
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List allocations of slots and GPUs",
		Example: "  gpuaas allocations list --workspace acme/demo2", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			id, err := s.WorkspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return kit.Show(ctx, s, page, kit.Source[*lifecyclev1.Allocation]{
				View:  AllocationView,
				Fetch: kit.Method(s.Query.ListAllocations, &readmodelv1.ListAllocationsRequest{WorkspaceId: id}),
			})
		}),
	}
	page.Flags(ls)
	p.WorkspaceFlag(ls, &workspace)
	get := &cobra.Command{
		Use: "get ALLOC", Short: "Show one allocation, with its fence and the claims that are not released",
		Example: "  gpuaas allocations get 0192f0c1-0000-7000-8000-000000000001 -o json", Args: kit.Args("ALLOC"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			id, err := s.ID(ctx, kit.KindAllocation, args[0])
			if err != nil {
				return err
			}
			answer, err := s.Client.Release.GetAllocation(ctx, &readmodelv1.GetAllocationRequest{AllocationId: id})
			if err != nil {
				return err
			}
			if s.Printer.Structured() {
				return output.Object(s.Printer, answer.GetAllocation(),
					output.With("claims", output.Messages(answer.GetClaims()...)))
			}
			err = output.One(s.Printer, AllocationView, answer.GetAllocation())
			return output.Under(s.Printer, err, ClaimView.Columns, answer.GetClaims())
		}),
	}
	return kit.Group("allocations", "Allocations of slots and GPUs to workspaces", []string{"allocation", "alloc"}, ls,
		get,
		retryReleaseCommand(p), forceReleaseCommand(p))
}

func retryReleaseCommand(p *kit.Program) *cobra.Command {
	req := &lifecyclev1.RetryReleaseRequest{}
	cmd := &cobra.Command{
		Use: "retry-release ALLOC", Short: "Clean up again what a failed release has left",
		Example: "  gpuaas allocations retry-release 0192f0c1-0000-7000-8000-000000000001 --reason 'the machine is back'",
		Args:    kit.Args("ALLOC"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			if req.AllocationId, err = s.ID(ctx, kit.KindAllocation, args[0]); err != nil {
				return err
			}
			answer, err := s.Client.Release.RetryRelease(ctx, &readmodelv1.RetryReleaseRequest{Request: req})
			if err != nil {
				return err
			}
			return operations.Print(ctx, s, answer.GetResponse().GetOperation(), "")
		}),
	}
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why, for the audit log")
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	return cmd
}

func forceReleaseCommand(p *kit.Program) *cobra.Command {
	req := &lifecyclev1.ForceReleaseRequest{}
	var proof string
	cmd := &cobra.Command{
		Use: "force-release ALLOC", Short: "Free an allocation on your own statement that nothing of it runs; what cannot " +
			"be cleaned becomes orphan claims",
		Example: "  gpuaas allocations force-release 0192f0c1-0000-7000-8000-000000000001 --expected-fence 5 " +
			"--fenced-proof powered_off --ack-orphan CLAIM --reason 'rack 12 is dead' --dry-run",
		Args: kit.Args("ALLOC"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			given, err := kit.ParseEnum[commonv1.FencedProof]("fenced-proof", proof)
			if err != nil {
				return err
			}
			if req.AllocationId, err = s.ID(ctx, kit.KindAllocation, args[0]); err != nil {
				return err
			}
			for i, claim := range req.GetAckOrphans() {
				if req.AckOrphans[i], err = s.ID(ctx, kit.KindClaim, claim); err != nil {
					return err
				}
			}
			req.FencedProof = given
			if err := s.Confirmed(ctx, losesAllocation(s, req)); err != nil {
				return err
			}
			answer, err := s.Client.Release.ForceRelease(ctx, &readmodelv1.ForceReleaseRequest{Request: req})
			if err != nil {
				return err
			}
			if s.Printer.Structured() {
				return output.Object(s.Printer, answer.GetResponse().GetOperation(),
					output.With("claims", output.Messages(answer.GetResponse().GetClaims()...)))
			}
			err = operations.Print(ctx, s, answer.GetResponse().GetOperation(), "")
			return output.Under(s.Printer, err, ClaimView.Columns, answer.GetResponse().GetClaims())
		}),
	}
	flags := cmd.Flags()
	flags.Int64Var(&req.ExpectedFence, "expected-fence", 0, "fence of the allocation as you saw it")
	flags.StringVar(&proof, "fenced-proof", "",
		"why nothing of it runs any more: powered_off, network_isolated, reimaged, operator_asserts")
	flags.StringSliceVar(&req.AckOrphans, "ack-orphan", nil, "claim that may be left behind; give each")
	flags.StringVar(&req.Reason, "reason", "", "why, for the audit log")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only show what it would do, and which claims it may leave behind")
	kit.Asks(cmd)
	next := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if fence := req.GetExpectedFence(); cmd.Flags().Changed("expected-fence") && fence <= 0 {
			return exit.UsageHint(fmt.Errorf("--expected-fence %d is no fence: it is a whole number of 1 or more", fence),
				fmt.Sprintf("give the one that `gpuaas allocations get %s` shows", args[0]))
		}
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
			return exit.Usage(fmt.Errorf("force-release needs %s: `gpuaas allocations get %s` shows the fence and the claims",
				strings.Join(missing, ", "), args[0]))
		}
		return next(cmd, args)
	}
	return cmd
}

// losesAllocation returns the question about an allocation: its name is that of the workspace, or the allocation's id
// if the workspace is not known. It returns an error if the mesh refuses to force the release now.
func losesAllocation(s *kit.Session, req *lifecyclev1.ForceReleaseRequest) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		answer, err := s.Client.Release.GetAllocation(ctx,
			&readmodelv1.GetAllocationRequest{AllocationId: req.GetAllocationId()})
		if err != nil {
			return kit.Question{}, err
		}
		dry := proto.CloneOf(req)
		dry.DryRun = true
		if _, err := s.Client.Release.ForceRelease(ctx, &readmodelv1.ForceReleaseRequest{Request: dry}); err != nil {
			return kit.Question{}, err
		}
		name := req.GetAllocationId()
		if w, err := s.Query.GetWorkspace(ctx,
			&readmodelv1.GetWorkspaceRequest{Workspace: answer.GetAllocation().GetWorkspaceId()}); err == nil {
			name = kit.FullName(w.GetWorkspace())
		}
		return kit.Question{Name: name, Lost: []string{
			fmt.Sprintf("The slot and the GPUs of %s will be free for others, on your statement that nothing of it runs "+
				"any more.", name),
			"What could not be cleaned stays behind as orphan claims. If something does run, two workspaces share a machine.",
		}}, nil
	}
}
