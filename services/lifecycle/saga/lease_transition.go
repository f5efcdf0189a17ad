package saga

import (
	"encoding/json"
	"time"

	"github.com/gpuaas/mesh/internal/names"
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
	err    *StepError
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
	rows      writes
}

// rest is how a run leaves its driver: parked, ended or stuck.
type rest struct {
	state     string
	attempts  int
	after     time.Duration
	wakeable  bool
	why       string
	stuck     string
	passOver  bool
	keepError bool
	workspace string // new state of the workspace; empty leaves it
	rows      writes
	point     string // park or finish
}
