package watchdog

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

var (
	insertNew = pg.Define(pg.RoleRecovery, "watchdog.insert_records", `
		INSERT INTO recovery.recovery_record (record_id, workspace_id, workspace, tenant_id, trigger, outcome, step,
			error_code, cause, what_worked, operation_id, detected_at, started_at, ended_at, user_impact, correlation_id, unit,
			placement, node_id, run_id, attempts, by_person)
		SELECT x.record_id, x.workspace_id, x.workspace, x.tenant_id, x.trigger, x.outcome, x.step, x.error_code, x.cause,
			x.what_worked, x.operation_id, x.detected_at, x.started_at, x.ended_at, x.user_impact, x.correlation_id, x.unit,
			x.placement, NULLIF(x.node_id, '')::uuid, x.run_id, x.attempts, x.by_person
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::text[], $8::text[],
			$9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[],
			$18::timestamptz[], $19::timestamptz[], $20::timestamptz[], $21::integer[], $22::boolean[])
			AS x (record_id, workspace_id, workspace, tenant_id, trigger, outcome, step, error_code, cause, what_worked,
				operation_id, user_impact, correlation_id, unit, placement, node_id, run_id, detected_at, started_at, ended_at,
				attempts, by_person)
		ON CONFLICT (workspace_id) WHERE ended_at IS NULL DO NOTHING
		RETURNING record_id::text`)

	updateOpen = pg.Define(pg.RoleRecovery, "watchdog.update_records", `
		UPDATE recovery.recovery_record c
			SET trigger = x.trigger, outcome = x.outcome, step = x.step, error_code = x.error_code, cause = x.cause,
			what_worked = x.what_worked, operation_id = x.operation_id, withheld_because = x.withheld_because,
			withheld_by = x.withheld_by, next_at = x.next_at, started_at = x.started_at, ended_at = x.ended_at,
			user_impact = x.user_impact, attempts = x.attempts, asked = x.asked, answered = x.answered,
			following = x.following, by_person = x.by_person, refusals = x.refusals, last_failure = x.last_failure,
			asked_epoch = x.asked_epoch, version = c.version + 1
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
			$9::text[], $10::text[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::timestamptz[],
			$16::integer[], $17::integer[], $18::integer[], $19::integer[], $20::boolean[], $21::boolean[], $22::bigint[],
			$23::bigint[])
			AS x (record_id, trigger, outcome, step, error_code, cause, what_worked, operation_id, withheld_because,
				withheld_by, user_impact, last_failure, next_at, started_at, ended_at, attempts, asked, answered, refusals,
				following, by_person, version, asked_epoch)
		WHERE c.record_id = x.record_id AND c.version = x.version AND c.ended_at IS NULL`)
)

// insertRecords inserts new records by one statement, except those whose workspace has an open one, and appends their
// events. It returns the inserted ones.
func insertRecords(ctx context.Context, tx pgx.Tx, list []*record) ([]*record, error) {
	if len(list) == 0 {
		return nil, nil
	}
	args := append(pg.Texts(list, func(r *record) []string {
		return []string{
			r.ID, r.WorkspaceID, r.Workspace, r.TenantID, names.Of(r.Trigger), names.Of(r.Outcome), r.Step, r.ErrorCode,
			r.Cause, r.WhatWorked, r.OperationID, r.Impact, r.CorrelationID, r.Unit, r.Placement, r.NodeID, r.RunID,
		}
	}), pg.Column(list, func(r *record) time.Time { return r.DetectedAt }),
		pg.Column(list, func(r *record) *time.Time { return r.StartedAt }),
		pg.Column(list, func(r *record) *time.Time { return r.EndedAt }),
		pg.Column(list, func(r *record) int32 { return r.Attempts }),
		pg.Column(list, func(r *record) bool { return r.ByPerson }))
	stored, err := pg.Values[string](ctx, tx, insertNew, args...)
	if err != nil {
		return nil, fmt.Errorf("insert recoveries: %w", err)
	}
	isStored := make(map[string]bool, len(stored))
	for _, id := range stored {
		isStored[id] = true
	}
	out := make([]*record, 0, len(stored))
	for _, r := range list {
		if isStored[r.ID] {
			r.Version = 1
			out = append(out, r)
		}
	}
	return out, appendEvents(ctx, tx, out)
}

// saveRecords updates open records by one statement, and appends their events. It returns errMoved if the row of any of
// them no longer has the version that was read.
func saveRecords(ctx context.Context, tx pgx.Tx, list ...*record) error {
	if len(list) == 0 {
		return nil
	}
	args := append(pg.Texts(list, func(r *record) []string {
		return []string{
			r.ID, names.Of(r.Trigger), names.Of(r.Outcome), r.Step, r.ErrorCode, r.Cause, r.WhatWorked, r.OperationID,
			r.Withheld, r.WithheldBy, r.Impact, r.LastFailure,
		}
	}), pg.Column(list, func(r *record) *time.Time { return r.NextAt }),
		pg.Column(list, func(r *record) *time.Time { return r.StartedAt }),
		pg.Column(list, func(r *record) *time.Time { return r.EndedAt }),
		pg.Column(list, func(r *record) int32 { return r.Attempts }),
		pg.Column(list, func(r *record) int32 { return r.Asked }),
		pg.Column(list, func(r *record) int32 { return r.Answered }),
		pg.Column(list, func(r *record) int32 { return r.Refusals }),
		pg.Column(list, func(r *record) bool { return r.Following }),
		pg.Column(list, func(r *record) bool { return r.ByPerson }),
		pg.Column(list, func(r *record) int64 { return r.Version }),
		pg.Column(list, func(r *record) int64 { return r.AskedEpoch }))
	var saved pgconn.CommandTag
	err := fleet.Joined(ctx, tx, len(list), func() error {
		var err error
		saved, err = pg.Exec(ctx, tx, updateOpen, args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("write recoveries: %w", err)
	}
	if saved.RowsAffected() < int64(len(list)) {
		return errMoved
	}
	for _, r := range list {
		r.Version++
	}
	return appendEvents(ctx, tx, list)
}

// appendEvents appends the event of each record.
func appendEvents(ctx context.Context, tx pgx.Tx, list []*record) error {
	if len(list) == 0 {
		return nil
	}
	_, err := events.Append(ctx, tx, pg.Column(list, (*record).event)...)
	return err
}
