package saga

import (
	"encoding/json"
	"time"
)

// Run is a row of saga_run.
type Run struct {
	ID            string
	WorkspaceID   string
	TenantID      string
	Kind          string
	Definition    string
	DefVersion    int
	Round         int
	ParentRunID   string
	CorrelationID string
	Requester     string
	StepNames     []string
	Input         json.RawMessage
	Epoch         int64
	State         string
	Phase         string
	Step          int
	Attempts      int
	Losses        int
	TriedSince    time.Time
	Fence         int64
	Owner         string
	LeaseUntil    *time.Time
	HeartbeatAt   *time.Time
	ProgressAt    *time.Time
	Signal        int64
	NextAt        time.Time
	DeadlineAt    *time.Time
	CancelAt      *time.Time
	CancelBy      string
	CancelReason  string
	StuckReason   string
	WhyWaiting    string
	ErrorCode     string
	Error         string
	ErrorLayer    string
	ErrorStep     int
	CreatedAt     time.Time
	FinishedAt    *time.Time
	ArchivedAt    *time.Time
	Version       int64
}

// The states and phases of a run, as SQL spells them.
const (
	statePending      = "pending"
	stateRunning      = "running"
	stateWaiting      = "waiting"
	stateCompensating = "compensating"
	stateSucceeded    = "succeeded"
	stateFailed       = "failed"
	stateStuck        = "stuck"

	phaseDo   = "do"
	phaseUndo = "undo"

	attemptRunning   = "running"
	attemptWaiting   = "waiting"
	attemptSucceeded = "succeeded"
	attemptFailed    = "failed"
	attemptCancelled = "cancelled"
	attemptLost      = "lost"
	attemptAbandoned = "abandoned"
)

// Live says whether the run still owns its workspace.
func (r *Run) Live() bool { return r.State != stateSucceeded && r.State != stateFailed }

// Joinable says whether the run is on its way forward: one that is cancelled, being undone or stuck serves nobody who asks for the same.
func (r *Run) Joinable() bool {
	return r.Live() && r.Phase == phaseDo && r.CancelAt == nil && r.State != stateStuck
}

// StepName names the step the run is at.
func (r *Run) StepName() string {
	if r.Step < 0 || r.Step >= len(r.StepNames) {
		return ""
	}
	return r.StepNames[r.Step]
}

const runColumns = `r.id, r.workspace_id, r.tenant_id, r.kind, r.definition, r.def_version, r.round, COALESCE(r.parent_run_id::text, ''),
	r.correlation_id, r.requester, r.step_names, r.input, r.epoch, r.state, r.phase, r.step, r.attempts, r.losses, r.tried_since, r.fence,
	COALESCE(r.owner, ''), r.lease_until, r.heartbeat_at, r.progress_at, r.signal, r.next_at, r.deadline_at, r.cancel_requested_at, r.cancel_by,
	r.cancel_reason, r.stuck_reason, r.why_waiting, r.error_code, r.error, r.error_layer, r.error_step, r.created_at, r.finished_at,
	r.archived_at, r.version`

func (r *Run) targets() []any {
	return []any{
		&r.ID, &r.WorkspaceID, &r.TenantID, &r.Kind, &r.Definition, &r.DefVersion, &r.Round, &r.ParentRunID,
		&r.CorrelationID, &r.Requester, &r.StepNames, &r.Input, &r.Epoch, &r.State, &r.Phase, &r.Step, &r.Attempts, &r.Losses, &r.TriedSince, &r.Fence,
		&r.Owner, &r.LeaseUntil, &r.HeartbeatAt, &r.ProgressAt, &r.Signal, &r.NextAt, &r.DeadlineAt, &r.CancelAt, &r.CancelBy,
		&r.CancelReason, &r.StuckReason, &r.WhyWaiting, &r.ErrorCode, &r.Error, &r.ErrorLayer, &r.ErrorStep, &r.CreatedAt, &r.FinishedAt,
		&r.ArchivedAt, &r.Version,
	}
}

// Attempt is a row of saga_step.
type Attempt struct {
	RunID       string
	Step        int
	Name        string
	Dir         string
	Attempt     int
	WorkspaceID string
	TenantID    string
	Fence       int64
	OpSeq       int64
	State       string
	IdemKey     string
	StartedAt   time.Time
	HeartbeatAt *time.Time
	ProgressAt  *time.Time
	Progress    string
	DeadlineAt  *time.Time
	Stalled     bool
	FinishedAt  *time.Time
	WhyWaiting  string
	ErrorCode   string
	Error       string
	ErrorLayer  string
	Cause       string // of the error, redacted and bounded; for operators
	LastOutput  string // the end of what the workload wrote whose failure this is; for people of the tenant and operators
	Output      json.RawMessage
	Version     int64
}

const stepColumns = `s.run_id, s.step, s.name, s.dir, s.attempt, s.workspace_id, s.tenant_id, s.fence, s.op_seq, s.state, s.idem_key, s.started_at,
	s.heartbeat_at, s.progress_at, COALESCE(s.progress->>'note', ''), s.deadline_at, s.stalled, s.finished_at, s.why_waiting, s.error_code,
	s.error, s.error_layer, s.cause, s.last_output, s.output, s.version`

func (a *Attempt) targets() []any {
	return []any{
		&a.RunID, &a.Step, &a.Name, &a.Dir, &a.Attempt, &a.WorkspaceID, &a.TenantID, &a.Fence, &a.OpSeq, &a.State, &a.IdemKey, &a.StartedAt,
		&a.HeartbeatAt, &a.ProgressAt, &a.Progress, &a.DeadlineAt, &a.Stalled, &a.FinishedAt, &a.WhyWaiting, &a.ErrorCode,
		&a.Error, &a.ErrorLayer, &a.Cause, &a.LastOutput, &a.Output, &a.Version,
	}
}

// Claim is a row of resource_claim.
type Claim struct {
	ID           string
	WorkspaceID  string
	TenantID     string
	RunID        string
	Step         int
	Kind         string
	Scope        string
	Name         string
	ExternalRef  string
	Epoch        int64
	NodeID       string
	IntentAt     time.Time
	ConfirmedAt  *time.Time
	ReleasedAt   *time.Time
	OrphanedAt   *time.Time
	OrphanedBy   string
	OrphanReason string
	Version      int64
}

const claimColumns = `c.id, c.workspace_id, c.tenant_id, c.run_id, c.step, c.kind, c.scope, c.deterministic_name, c.external_ref, c.epoch,
	COALESCE(c.node_id::text, ''), c.intent_at, c.confirmed_at, c.released_at, c.orphaned_at, c.orphaned_by, c.orphan_reason, c.version`

func (c *Claim) targets() []any {
	return []any{
		&c.ID, &c.WorkspaceID, &c.TenantID, &c.RunID, &c.Step, &c.Kind, &c.Scope, &c.Name, &c.ExternalRef, &c.Epoch,
		&c.NodeID, &c.IntentAt, &c.ConfirmedAt, &c.ReleasedAt, &c.OrphanedAt, &c.OrphanedBy, &c.OrphanReason, &c.Version,
	}
}

// Workspace is a row of workspace.
type Workspace struct {
	ID               string
	TenantID         string
	Tenant           string // name
	Name             string
	Spec             json.RawMessage
	SpecDigest       string
	DesiredState     string
	State            string
	Epoch            int64
	OpSeq            int64
	RunID            string
	LastErrorCode    string
	LastError        string
	RegisterFailures int
	RetryUsed        int
	RetryWindowStart *time.Time
	ResetDone        bool
	NodeID           string
	NodeName         string
	Endpoints        json.RawMessage
	CreatedBy        string
	CreatedAt        time.Time
	StateAt          time.Time
	Version          int64
}

const workspaceColumns = `w.id, w.tenant_id, COALESCE((SELECT t.name FROM lifecycle.tenant t WHERE t.id = w.tenant_id), ''), w.name, w.spec,
	w.spec_digest, w.desired_state, w.state, w.epoch, w.op_seq, COALESCE(w.run_id::text, ''), w.last_error_code, w.last_error,
	w.register_failures, w.retry_used, w.retry_window_start, w.reset_done, COALESCE(w.node_id::text, ''), w.node_name, w.endpoints,
	w.created_by, w.created_at, w.state_at, w.version`

func (w *Workspace) targets() []any {
	return []any{
		&w.ID, &w.TenantID, &w.Tenant, &w.Name, &w.Spec,
		&w.SpecDigest, &w.DesiredState, &w.State, &w.Epoch, &w.OpSeq, &w.RunID, &w.LastErrorCode, &w.LastError,
		&w.RegisterFailures, &w.RetryUsed, &w.RetryWindowStart, &w.ResetDone, &w.NodeID, &w.NodeName, &w.Endpoints,
		&w.CreatedBy, &w.CreatedAt, &w.StateAt, &w.Version,
	}
}
