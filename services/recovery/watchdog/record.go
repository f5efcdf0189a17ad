package watchdog

import (
	"context"
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
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// Short names.
const (
	triggerStalled     = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED
	triggerSession     = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_SESSION_LOST
	triggerRegister    = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_REGISTER_FAILING
	triggerManual      = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_MANUAL
	triggerEmptied     = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_NODE_EMPTIED
	outcomeOpen        = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_OPEN
	outcomeRecovered   = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED
	outcomeFailed      = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_FAILED
	outcomeWithheld    = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD
	kindChurn          = commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET
	kindMachine        = commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE
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
	ID            string                   `db:"record_id" expr:"@.record_id::text"`
	WorkspaceID   string                   `db:"workspace_id" expr:"@.workspace_id::text"`
	Workspace     string                   `db:"workspace"`
	TenantID      string                   `db:"tenant_id" expr:"@.tenant_id::text"`
	Trigger       commonv1.RecoveryTrigger `db:"-"`
	Outcome       commonv1.RecoveryOutcome `db:"-"`
	Step          string                   `db:"step"`
	ErrorCode     string                   `db:"error_code"`
	Cause         string                   `db:"cause"`
	WhatWorked    string                   `db:"what_worked"`
	OperationID   string                   `db:"operation_id"`
	Withheld      string                   `db:"withheld_because"`
	WithheldBy    string                   `db:"withheld_by"`
	NextAt        *time.Time               `db:"next_at"`
	DetectedAt    time.Time                `db:"detected_at"`
	StartedAt     *time.Time               `db:"started_at"`
	EndedAt       *time.Time               `db:"ended_at"`
	Impact        string                   `db:"user_impact"`
	Attempts      int32                    `db:"attempts"`
	CorrelationID string                   `db:"correlation_id"`
	Version       int64                    `db:"version"`

	Unit        string `db:"unit"`
	Placement   string `db:"placement"`
	NodeID      string `db:"node_id" expr:"COALESCE(@.node_id::text, '')"`
	RunID       string `db:"run_id"`
	Asked       int32  `db:"asked"`
	Answered    int32  `db:"answered"`
	AskedEpoch  int64  `db:"asked_epoch"`
	Following   bool   `db:"following"`
	ByPerson    bool   `db:"by_person"`
	Refusals    int32  `db:"refusals"`
	LastFailure string `db:"last_failure"`
}

// requester returns as whom lifecycle is asked.
func (r *record) requester() string {
	if r.Trigger == triggerEmptied {
		return requesterRecovery
	}
	return requesterWatchdog
}

// recordRow is a record as it is stored.
type recordRow struct {
	record
	TriggerText string `db:"trigger"`
	OutcomeText string `db:"outcome"`
}

var (
	lockRecord = pg.Define(pg.RoleRecovery, "watchdog.lock_record", `
		SELECT `+pg.Columns[recordRow]("c")+` FROM recovery.recovery_record c WHERE c.record_id = $1 FOR UPDATE`)

	readOpenRecords = pg.Define(pg.RoleRecovery, "watchdog.read_open_records", openRecordsSQL)
	lockOpenRecords = pg.Define(pg.RoleRecovery, "watchdog.lock_open_records", openRecordsSQL+` FOR UPDATE`)
)

var openRecordsSQL = `
	SELECT ` + pg.Columns[recordRow]("c") + ` FROM recovery.recovery_record c
		WHERE c.ended_at IS NULL ORDER BY c.record_id`

// read returns the record of a row.
func (r *recordRow) read() (*record, error) {
	var err error
	if r.Trigger, err = names.Parse[commonv1.RecoveryTrigger](r.TriggerText); err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	if r.Outcome, err = names.Parse[commonv1.RecoveryOutcome](r.OutcomeText); err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	return &r.record, nil
}

// key returns the idempotency key of the request that was stored last.
func (r *record) key() string { return fmt.Sprintf("watchdog/%s/%d", r.ID, r.Asked) }

// pending reports whether a request was stored and its answer is not known.
func (r *record) pending() bool { return r.Asked > r.Answered }

// withhold marks the record as withheld, with the cause, and the time of the next attempt if there is one.
func (r *record) withhold(by, because string, next *time.Time) {
	r.Outcome, r.WithheldBy, r.Withheld, r.NextAt = outcomeWithheld, by, because, next
}

// proceed clears the cause that withheld the record.
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

// Proto returns the record as its event and the API show it.
func (r *record) Proto() *recoveryv1.RecoveryRecord {
	out := &recoveryv1.RecoveryRecord{
		RecordId: r.ID, WorkspaceId: r.WorkspaceID, Workspace: r.Workspace, TenantId: r.TenantID, Trigger: r.Trigger,
		Outcome: r.Outcome, Step: r.Step, ErrorCode: r.ErrorCode, Cause: r.Cause, WhatWorked: r.WhatWorked,
		OperationId: r.OperationID, WithheldBecause: r.Withheld, NextAt: incident.Stamp(r.NextAt),
		DetectedAt: timestamppb.New(r.DetectedAt), StartedAt: incident.Stamp(r.StartedAt), EndedAt: incident.Stamp(r.EndedAt),
		UserImpact: r.Impact, Attempts: r.Attempts,
		CorrelationId: r.CorrelationID,
		Version:       r.Version,
	}
	if r.EndedAt != nil {
		out.TotalSeconds = r.EndedAt.Sub(r.DetectedAt).Seconds()
	}
	return out
}

func (r *record) event() events.Event {
	return events.Event{
		Kind: "recovery_record.changed", AggregateType: "recovery_record", AggregateID: r.ID, AggregateVersion: r.Version,
		Payload: r.Proto(),
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, WorkflowID: r.OperationID,
			NodeID: r.NodeID,
		},
	}
}

// errMoved is returned if another replica changed the row meanwhile. The caller must read the row again.
var errMoved = fault.New(commonv1.Reason_REASON_CONFLICT, "the recovery changed meanwhile")

// readRecord locks and returns one record.
func readRecord(ctx context.Context, tx pgx.Tx, id string) (*record, error) {
	r, err := pg.One[recordRow](ctx, tx, lockRecord, id)
	if err != nil {
		return nil, fmt.Errorf("read recovery: %w", err)
	}
	return r.read()
}
