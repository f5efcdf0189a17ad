package watchdog

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// ConsumerName is the key of the watchdog's cursor.
const ConsumerName = "watchdog"

// Kinds of events that it is told.
func Kinds() []string {
	return []string{"workspace.changed", "run.changed", "step.changed", "instance.changed", "session.changed", "replica.beat"}
}

// stalledStep is what two workspaces have in common that hang at the same step.
const stalledStep = "step_stalled"

// Apply puts one event into the watchdog's tables. It implements events.Apply.
func Apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	switch r.Kind {
	case "workspace.changed":
		return workspaceChanged(ctx, tx, r)
	case "run.changed":
		return runChanged(ctx, tx, r)
	case "step.changed":
		return stepChanged(ctx, tx, r)
	case "instance.changed":
		return instanceChanged(ctx, tx, r)
	case "session.changed":
		return sessionChanged(ctx, tx, r)
	case "replica.beat":
		return replicaBeat(ctx, tx, r)
	default:
		return nil // nothing of ours
	}
}

func workspaceChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	w := &lifecyclev1.Workspace{}
	if err := r.Decode(w); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	if w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED {
		return errors.New("the workspace has no state")
	}
	err := pg.QueueText(ctx, tx, `
		INSERT INTO recovery.watch_workspace AS t (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch, run_id, node_id, placement,
			register_failures, register_failing_since, last_error_code, last_error)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $9, $10, NULLIF($11, '')::uuid, $12, $13, CASE WHEN $13::int > 0 THEN $8::timestamptz END, $14, $15)
		ON CONFLICT (workspace_id) DO UPDATE SET version = EXCLUDED.version, tenant = EXCLUDED.tenant, name = EXCLUDED.name, state = EXCLUDED.state,
			state_at = EXCLUDED.state_at, epoch = EXCLUDED.epoch, run_id = EXCLUDED.run_id, node_id = EXCLUDED.node_id, placement = EXCLUDED.placement,
			register_failures = EXCLUDED.register_failures, last_error_code = EXCLUDED.last_error_code, last_error = EXCLUDED.last_error,
			register_failing_since = CASE WHEN t.epoch = EXCLUDED.epoch AND t.register_failures > 0 AND EXCLUDED.register_failures > 0
				THEN t.register_failing_since ELSE EXCLUDED.register_failing_since END
		WHERE t.version < EXCLUDED.version`,
		w.GetWorkspaceId(), r.AggregateVersion, w.GetTenantId(), w.GetTenant(), w.GetName(), names.Of(w.GetState()), at(w.GetStateAt(), r.CreatedAt), r.CreatedAt,
		w.GetEpoch(), w.GetRunId(), w.GetNodeId(), placementName(w.GetSpec().GetPlacement()), w.GetRegisterFailures(), w.GetLastErrorCode(), w.GetLastError())
	if err != nil {
		return fmt.Errorf("note workspace: %w", err)
	}
	return nil
}

// runFacts is what one event says of a run, beside the run itself.
type runFacts struct {
	undone, live, stalled bool
	step                  string                   // at which it is, or failed
	stuckAt               *lifecyclev1.StepAttempt // the attempt that is stalled
	failed                *lifecyclev1.StepAttempt // the attempt that made it go back
}

func readRun(run *lifecyclev1.Run) runFacts {
	f := runFacts{undone: run.GetPhase() == "undo"}
	switch run.GetState() { //nolint:exhaustive // the others are neither on their way up nor over
	case commonv1.RunState_RUN_STATE_PENDING, commonv1.RunState_RUN_STATE_RUNNING, commonv1.RunState_RUN_STATE_WAITING:
		f.live = true
	}
	if i := int(run.GetStep()); i >= 0 && i < len(run.GetStepNames()) {
		f.step = run.GetStepNames()[i]
	}
	f.stalled = f.live && !f.undone && run.GetStuckReason() != "" && run.GetCancelRequestedAt() == nil
	for _, a := range run.GetChangedSteps() {
		if a.GetDirection() != commonv1.Direction_DIRECTION_DO {
			continue
		}
		if a.GetStalled() {
			f.stuckAt = a
		}
		if a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_FAILED && (f.undone || !f.live) {
			f.failed = a
		}
	}
	return f
}

// recovers says whether runs of a kind bring a workspace back: they are kept from their first event.
func recovers(kind commonv1.OperationKind) bool {
	return kind == commonv1.OperationKind_OPERATION_KIND_RETRY || kind == commonv1.OperationKind_OPERATION_KIND_RECREATE
}

func runChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	run := &lifecyclev1.Run{}
	if err := r.Decode(run); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	if run.GetState() == commonv1.RunState_RUN_STATE_UNSPECIFIED {
		return errors.New("the run has no state")
	}
	f := readRun(run)
	step := f.step
	if f.failed != nil {
		step = f.failed.GetName()
	}
	var attempt int32
	var attemptVersion int64
	if f.stuckAt != nil {
		attempt, attemptVersion = f.stuckAt.GetAttempt(), f.stuckAt.GetVersion()
	}
	worth := f.stalled || f.undone || recovers(run.GetKind()) || (!f.live && run.GetState() != commonv1.RunState_RUN_STATE_SUCCEEDED) || run.GetCancelBy() != ""
	args := []any{
		run.GetRunId(), r.AggregateVersion, names.Of(run.GetKind()), names.Of(run.GetState()), run.GetPhase(), step, f.stalled, run.GetStuckReason(), attempt,
		attemptVersion, run.GetRequester(), run.GetParentRunId(), run.GetCancelBy(), run.GetErrorCode(), run.GetError(), layerName(run.GetErrorLayer()),
		moment(run.GetFinishedAt()), (f.undone || !f.live) && f.failed == nil,
	}
	// On the way back the step that failed stays.
	const set = `version = $2, kind = $3, state = $4, phase = $5, step = CASE WHEN $18 AND t.step <> '' THEN t.step ELSE $6 END, stalled = $7,
		stuck_reason = $8, attempt = $9, attempt_ver = $10, requester = $11, parent_run = $12, cancel_by = $13, error_code = $14, error = $15,
		error_layer = $16, finished_at = $17`
	sql := `UPDATE recovery.watch_run t SET ` + set + ` WHERE t.run_id = $1 AND t.version < $2`
	if worth {
		sql = `INSERT INTO recovery.watch_run AS t (run_id, version, kind, state, phase, step, stalled, stuck_reason, attempt, attempt_ver, requester,
				parent_run, cancel_by, error_code, error, error_layer, finished_at, workspace_id, tenant_id, created_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $19, $20, $21)
			ON CONFLICT (run_id) DO UPDATE SET ` + set + ` WHERE t.version < $2`
		args = append(args, run.GetWorkspaceId(), run.GetTenantId(), at(run.GetCreatedAt(), r.CreatedAt))
	}
	if err := pg.QueueText(ctx, tx, sql, args...); err != nil {
		return fmt.Errorf("note run: %w", err)
	}
	code, layer := "", ""
	switch {
	case f.failed != nil && run.GetCancelRequestedAt() == nil:
		code, layer = f.failed.GetErrorCode(), layerName(f.failed.GetErrorLayer())
	case f.stuckAt != nil && f.stalled:
		code, layer = stalledStep, layerName(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	}
	if code == "" || step == "" {
		return nil
	}
	err := pg.QueueText(ctx, tx, `INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING`,
		step, code, run.GetRunId(), run.GetWorkspaceId(), run.GetTenantId(), layer, r.CreatedAt)
	if err != nil {
		return fmt.Errorf("note failure: %w", err)
	}
	return nil
}

// stepChanged hears that a stalled attempt shows progress again, for a change of an attempt that has no event of its run. It takes the flag of the present
// attempt back, so that nothing is asked for what moves. It is no evidence of a recovery, and the end of an attempt is not even progress.
func stepChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	a := &lifecyclev1.StepAttempt{}
	if err := r.Decode(a); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	open := a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_RUNNING || a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING
	if a.GetStalled() || !open || a.GetDirection() != commonv1.Direction_DIRECTION_DO {
		return nil
	}
	err := pg.QueueText(ctx, tx, `UPDATE recovery.watch_run SET stalled = false
		WHERE run_id = $1 AND stalled AND attempt = $2 AND step = $3 AND attempt_ver < $4 AND stuck_reason LIKE $5 || '%'`,
		a.GetRunId(), a.GetAttempt(), a.GetName(), a.GetVersion(), stalledStep)
	if err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	return nil
}

func instanceChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	i := &lifecyclev1.Instance{}
	if err := r.Decode(i); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	err := pg.QueueText(ctx, tx, `
		INSERT INTO recovery.watch_instance AS t (workspace_id, epoch, version, instance_id, state, placement, node_id, started_at)
		VALUES ($1, $2, $3, $4, $5, $6, NULLIF($7, '')::uuid, $8)
		ON CONFLICT (workspace_id, epoch) DO UPDATE SET version = EXCLUDED.version, instance_id = EXCLUDED.instance_id, state = EXCLUDED.state,
			placement = EXCLUDED.placement, node_id = EXCLUDED.node_id, started_at = EXCLUDED.started_at
		WHERE t.instance_id <> EXCLUDED.instance_id OR t.version < EXCLUDED.version`,
		i.GetWorkspaceId(), i.GetEpoch(), r.AggregateVersion, i.GetInstanceId(), names.Of(i.GetState()), placementName(i.GetPlacement()), i.GetNodeId(),
		moment(i.GetStartedAt()))
	if err != nil {
		return fmt.Errorf("note instance: %w", err)
	}
	return nil
}

func sessionChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	s := &nodev1.SessionChanged{}
	if err := r.Decode(s); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	serving := !s.GetLate() && (s.GetState() == commonv1.SessionState_SESSION_STATE_ADMITTED || s.GetState() == commonv1.SessionState_SESSION_STATE_DRAINING)
	reason := ""
	if s.GetCloseReason() != commonv1.Reason_REASON_UNSPECIFIED {
		reason = names.Of(s.GetCloseReason())
	}
	err := pg.QueueText(ctx, tx, `
		INSERT INTO recovery.watch_session AS t (session_id, version, node_id, replica_id, generation, serving, since, close_reason)
		VALUES ($1, $2, $3, NULLIF($4, '')::uuid, $5, $6, $7, $8)
		ON CONFLICT (session_id) DO UPDATE SET version = EXCLUDED.version, replica_id = EXCLUDED.replica_id, generation = EXCLUDED.generation,
			serving = EXCLUDED.serving, close_reason = EXCLUDED.close_reason,
			since = CASE WHEN t.serving = EXCLUDED.serving THEN t.since ELSE EXCLUDED.since END
		WHERE t.version < EXCLUDED.version`,
		s.GetSessionId(), r.AggregateVersion, s.GetNodeId(), s.GetReplicaId(), s.GetGeneration(), serving, r.CreatedAt, reason)
	if err != nil {
		return fmt.Errorf("note session: %w", err)
	}
	if serving {
		return nil
	}
	err = pg.QueueText(ctx, tx, `DELETE FROM recovery.watch_session o USING recovery.watch_session n
		WHERE o.node_id = $1 AND n.node_id = $1 AND NOT o.serving AND (n.generation, n.session_id) > (o.generation, o.session_id)`, s.GetNodeId())
	if err != nil {
		return fmt.Errorf("forget sessions: %w", err)
	}
	return nil
}

// beatGap is the time without any replica's beat after which listening begins anew: four of their cadence.
const beatGap = 20 * time.Second

func replicaBeat(ctx context.Context, tx pgx.Tx, r events.Record) error {
	b := &nodev1.ReplicaBeat{}
	if err := r.Decode(b); err != nil {
		return err //nolint:wrapcheck // it says what it read
	}
	beat := at(b.GetBeatAt(), r.CreatedAt)
	err := pg.QueueText(ctx, tx, `INSERT INTO recovery.watch_replica AS t (replica_id, beat_at, leaving) VALUES ($1, $2, $3)
		ON CONFLICT (replica_id) DO UPDATE SET beat_at = EXCLUDED.beat_at, leaving = EXCLUDED.leaving WHERE t.beat_at < EXCLUDED.beat_at`,
		b.GetReplicaId(), beat, b.GetLeaving())
	if err != nil {
		return fmt.Errorf("note beat: %w", err)
	}
	if b.GetLeaving() {
		return nil
	}
	err = pg.QueueText(ctx, tx, `INSERT INTO recovery.watch_listening AS t (since, beat_at) VALUES ($1, $1)
		ON CONFLICT (singleton) DO UPDATE SET beat_at = EXCLUDED.beat_at,
			since = CASE WHEN EXCLUDED.beat_at - t.beat_at > make_interval(secs => $2) THEN EXCLUDED.beat_at ELSE t.since END
		WHERE t.beat_at < EXCLUDED.beat_at`, beat, beatGap.Seconds())
	if err != nil {
		return fmt.Errorf("note listening: %w", err)
	}
	return nil
}

// forget drops what nobody asks about any more.
func forget(ctx context.Context, tx pgx.Tx) error {
	for _, sql := range []string{
		`DELETE FROM recovery.watch_run r WHERE r.finished_at < mesh.clock() - interval '2 hours' AND NOT EXISTS (
			SELECT FROM recovery.recovery_record c WHERE c.workspace_id = r.workspace_id AND c.ended_at IS NULL)
			AND NOT EXISTS (SELECT FROM recovery.watch_workspace w WHERE w.workspace_id = r.workspace_id AND w.run_id = r.run_id AND w.state = 'failed')`,
		`DELETE FROM recovery.class_sighting WHERE seen_at < mesh.clock() - interval '1 day'`,
		`DELETE FROM recovery.watch_replica WHERE beat_at < mesh.clock() - interval '1 day' AND NOT EXISTS (
			SELECT FROM recovery.watch_session s WHERE s.replica_id = watch_replica.replica_id AND s.serving)`,
		`DELETE FROM recovery.watch_instance i WHERE i.state = 'ended' AND i.epoch < (
			SELECT w.epoch FROM recovery.watch_workspace w WHERE w.workspace_id = i.workspace_id)`,
		`DELETE FROM recovery.churn_bucket WHERE at < mesh.clock() - interval '1 day'`,
		`DELETE FROM recovery.watch_session s WHERE s.since < mesh.clock() - interval '1 day' AND (NOT s.serving OR NOT EXISTS (
			SELECT FROM recovery.watch_replica p WHERE p.replica_id = s.replica_id AND p.beat_at > mesh.clock() - interval '1 day'))
			AND NOT EXISTS (SELECT FROM recovery.watch_workspace w WHERE w.node_id = s.node_id AND w.state = 'active')`,
		`DELETE FROM recovery.watch_instance i USING recovery.watch_workspace w
			WHERE w.workspace_id = i.workspace_id AND w.state = 'decommissioned' AND w.state_at < mesh.clock() - interval '1 day'`,
		`DELETE FROM recovery.watch_workspace w WHERE w.state = 'decommissioned' AND w.state_at < mesh.clock() - interval '1 day' AND NOT EXISTS (
			SELECT FROM recovery.recovery_record c WHERE c.workspace_id = w.workspace_id AND c.ended_at IS NULL)`,
	} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return fmt.Errorf("forget what is over: %w", err)
		}
	}
	return nil
}

func layerName(l commonv1.OwnerLayer) string {
	if l == commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED {
		return ""
	}
	return names.Of(l)
}

func placementName(p commonv1.PlacementDriver) string {
	if p == commonv1.PlacementDriver_PLACEMENT_DRIVER_UNSPECIFIED {
		return ""
	}
	return names.Of(p)
}

func moment(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	out := t.AsTime()
	return &out
}

func at(t *timestamppb.Timestamp, otherwise time.Time) time.Time {
	if t == nil {
		return otherwise
	}
	return t.AsTime()
}
