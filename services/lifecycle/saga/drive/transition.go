package drive

import (
	"encoding/json"
	"time"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// state returns the state of the run while the attempt is open.
func (n *nextAttempt) state() string {
	if n.phase == runs.Undo {
		return runs.Compensating
	}
	return runs.Running
}

// closing is how the open attempt ends.
type closing struct {
	state  string
	why    string
	err    *saga.StepError
	output json.RawMessage
}

func (cl closing) code() (string, string, string) {
	if cl.err == nil {
		return "", "", ""
	}
	return names.Of(cl.err.Reason), cl.err.Public, layerName(cl.err)
}

// nextAttempt is the attempt that an advance opens.
type nextAttempt struct {
	step      int
	phase     string
	bumpFence bool
	passOver  bool // a pending cancel does not stop this transition
	keepError bool // write the closing's error to the run
	rows      saga.Writes
}

// release is how a run leaves its driver: parked, ended or stuck.
type release struct {
	state     string
	attempts  int
	after     time.Duration
	wakeable  bool
	why       string
	stuck     string
	passOver  bool
	keepError bool
	workspace string // new state of the workspace; empty leaves it
	rows      saga.Writes
	point     string // park or finish
}

// layerName returns the name of the layer that owns a failure; empty if none does.
func layerName(e *saga.StepError) string {
	if e.Layer == 0 {
		return ""
	}
	return names.Of(e.Layer)
}

// lastOutput returns the end of the workload's output that is kept with the failure; empty without a failure.
func lastOutput(e *saga.StepError) string {
	if e == nil {
		return ""
	}
	return e.LastOutput
}
