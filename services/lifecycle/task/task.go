package task

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// Spec is a task to be queued.
type Spec struct {
	Type        commonv1.TaskType
	NodeID      string
	WorkspaceID string
	TenantID    string
	RunID       string
	Epoch       int64
	OpSeq       int64
	// IdempotencyKey identifies the request: queueing with the same key again returns the existing task.
	IdempotencyKey string
	Payload        proto.Message
	// StartWithin is how long after queueing the task may still start; zero means five minutes.
	StartWithin   time.Duration
	CorrelationID string
	CreatedBy     string
}

// Row is a task as stored.
type Row struct {
	TaskID        string             `db:"task_id" expr:"@.task_id::text"`
	Type          string             `db:"type"`
	NodeID        string             `db:"node_id" expr:"@.node_id::text"`
	WorkspaceID   string             `db:"workspace_id" expr:"coalesce(@.workspace_id::text, '')"`
	TenantID      string             `db:"tenant_id" expr:"coalesce(@.tenant_id::text, '')"`
	RunID         string             `db:"run_id" expr:"coalesce(@.run_id::text, '')"`
	Epoch         int64              `db:"epoch"`
	OpSeq         int64              `db:"op_seq"`
	State         commonv1.TaskState `db:"-"`
	Attempt       int32              `db:"attempt"`
	IdemKey       string             `db:"idem_key"`
	SessionEpoch  int64              `db:"session_epoch"`
	CreatedAt     time.Time          `db:"created_at"`
	NotBefore     time.Time          `db:"not_before"`
	ExpiresAt     time.Time          `db:"expires_at"`
	StateAt       time.Time          `db:"state_at"`
	Reason        string             `db:"reason"`
	Error         string             `db:"error"`
	Output        []byte             `db:"output"`
	Note          string             `db:"note"`
	LateEvidence  int32              `db:"late_evidence"`
	CancelAsked   bool               `db:"cancel_asked" expr:"@.cancel_requested_at IS NOT NULL"`
	CorrelationID string             `db:"correlation_id"`
	CreatedBy     string             `db:"created_by"`
	Version       int64              `db:"version"`
	// Unreported is true if the row was leased and no event reports the lease yet: see unreported.go.
	Unreported bool `db:"unreported" expr:"@.state = 'dispatched' AND @.offered_at IS NOT DISTINCT FROM @.state_at"`
	// NodeCordoned is true if Latest has read the row and the node is cordoned.
	NodeCordoned bool `db:"-"`
}

// LockOfRuns locks the tasks that Extend may change, in the order of their ids. It comes before the locks of the runs.
func LockOfRuns(ctx context.Context, tx pgx.Tx, runIDs []string) error {
	if _, err := pg.Exec(ctx, tx, lockOfRuns, runIDs); err != nil {
		return fmt.Errorf("lock tasks of runs: %w", err)
	}
	return nil
}

// Extend postpones the last moment at which the queued and dispatched tasks of runs may start, by as many seconds as
// each run was paused. The caller has locked them by LockOfRuns.
func Extend(ctx context.Context, tx pgx.Tx, runIDs []string, seconds []float64) error {
	list, err := All(ctx, tx, extendTasks, runIDs, seconds)
	if err != nil {
		return fmt.Errorf("extend tasks: %w", err)
	}
	if len(list) == 0 {
		return nil
	}
	evs := make([]events.Event, 0, len(list))
	for _, r := range list {
		evs = append(evs, r.Event(r.Transition(r.State, "rollback mode is over")))
	}
	if _, err := events.Append(ctx, tx, evs...); err != nil {
		return fmt.Errorf("report tasks: %w", err)
	}
	return nil
}

// Terminal reports whether a task in that state has ended.
func Terminal(s commonv1.TaskState) bool {
	switch s {
	case commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DISPATCHED,
		commonv1.TaskState_TASK_STATE_DELIVERED, commonv1.TaskState_TASK_STATE_RUNNING:
		return false
	default:
		return true
	}
}

// Proto returns the task as events and responses show it, without its output and payload, which may contain secrets. A
// type or reason that this build does not know is shown as it is stored, in the field Unknown.
func (r Row) Proto() *lifecyclev1.Task {
	kind, reason, err := r.typeAndReason()
	p := &lifecyclev1.Task{
		TaskId: r.TaskID, Type: kind, NodeId: r.NodeID, WorkspaceId: r.WorkspaceID, TenantId: r.TenantID, RunId: r.RunID,
		Epoch: r.Epoch, OpSeq: r.OpSeq, State: r.State, Attempt: r.Attempt, IdempotencyKey: r.IdemKey,
		SessionEpoch: r.SessionEpoch, CreatedAt: timestamppb.New(r.CreatedAt), NotBefore: timestamppb.New(r.NotBefore),
		ExpiresAt: timestamppb.New(r.ExpiresAt), StateAt: timestamppb.New(r.StateAt), Error: r.Error, Note: r.Note,
		LateEvidence: r.LateEvidence, CorrelationId: r.CorrelationID, Version: r.Version, CancelRequested: r.CancelAsked,
		CreatedBy: r.CreatedBy, Reason: reason,
	}
	if unknown, ok := errors.AsType[*names.UnknownError](err); ok {
		p.Unknown = unknown.Value
	}
	return p
}

// typeAndReason returns the type and the reason, each unspecified if this build does not know it. The error is about
// the first of them that it does not know.
func (r Row) typeAndReason() (commonv1.TaskType, commonv1.Reason, error) {
	kind, err := names.Parse[commonv1.TaskType](r.Type)
	if r.Reason == "" {
		return kind, commonv1.Reason_REASON_UNSPECIFIED, err
	}
	reason, errReason := names.Parse[commonv1.Reason](r.Reason)
	return kind, reason, cmp.Or(err, errReason)
}

// Event returns the event of the row with the new transitions. The event is unnamed: a caller that returns its position
// names it.
func (r Row) Event(transitions ...*lifecyclev1.TaskTransition) events.Event {
	if len(transitions) == 0 {
		transitions = []*lifecyclev1.TaskTransition{r.Transition(r.State, "")}
	}
	return events.Event{
		Kind: "task.changed", Unnamed: true, AggregateType: "task", AggregateID: r.TaskID, AggregateVersion: r.Version,
		Payload: &lifecyclev1.TaskChanged{Task: r.Proto(), Transitions: transitions},
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, WorkflowID: r.RunID,
			TaskID: r.TaskID, NodeID: r.NodeID,
		},
	}
}

// Transition returns the transition of the row to a state.
func (r Row) Transition(state commonv1.TaskState, detail string) *lifecyclev1.TaskTransition {
	return &lifecyclev1.TaskTransition{
		State: state, At: timestamppb.New(r.StateAt), SessionEpoch: r.SessionEpoch,
		Attempt: r.Attempt, Detail: detail,
	}
}

// Enqueue queues a task in a transaction of the caller's, or returns the task that was queued with the same key before.
// The caller notifies the hub after its commit.
func Enqueue(ctx context.Context, tx pgx.Tx, s Spec) (Row, error) {
	made, err := s.Make()
	if err != nil {
		return Row{}, err
	}
	r := made.Row
	at, err := pg.One[QueuedAt](ctx, tx, enqueueTask,
		r.TaskID, r.Type, r.NodeID, r.WorkspaceID, r.TenantID, r.RunID, r.Epoch, r.OpSeq,
		r.IdemKey, made.Payload, made.Within,
		r.CorrelationID, r.CreatedBy, made.SecretKeys)
	if errors.Is(err, pgx.ErrNoRows) {
		return ByKey(ctx, tx, r.IdemKey)
	}
	if err != nil {
		return Row{}, fmt.Errorf("queue task: %w", err)
	}
	r = r.Queued(at)
	if _, err := events.Append(ctx, tx, r.Event()); err != nil {
		return Row{}, fmt.Errorf("report task: %w", err)
	}
	return r, nil
}

// Made is a task that is to be queued.
type Made struct {
	Row        Row // without its times
	Payload    []byte
	Within     time.Duration
	SecretKeys string
	KeyID      string // of the key that signs it, if it was leased as it was queued
}

// Make returns the task of a request, with an id of its own.
func (s Spec) Make() (Made, error) {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(s.Payload)
	if err != nil {
		return Made{}, fmt.Errorf("encode payload: %w", err)
	}
	t := Made{Payload: payload, Within: s.StartWithin}
	if t.Within <= 0 {
		t.Within = 5 * time.Minute
	}
	if deploy, ok := s.Payload.(*nodev1.WorkloadDeploy); ok {
		t.SecretKeys = secretenv.KeysOfDeploy(deploy)
	}
	t.Row = Row{
		TaskID: ids.New(), Type: names.Of(s.Type), NodeID: s.NodeID, WorkspaceID: s.WorkspaceID, TenantID: s.TenantID,
		RunID: s.RunID, Epoch: s.Epoch, OpSeq: s.OpSeq, State: commonv1.TaskState_TASK_STATE_QUEUED,
		IdemKey: s.IdempotencyKey, Output: []byte{}, CorrelationID: s.CorrelationID, CreatedBy: s.CreatedBy, Version: 1,
	}
	return t, nil
}

// Queued returns the row with the times that the database gave it.
func (r Row) Queued(at QueuedAt) Row {
	r.CreatedAt, r.NotBefore, r.ExpiresAt, r.StateAt = at.CreatedAt, at.NotBefore, at.ExpiresAt, at.StateAt
	return r
}

// ByKey reads the task with an idempotency key; the error wraps pgx.ErrNoRows if there is none.
func ByKey(ctx context.Context, tx pgx.Tx, key string) (Row, error) {
	row, err := One(ctx, tx, taskByKey, key)
	if err != nil {
		return Row{}, fmt.Errorf("read task by key: %w", err)
	}
	return row, nil
}

// LastNumbered reads the task with the highest number among those whose idempotency key is prefix and a number. All
// those numbers must have the same number of digits. The bool is false if there is no such task.
func LastNumbered(ctx context.Context, tx pgx.Tx, prefix string) (Row, bool, error) {
	row, err := One(ctx, tx, lastNumbered, prefix)
	if errors.Is(err, pgx.ErrNoRows) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, fmt.Errorf("read last task by key: %w", err)
	}
	return row, true, nil
}

// Latest reads the newest task of a run whose idempotency key begins with prefix; the bool is false if there is none.
func Latest(ctx context.Context, tx pgx.Tx, runID, prefix string) (Row, bool, error) {
	r, err := pg.One[latestRecord](ctx, tx, latestOfRun, runID, prefix)
	if errors.Is(err, pgx.ErrNoRows) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, fmt.Errorf("read task of run: %w", err)
	}
	row, err := r.Parse(ctx)
	aside.Note(ctx, "task", r.TaskID, err)
	if err != nil {
		return Row{}, false, fmt.Errorf("read task of run: %w", err)
	}
	row.NodeCordoned = r.Cordoned
	return row, true, nil
}

// Clean returns s as valid UTF-8 without NUL bytes, which Postgres refuses, and cut to limit bytes.
func Clean(s string, limit int) string {
	s = strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", ""), "\uFFFD")
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit-len("…")], "") + "…"
	}
	return s
}
