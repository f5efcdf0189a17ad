package process

import (
	"context"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	"github.com/gpuaas/mesh/agent/runtime/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/showable"
)

// OutputRequest names a piece of a workload's output.
type OutputRequest struct {
	WorkspaceID string
	Epoch       int64 // zero: any
	Name        string
	Previous    bool // of the run before the present one
	From        *nodev1.OutputCursor
	Max         int
}

// Output returns a piece of a workload's output, with the values of its environment masked. It does not wait for an
// operation under way.
func (r *Runtime) Output(ctx context.Context, req OutputRequest) (*nodev1.WorkloadOutput, error) {
	w, err := r.deployed(req.WorkspaceID, req.Name)
	if err != nil {
		return nil, err
	}
	at := &workload{key: w.key, dir: w.dir}
	found, err := jsonfile.Read(at.dir, fileSpec, &at.spec)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, absent(req.Name)
	}
	if req.Epoch != 0 && at.spec.Epoch != req.Epoch {
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND,
			"the workload on this node is of another epoch of the workspace")
	}
	_, _ = jsonfile.Read(at.dir, fileDesired, &at.want)
	var s state
	source := output.Source{
		Name: req.Name, Dir: at.dir, Masked: secretsOf(at.spec),
		State: func() output.State {
			s = at.state()
			return output.State{Run: s.Run, HasExited: s.HasExited, ExitCode: s.ExitCode, Stopped: !at.want.Run}
		},
	}
	out, err := r.outputs.Read(ctx, source, output.Request{Previous: req.Previous, From: req.From, Max: req.Max})
	if err != nil {
		return nil, err
	}
	out.Phase, out.Restarts = r.phase(at, s), s.restarted()
	return out, nil
}

// LastOutput returns the end of the output of the last run that exited, masked and fit to be shown: at most
// showable.MaxTail bytes. It is empty if no run has exited, or its output cannot be read.
func (r *Runtime) LastOutput(ctx context.Context, workspaceID, name string) string {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return ""
	}
	s := w.state()
	if !s.HasExited && s.Restarts == 0 {
		return ""
	}
	const raw = 4 * showable.MaxTail // most of it may be colours
	req := OutputRequest{WorkspaceID: workspaceID, Name: name, Previous: !s.HasExited, Max: raw}
	out, err := r.Output(ctx, req)
	if err == nil && !req.Previous && out.GetRun() != s.Run { // the next run has its file already
		req.Previous = true
		out, err = r.Output(ctx, req)
	}
	if err != nil {
		return ""
	}
	return showable.Tail(showable.Clean(out.GetData()), showable.MaxTail)
}
