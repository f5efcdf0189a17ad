package runs

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// Run is a row of saga_run.
type Run struct {
	ID            string          `db:"id"`
	WorkspaceID   string          `db:"workspace_id"`
	TenantID      string          `db:"tenant_id"`
	Kind          string          `db:"kind"`
	Definition    string          `db:"definition"`
	DefVersion    int             `db:"def_version"`
	Round         int             `db:"round"`
	ParentRunID   string          `db:"parent_run_id" expr:"COALESCE(@.parent_run_id::text, '')"`
	CorrelationID string          `db:"correlation_id"`
	Requester     string          `db:"requester"`
	StepNames     []string        `db:"step_names"`
	Input         json.RawMessage `db:"input"`
	Epoch         int64           `db:"epoch"`
	State         string          `db:"state"`
	Phase         string          `db:"phase"`
	Step          int             `db:"step"`
	Attempts      int             `db:"attempts"`
	Losses        int             `db:"losses"`
	TriedSince    time.Time       `db:"tried_since"`
	Fence         int64           `db:"fence"`
	Owner         string          `db:"owner" expr:"COALESCE(@.owner, '')"`
	LeaseUntil    *time.Time      `db:"lease_until"`
	HeartbeatAt   *time.Time      `db:"heartbeat_at"`
	ProgressAt    *time.Time      `db:"progress_at"`
	Signal        int64           `db:"signal"`
	NextAt        time.Time       `db:"next_at"`
	DeadlineAt    *time.Time      `db:"deadline_at"`
	CancelAt      *time.Time      `db:"cancel_requested_at"`
	CancelBy      string          `db:"cancel_by"`
	CancelReason  string          `db:"cancel_reason"`
	StuckReason   string          `db:"stuck_reason"`
	WhyWaiting    string          `db:"why_waiting"`
	ErrorCode     string          `db:"error_code"`
	Error         string          `db:"error"`
	ErrorLayer    string          `db:"error_layer"`
	ErrorStep     int             `db:"error_step"`
	CreatedAt     time.Time       `db:"created_at"`
	FinishedAt    *time.Time      `db:"finished_at"`
	ArchivedAt    *time.Time      `db:"archived_at"`
	OpSeq         int64           `db:"op_seq"`       // of its newest attempt
	OpLast        int64           `db:"op_last"`      // end of the range that its numbers are drawn from
	OpenAttempt   int             `db:"open_attempt"` // open attempt that has no row of its own, or may have none; 0: none
	OpenSince     *time.Time      `db:"open_since"`
	Version       int64           `db:"version"`
}

// The states of a run and of an attempt, and the phases of a run, as SQL spells them. An attempt that its driver lost
// has one state more, which SQL alone writes.
const (
	Pending      = "pending"
	Running      = "running"
	Waiting      = "waiting"
	Compensating = "compensating"
	Succeeded    = "succeeded"
	Failed       = "failed"
	Stuck        = "stuck"

	Do   = "do"
	Undo = "undo"

	AttemptRunning   = "running"
	AttemptWaiting   = "waiting"
	AttemptSucceeded = "succeeded"
	AttemptFailed    = "failed"
	AttemptCancelled = "cancelled"
	AttemptAbandoned = "abandoned"
)

// Live reports whether the run still owns its workspace.
func (r *Run) Live() bool { return r.State != Succeeded && r.State != Failed }

// Joinable reports whether a request for the same operation may join the run: it is in its forward phase, and neither
// cancelled nor stuck.
func (r *Run) Joinable() bool {
	return r.Live() && r.Phase == Do && r.CancelAt == nil && r.State != Stuck
}

// StepName returns the name of the step that the run is at, or "" if the row has none for it.
func (r *Run) StepName() string {
	if r.Step < 0 || r.Step >= len(r.StepNames) {
		return ""
	}
	return r.StepNames[r.Step]
}

// Attempt is a row of saga_step.
type Attempt struct {
	RunID       string     `db:"run_id"`
	Step        int        `db:"step"`
	Name        string     `db:"name"`
	Dir         string     `db:"dir"`
	Attempt     int        `db:"attempt"`
	WorkspaceID string     `db:"workspace_id"`
	TenantID    string     `db:"tenant_id"`
	Fence       int64      `db:"fence"`
	OpSeq       int64      `db:"op_seq"`
	State       string     `db:"state"`
	IdemKey     string     `db:"idem_key" expr:"COALESCE(NULLIF(@.idem_key, ''), @.run_id || '/' || @.name || '/' || @.dir)"` // made of the row, once it is closed
	StartedAt   time.Time  `db:"started_at"`
	HeartbeatAt *time.Time `db:"heartbeat_at"`
	ProgressAt  *time.Time `db:"progress_at"`
	Progress    string     `db:"note" expr:"COALESCE(@.progress->>'note', '')"`
	DeadlineAt  *time.Time `db:"deadline_at"`
	Stalled     bool       `db:"stalled"`
	FinishedAt  *time.Time `db:"finished_at"`
	WhyWaiting  string     `db:"why_waiting"`
	ErrorCode   string     `db:"error_code"`
	Error       string     `db:"error"`
	ErrorLayer  string     `db:"error_layer"`
	Cause       string     `db:"cause"` // of the error, redacted and bounded; for operators
	// LastOutput is the end of the output of the workload that failed, for people of the tenant and operators.
	LastOutput string `db:"last_output"`
	// Stage is the stage of the step that the attempt is in, or ended in; empty for a step without stages.
	Stage   string          `db:"stage"`
	Output  json.RawMessage `db:"output"`
	Version int64           `db:"version"`
}

// Columns and AttemptColumns are the select lists of a run r and of an attempt s.
var (
	Columns        = pg.Columns[Run]("r")
	AttemptColumns = pg.Columns[Attempt]("s")
)

// Doing describes what a run does at a step.
func Doing(phase, step string) string {
	if phase == Undo {
		return fmt.Sprintf("undoing the step %q", step)
	}
	return fmt.Sprintf("doing the step %q", step)
}
