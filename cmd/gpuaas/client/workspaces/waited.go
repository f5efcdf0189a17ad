package workspaces

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// reloadWithin bounds the requests that read the present state after a wait that took too long.
const reloadWithin = 5 * time.Second

// waited is a wait for a workspace that took too long.
type waited struct {
	text, ref string // what did not come about in time; the reference to the workspace
	minPos    string // the position that the state must have; empty: any
	holds     func(*readmodelv1.Workspace) bool
	// ended returns the error of a workspace for which waiting longer is of no use; nil: there is no such state.
	ended func(context.Context, *readmodelv1.Workspace) error
}

// tooLong reads the workspace once more, since the watch may be behind, or have been cut off. It returns the workspace
// if what was waited for has come about, the outcome if it has ended otherwise, and else an error that says whether an
// operation is under way. last is the workspace as the watch showed it; nil: it showed none.
func (w waited) tooLong(all context.Context, s *kit.Session, last *readmodelv1.Workspace) (*readmodelv1.Workspace,
	error,
) {
	ctx, cancel := context.WithTimeout(all, reloadWithin)
	defer cancel()
	answer, err := s.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{
		Workspace: cmp.Or(last.GetWorkspaceId(), w.ref), MinPos: w.minPos,
	})
	if err != nil {
		if all.Err() != nil {
			return nil, fmt.Errorf("read %s once more: %w", w.name(last), all.Err())
		}
		text := w.text
		if last != nil {
			text += ": it was " + describe(last) + " when it was read last"
		}
		return nil, timedOut(text, "its present state could not be read ("+human.Clean(err.Error())+
			"): look with `gpuaas workspaces get "+w.name(last)+"`, and at the mesh with `gpuaas status`")
	}
	now := answer.GetWorkspace()
	if w.holds(now) {
		return now, nil
	}
	if w.ended != nil {
		if err := w.ended(ctx, now); err != nil {
			return nil, err
		}
	}
	text, name := w.text+": it is "+describe(now), kit.FullName(now)
	if underWay(now) {
		return nil, timedOut(text, "it goes on without you: look with `gpuaas workspaces timeline "+name+
			"`, or wait longer with --timeout")
	}
	return nil, timedOut(text, "no operation is under way on it: `gpuaas workspaces get "+name+
		"` shows why it is so, and `gpuaas workspaces actions "+name+"` what can be done")
}

// name returns the name of the workspace as the watch showed it, else the reference.
func (w waited) name(last *readmodelv1.Workspace) string {
	if last == nil {
		return w.ref
	}
	return kit.FullName(last)
}

func timedOut(text, remedy string) error {
	return &exit.Error{
		Code: exit.CodeTimeout, Reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED, Message: text, Remedy: remedy,
	}
}

// describe returns the state of a workspace with its step and what it waits for.
func describe(w *readmodelv1.Workspace) string {
	text := human.Enum(w.GetState())
	if w.GetCurrentStep() != "" {
		text += ", at " + w.GetCurrentStep()
	}
	if why := cmp.Or(w.GetWhyWaiting(), w.GetLastError()); why != "" {
		text += " (" + why + ")"
	}
	return text
}

// underWay reports whether an operation changes the workspace, as its state says.
func underWay(w *readmodelv1.Workspace) bool {
	return !atRest(w, commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED)
}

// ended returns the error of a workspace which waiting longer does not bring to what is wanted: one that is
// decommissioned, or that failed with no operation under way. It returns nil for any other.
func ended(ctx context.Context, s *kit.Session, w *readmodelv1.Workspace, wanted string) error {
	if w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
		return &exit.Error{
			Code: exit.CodeRefused, Reason: commonv1.Reason_REASON_STATE_TERMINAL,
			Message: fmt.Sprintf("%s is decommissioned and stays so: %s will never hold", kit.FullName(w), wanted),
		}
	}
	if restsFailed(ctx, s, w) {
		return endedElsewhere(w, "decide what is done about it: gpuaas workspaces actions "+kit.FullName(w))
	}
	return nil
}
