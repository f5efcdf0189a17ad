package watchdog

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Short names.
const (
	triggerStalled     = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED
	triggerSession     = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_SESSION_LOST
	triggerRegister    = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_REGISTER_FAILING
	triggerManual      = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_MANUAL
	outcomeOpen        = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_OPEN
	outcomeRecovered   = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED
	outcomeFailed      = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_FAILED
	outcomeWithheld    = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD
	placementStatic    = "static"
	byItself           = "by itself"
	withheldByBrake    = "brake"
	withheldByIdentity = "identity"
	withheldByMachine  = "machine"
	withheldByPerson   = "person"
	withheldByOwner    = "lifecycle"
	withheldByDeafness = "listening"
	withheldByAttempts = "attempts"
)

// record is a row of recovery_record.
type record struct {
	ID, WorkspaceID, Workspace, TenantID string
	Trigger                              commonv1.RecoveryTrigger
	Outcome                              commonv1.RecoveryOutcome
	Step, ErrorCode, Cause               string
	WhatWorked, OperationID              string
	Withheld, WithheldBy                 string
	NextAt                               *time.Time
	DetectedAt                           time.Time
	StartedAt, EndedAt                   *time.Time
	Impact                               string
	Attempts                             int32
	CorrelationID                        string
	Version                              int64

	Unit, Placement, NodeID, RunID string
	Asked, Answered                int32
	AskedEpoch                     int64
	Following, ByPerson            bool
	Refusals                       int32
	LastFailure                    string
}

const recordColumns = `c.record_id::text, c.workspace_id::text, c.workspace, c.tenant_id::text, c.trigger, c.outcome, c.step, c.error_code, c.cause,
	c.what_worked, c.operation_id, c.withheld_because, c.withheld_by, c.next_at, c.detected_at, c.started_at, c.ended_at, c.user_impact, c.attempts,
	c.correlation_id, c.version, c.unit, c.placement, COALESCE(c.node_id::text, ''), c.run_id, c.asked, c.answered, c.following, c.by_person, c.refusals,
	c.last_failure, c.asked_epoch`

func scanRecord(row pgx.Row, more ...any) (*record, error) {
	r := &record{}
	var trigger, outcome string
	err := row.Scan(append([]any{
		&r.ID, &r.WorkspaceID, &r.Workspace, &r.TenantID, &trigger, &outcome, &r.Step, &r.ErrorCode, &r.Cause, &r.WhatWorked, &r.OperationID, &r.Withheld,
		&r.WithheldBy, &r.NextAt, &r.DetectedAt, &r.StartedAt, &r.EndedAt, &r.Impact, &r.Attempts, &r.CorrelationID, &r.Version, &r.Unit, &r.Placement,
		&r.NodeID, &r.RunID, &r.Asked, &r.Answered, &r.Following, &r.ByPerson, &r.Refusals, &r.LastFailure,
		&r.AskedEpoch,
	}, more...)...)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what it read
	}
	if r.Trigger, err = names.Parse[commonv1.RecoveryTrigger](trigger); err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	if r.Outcome, err = names.Parse[commonv1.RecoveryOutcome](outcome); err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	return r, nil
}

// key is the idempotency key of the attempt that was written down last.
func (r *record) key() string { return fmt.Sprintf("watchdog/%s/%d", r.ID, r.Asked) }

// pending says that a request was written down and its answer is not known.
func (r *record) pending() bool { return r.Asked > r.Answered }

// withhold keeps the record from being acted on, and says why.
func (r *record) withhold(by, because string, next *time.Time) {
	r.Outcome, r.WithheldBy, r.Withheld, r.NextAt = outcomeWithheld, by, because, next
}

// proceed takes back what kept it.
func (r *record) proceed() {
	r.Outcome, r.WithheldBy, r.Withheld, r.NextAt = outcomeOpen, "", "", nil
}

// end closes the record.
func (r *record) end(outcome commonv1.RecoveryOutcome, worked string, now time.Time) {
	r.Outcome, r.WhatWorked, r.EndedAt, r.Following = outcome, worked, &now, false
	if outcome == outcomeRecovered {
		r.WithheldBy, r.Withheld = "", ""
	}
	r.NextAt = nil
}

// Proto is the record as its event and the API show it.
func (r *record) Proto() *recoveryv1.RecoveryRecord {
	out := &recoveryv1.RecoveryRecord{
		RecordId: r.ID, WorkspaceId: r.WorkspaceID, Workspace: r.Workspace, TenantId: r.TenantID, Trigger: r.Trigger, Outcome: r.Outcome, Step: r.Step,
		ErrorCode: r.ErrorCode, Cause: r.Cause, WhatWorked: r.WhatWorked, OperationId: r.OperationID, WithheldBecause: r.Withheld,
		NextAt: stamp(r.NextAt), DetectedAt: timestamppb.New(r.DetectedAt), StartedAt: stamp(r.StartedAt), EndedAt: stamp(r.EndedAt),
		UserImpact: r.Impact, Attempts: r.Attempts, CorrelationId: r.CorrelationID, Version: r.Version,
	}
	if r.EndedAt != nil {
		out.TotalSeconds = r.EndedAt.Sub(r.DetectedAt).Seconds()
	}
	return out
}

func (r *record) event() events.Event {
	return events.Event{
		Kind: "recovery_record.changed", AggregateType: "recovery_record", AggregateID: r.ID, AggregateVersion: r.Version, Payload: r.Proto(),
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, WorkflowID: r.OperationID, NodeID: r.NodeID,
		},
	}
}

func stamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}

// insert adds a new record, unless its workspace has an open one.
func (r *record) insert(ctx context.Context, tx pgx.Tx) (bool, error) {
	r.Version = 1
	tag, err := tx.Exec(ctx, `INSERT INTO recovery.recovery_record (record_id, workspace_id, workspace, tenant_id, trigger, outcome, step, error_code, cause,
			what_worked, operation_id, detected_at, started_at, ended_at, user_impact, correlation_id, unit, placement, node_id, run_id, attempts, by_person)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, NULLIF($19, '')::uuid, $20, $21, $22)
		ON CONFLICT (workspace_id) WHERE ended_at IS NULL DO NOTHING`,
		r.ID, r.WorkspaceID, r.Workspace, r.TenantID, names.Of(r.Trigger), names.Of(r.Outcome), r.Step, r.ErrorCode, r.Cause, r.WhatWorked, r.OperationID,
		r.DetectedAt, r.StartedAt, r.EndedAt, r.Impact, r.CorrelationID, r.Unit, r.Placement, r.NodeID, r.RunID, r.Attempts, r.ByPerson)
	if err != nil {
		return false, fmt.Errorf("insert recovery: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return false, nil
	}
	_, err = events.Append(ctx, tx, r.event())
	return true, err //nolint:wrapcheck // it says what it did
}

// save writes the record over the version that it was read at, and reports it.
func (r *record) save(ctx context.Context, tx pgx.Tx) error {
	err := tx.QueryRow(ctx, `
		UPDATE recovery.recovery_record SET trigger = $3, outcome = $4, step = $5, error_code = $6, cause = $7, what_worked = $8, operation_id = $9,
			withheld_because = $10, withheld_by = $11, next_at = $12, started_at = $13, ended_at = $14, user_impact = $15, attempts = $16, asked = $17,
			answered = $18, following = $19, by_person = $20, refusals = $21, last_failure = $22, asked_epoch = $23,
			version = version + 1
		WHERE record_id = $1 AND version = $2 AND ended_at IS NULL RETURNING version`,
		r.ID, r.Version, names.Of(r.Trigger), names.Of(r.Outcome), r.Step, r.ErrorCode, r.Cause, r.WhatWorked, r.OperationID, r.Withheld, r.WithheldBy,
		r.NextAt, r.StartedAt, r.EndedAt, r.Impact, r.Attempts, r.Asked, r.Answered, r.Following, r.ByPerson, r.Refusals, r.LastFailure,
		r.AskedEpoch).Scan(&r.Version)
	if errors.Is(err, pgx.ErrNoRows) {
		return errMoved
	}
	if err != nil {
		return fmt.Errorf("write recovery: %w", err)
	}
	_, err = events.Append(ctx, tx, r.event())
	return err //nolint:wrapcheck // it says what it did
}

// errMoved says that another replica changed the row meanwhile: whoever meets it looks again.
var errMoved = fault.New(commonv1.Reason_REASON_CONFLICT, "the recovery changed meanwhile")

// readRecord reads one under its lock.
func readRecord(ctx context.Context, tx pgx.Tx, id string) (*record, error) {
	r, err := scanRecord(tx.QueryRow(ctx, `SELECT `+recordColumns+` FROM recovery.recovery_record c WHERE c.record_id = $1 FOR UPDATE`, id))
	if err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	return r, nil
}

// clock reads the one that decides.
func clock(ctx context.Context, q pg.Querier) (time.Time, error) {
	var now time.Time
	if err := q.QueryRow(ctx, `SELECT mesh.clock()`).Scan(&now); err != nil {
		return now, fmt.Errorf("read clock: %w", err)
	}
	return now, nil
}
