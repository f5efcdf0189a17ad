package workspaces

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

func waitCommand(p *kit.Program) *cobra.Command {
	var (
		for_    string
		timeout time.Duration
		minPos  string
	)
	cmd := &cobra.Command{
		Use: "wait WS --for state=active", Short: "Wait until a workspace is in a state, and print it",
		Example: "  gpuaas workspaces wait acme/demo2 --for state=active --timeout 60s\n  gpuaas workspaces wait " +
			"acme/demo2 --for state=active,failed",
		Args: kit.Args("WS"), ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			want, err := parseCondition(for_)
			if err != nil {
				return err
			}
			all := ctx
			ctx, cancel := kit.Within(ctx, timeout)
			defer cancel()
			last, told := (*readmodelv1.Workspace)(nil), ""
			err = followWorkspace(ctx, s, args[0], minPos, func(item *readmodelv1.WatchItem) (bool, error) {
				w := item.GetWorkspace()
				if w == nil {
					return false, nil
				}
				last = w
				if want.holds(w) {
					return true, nil
				}
				if now := human.Enum(w.GetState()); now != told {
					human.Note(s.Err, "%s is %s%s", kit.FullName(w), now,
						human.OnlyIf(w.GetLastError() != "", ": "+human.Clean(w.GetLastError())))
					told = now
				}
				return false, ended(ctx, s, w, want.text)
			})
			if errors.Is(err, kit.ErrWaited) {
				last, err = waited{
					text: fmt.Sprintf("%s is not %s after %s", args[0], want.text, timeout), ref: args[0],
					minPos: minPos, holds: want.holds, ended: func(ctx context.Context, w *readmodelv1.Workspace) error {
						return ended(ctx, s, w, want.text)
					},
				}.tooLong(all, s, last)
				if err != nil && all.Err() == nil {
					return err
				}
			}
			switch {
			case err != nil && ctx.Err() != nil:
				ref := args[0]
				if last != nil {
					ref = kit.FullName(last)
				}
				return exit.Interrupt(fmt.Sprintf("interrupted; %s goes on: gpuaas workspaces wait %s --for %s", ref, ref,
					want.text))
			case err != nil:
				return err
			}
			return output.One(s.Printer, View, last)
		}),
	}
	cmd.Flags().StringVar(&for_, "for", "state=active", "what to wait for: state=S[,S...] or user_state=S[,S...]")
	_ = cmd.RegisterFlagCompletionFunc("for", completeConditions)
	cmd.Flags().DurationVar(&timeout, "timeout", 60*time.Second, "give up after this long (exit 6); 0 waits without end")
	cmd.Flags().StringVar(&minPos, "min-pos", "",
		"`position` that an earlier command printed as pos: ignore anything older")
	return cmd
}

// followWorkspace follows one workspace with its runs and steps.
func followWorkspace(ctx context.Context, s *kit.Session, ref, minPos string,
	each func(*readmodelv1.WatchItem) (bool, error),
) error {
	// The lookup fails at once for a workspace that does not exist. The watch uses the id, because a bare name may stop
	// being unique.
	answer, err := s.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref, MinPos: minPos})
	id := ref
	switch {
	case err == nil:
		id = answer.GetWorkspace().GetWorkspaceId()
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case !kit.Mends(err):
		return err
	}
	poll := func(ctx context.Context) ([]*readmodelv1.WatchItem, error) {
		answer, err := s.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: id, MinPos: minPos})
		return []*readmodelv1.WatchItem{{
			Topic:  readmodelv1.Topic_TOPIC_WORKSPACES,
			Object: &readmodelv1.WatchItem_Workspace{Workspace: answer.GetWorkspace()},
		}}, err
	}
	if err == nil {
		// The workspace may already be in the wanted state.
		done, ferr := each(&readmodelv1.WatchItem{
			Topic:  readmodelv1.Topic_TOPIC_WORKSPACES,
			Object: &readmodelv1.WatchItem_Workspace{Workspace: answer.GetWorkspace()},
		})
		if done || ferr != nil {
			return ferr
		}
	}
	return s.Follow(ctx, &readmodelv1.WatchRequest{
		Topics: []readmodelv1.Topic{
			readmodelv1.Topic_TOPIC_RUNS, readmodelv1.Topic_TOPIC_STEPS,
			readmodelv1.Topic_TOPIC_WORKSPACES,
		},
		Workspace: id, MinPos: minPos,
	}, poll, each)
}

// awaitOperation waits until an operation has ended, prints its steps on stderr, and then prints the workspace. It
// returns an error if the workspace comes to rest in another state than want. name is the reference that the person
// typed.
func awaitOperation(ctx context.Context, s *kit.Session, op *lifecyclev1.Operation, name string,
	want commonv1.WorkspaceState, timeout time.Duration,
) error {
	all := ctx
	ctx, cancel := kit.Within(ctx, timeout)
	defer cancel()
	human.Note(s.Err, "%s %s (epoch %d)%s", human.Enum(op.GetKind()), op.GetOperationId(), op.GetEpoch(),
		human.OnlyIf(op.GetJoined(), ", joined one under way"))
	steps := &stepPrinter{s: s, workspaceID: op.GetWorkspaceId(), runID: op.GetOperationId(), printed: map[string]bool{}}
	var last *readmodelv1.Workspace
	err := followWorkspace(ctx, s, op.GetWorkspaceId(), op.GetPos(), func(item *readmodelv1.WatchItem) (bool, error) {
		steps.follow(ctx, item.GetStep())
		w := item.GetWorkspace()
		if w == nil {
			return false, nil
		}
		last = w
		return atRest(w, want), nil
	})
	if errors.Is(err, kit.ErrWaited) {
		last, err = waited{
			text: fmt.Sprintf("%s has not ended after %s", human.Enum(op.GetKind()), timeout), ref: op.GetWorkspaceId(),
			minPos: op.GetPos(), holds: func(w *readmodelv1.Workspace) bool { return atRest(w, want) },
		}.tooLong(all, s, last)
		if err != nil && all.Err() == nil {
			return err
		}
		ctx = all
	}
	if err == nil {
		steps.finish(ctx)
	}
	switch {
	case err != nil:
		if ctx.Err() != nil {
			if last != nil {
				name = kit.FullName(last)
			}
			wait := "gpuaas workspaces wait " + name
			if want != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
				wait += " --for state=" + human.Enum(want)
			}
			return exit.Interrupt("interrupted; the operation goes on: " + wait)
		}
		return err
	}
	if err := output.One(s.Printer, View, last); err != nil {
		return err
	}
	if last.GetState() == want {
		return nil
	}
	for _, text := range steps.lastOutput() {
		human.Note(s.Err, "%s", text)
	}
	remedy := "see where it failed: gpuaas workspaces timeline " + kit.FullName(last)
	if text := last.GetLastError(); strings.Contains(text, "ended before it was ready") &&
		strings.Contains(text, "status 0") {
		remedy += "; a job that may end sooner is ready at once with --min-uptime 0s"
	}
	return endedElsewhere(last, remedy)
}

// endedElsewhere returns the error of a wait whose workspace came to rest in another state than the wanted one.
func endedElsewhere(w *readmodelv1.Workspace, remedy string) error {
	reason, err := names.Parse[commonv1.Reason](w.GetLastErrorCode())
	if err != nil || reason == commonv1.Reason_REASON_UNSPECIFIED {
		reason = commonv1.Reason_REASON_PRECONDITION_FAILED
	}
	return &exit.Error{
		Code: exit.CodeRefused, Reason: reason, Remedy: remedy,
		Message: fmt.Sprintf("%s is %s: %s", kit.FullName(w), human.Enum(w.GetState()),
			cmp.Or(w.GetLastError(), "no error is recorded")),
	}
}

// restsFailed reports whether a workspace is failed or stuck with no operation under way, so that only another
// operation changes it. The view may lack an operation that has begun, so it asks the owner, and relies on the view if
// the owner does not answer.
func restsFailed(ctx context.Context, s *kit.Session, w *readmodelv1.Workspace) bool {
	state := w.GetState()
	if state != commonv1.WorkspaceState_WORKSPACE_STATE_FAILED && state != commonv1.WorkspaceState_WORKSPACE_STATE_STUCK {
		return false
	}
	answer, err := s.Query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: w.GetWorkspaceId()})
	if err != nil {
		return ctx.Err() == nil
	}
	possible := func(kind commonv1.OperationKind) bool {
		return slices.ContainsFunc(answer.GetActions(),
			func(a *lifecyclev1.ActionOption) bool { return a.GetKind() == kind && a.GetPossible() })
	}
	if state == commonv1.WorkspaceState_WORKSPACE_STATE_STUCK {
		return possible(commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO)
	}
	return !possible(commonv1.OperationKind_OPERATION_KIND_CANCEL)
}

// atRest reports whether the workspace changes no further by itself. A failed workspace has no open operation, because
// the mesh sets that state only at the end of one.
func atRest(w *readmodelv1.Workspace, want commonv1.WorkspaceState) bool {
	switch w.GetState() { //nolint:exhaustive // every other state is under way
	case want, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
		return true
	}
	return false
}
