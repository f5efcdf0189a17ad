package workspaces

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// restingState is the state in which a workspace comes to rest after an operation that succeeded.
var restingState = map[commonv1.OperationKind]commonv1.WorkspaceState{
	commonv1.OperationKind_OPERATION_KIND_CREATE:       commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RETRY:        commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RECREATE:     commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_DECOMMISSION: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
	commonv1.OperationKind_OPERATION_KIND_CANCEL:       commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO:   commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
}

// restsIn returns the state in which a workspace comes to rest after a verb, and whether there is one. The operation
// that a verb on an open run results in is the run's own, of kind run: a create that is cancelled ends failed, and a
// decommission whose undo is tried again ends decommissioned.
func restsIn(verb, run commonv1.OperationKind) (commonv1.WorkspaceState, bool) {
	kind := run
	if restingState[verb] == commonv1.WorkspaceState_WORKSPACE_STATE_FAILED &&
		run != commonv1.OperationKind_OPERATION_KIND_DECOMMISSION {
		kind = verb
	}
	state, ok := restingState[kind]
	return state, ok
}

func operateCommand(p *kit.Program, kind commonv1.OperationKind, short string) *cobra.Command {
	var (
		req     = &readmodelv1.OperateWorkspaceRequest{Kind: kind}
		wait    bool
		timeout time.Duration
		proof   string
	)
	name := operations.Verb(kind)
	lost := lostBy[kind]
	example := "  gpuaas workspaces " + name + " acme/demo2 --dry-run"
	if lost != "" {
		why := "a clean start"
		if kind == commonv1.OperationKind_OPERATION_KIND_DECOMMISSION {
			why = "the project is over"
		}
		example += fmt.Sprintf("\n  gpuaas workspaces %[1]s acme/demo2 --reason '%[2]s'"+
			"\n  gpuaas workspaces %[1]s acme/demo2 --reason '%[2]s' --yes", name, why)
	} else {
		example += "\n  gpuaas workspaces " + name + " acme/demo2"
	}
	cmd := &cobra.Command{
		Use: name + " WS", Short: short, Example: example, Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			if req.FencedProof, err = kit.ParseEnum[commonv1.FencedProof]("fenced-proof", proof); err != nil {
				return err
			}
			if proof != "" && strings.TrimSpace(req.GetReason()) == "" {
				return exit.Usage(errors.New("--fenced-proof needs --reason TEXT: it goes into the record"))
			}
			req.Workspace = args[0]
			if lost != "" {
				if err := s.Confirmed(ctx, losesWorkspace(s, req, lost)); err != nil {
					return err
				}
			}
			answer, err := s.Command.OperateWorkspace(ctx, req)
			if err != nil {
				return err
			}
			op := answer.GetOperation()
			if want, ok := restsIn(kind, op.GetKind()); ok && wait && !op.GetDryRun() {
				return awaitOperation(ctx, s, op, args[0], want, timeout)
			}
			return operations.Print(ctx, s, op, "")
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&req.Reason, "reason", "",
		"why, in words, for the record"+human.OnlyIf(lost != "", " (required, except with --dry-run)"))
	flags.BoolVar(&req.Override, "override", false, "go beyond the limit of retries; needs the operator role")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only show what it would do, or what stands in the way")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "",
		"a repeated request with the same `key` gets the same operation")
	if kind == commonv1.OperationKind_OPERATION_KIND_RECREATE {
		kit.EnumFlag[commonv1.FencedProof](cmd, &proof, "fenced-proof",
			"an operator's statement that nothing runs on a machine that cannot confirm it: %s; needs --reason")
	}
	if _, ok := restingState[kind]; ok {
		flags.BoolVar(&wait, "wait", false, "wait until the operation has ended, and print the workspace")
		flags.DurationVar(&timeout, "timeout", 10*time.Minute,
			"give up waiting after this long (exit 6); the operation goes on; 0 waits without end")
	}
	if lost == "" {
		return cmd
	}
	return kit.NeedsReason(kit.Asks(cmd), &req.Reason)
}

// lostBy has the text about the loss for each operation that must be confirmed.
var lostBy = map[commonv1.OperationKind]string{
	commonv1.OperationKind_OPERATION_KIND_DECOMMISSION: "%s will be ended for good: its workloads stop, and its " +
		"storage, its database schema and its GPUs are given up.",
	commonv1.OperationKind_OPERATION_KIND_RECREATE: "The instance of %s will be ended and another launched: its " +
		"workloads stop, and what they keep on that instance is lost.",
	commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO: "The undo of %s will be given up: what it has not cleaned " +
		"stays behind as orphan claims.",
}

// losesWorkspace returns the question about a workspace, by its full name. It returns an error if the mesh reports that
// the operation is not possible now. It puts the id of that workspace in the request, even if another workspace gets
// the name meanwhile.
func losesWorkspace(s *kit.Session, req *readmodelv1.OperateWorkspaceRequest,
	lost string,
) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		answer, err := s.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: req.GetWorkspace()})
		if err != nil {
			return kit.Question{}, err
		}
		w := answer.GetWorkspace()
		req.Workspace = w.GetWorkspaceId()
		dry := proto.CloneOf(req)
		dry.DryRun, dry.IdempotencyKey = true, ""
		if _, err := s.Command.OperateWorkspace(ctx, dry); err != nil {
			return kit.Question{}, err
		}
		state := fmt.Sprintf("It is %s now%s.", human.Enum(w.GetState()),
			human.OnlyIf(w.GetNodeName() != "", ", on "+w.GetNodeName()))
		return kit.Question{Name: kit.FullName(w), Lost: []string{fmt.Sprintf(lost, kit.FullName(w)), state}}, nil
	}
}
