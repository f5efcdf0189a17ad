package watchdog

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// brake is the row of the fleet brake.
type brake struct {
	Engaged       bool       `db:"engaged"`
	Reason        string     `db:"reason"`
	Affected      int32      `db:"affected"`
	Fleet         int32      `db:"fleet"`
	Most          int32      `db:"most"`
	Since         *time.Time `db:"since"`
	IncidentID    string     `db:"incident_id"`
	ReleasedBy    string     `db:"released_by"`
	ReleaseReason string     `db:"release_reason"`
	ReleasedAt    *time.Time `db:"released_at"`
	CalmSince     *time.Time `db:"calm_since"`
	Cause         string     `db:"cause"`
	Version       int64      `db:"version"`
}

// The causes that engage the brake.
const (
	causeFailures = "failures" // failures of workspaces and machines
	causeRecords  = "records"  // records of nodes that recovery lacks
)

// affected counts the units that failed within the brake's window, and those that are still broken.
type affected struct {
	Lately int32 `db:"lately"`
	Still  int32 `db:"still"`
}

var (
	// An advisory lock writes nothing to the write-ahead log, and most rounds change nothing. It is taken by a statement
	// of its own before the brake is read, so that the read sees what the last holder committed. One build took this lock
	// alone.
	takeBrakeLock = pg.Define(pg.RoleRecovery, "watchdog.take_brake_lock",
		`SELECT pg_advisory_xact_lock(hashtextextended('recovery.brake', 0))`)

	readBrakeRow = pg.Define(pg.RoleRecovery, "watchdog.read_brake",
		`SELECT `+pg.Columns[brake]("b")+` FROM recovery.brake b`)

	// Every build except that one locks the row before it changes anything.
	lockBrakeRow = pg.Define(pg.RoleRecovery, "watchdog.lock_brake",
		`SELECT `+pg.Columns[brake]("b")+` FROM recovery.brake b FOR UPDATE`)

	updateBrake = pg.Define(pg.RoleRecovery, "watchdog.update_brake", `
		UPDATE recovery.brake SET engaged = $1, reason = $2, affected = $3, fleet = $4, most = $5, since = $6, incident_id = $7,
			released_by = $8, release_reason = $9, released_at = $10, calm_since = $11, version = $12, cause = $13`)

	countAffected = pg.Define(pg.RoleRecovery, "watchdog.count_affected", `
		SELECT count(DISTINCT unit) FILTER (WHERE at > $1)::int AS lately, count(DISTINCT unit) FILTER (WHERE broken)::int AS still FROM (
			SELECT c.unit, c.detected_at AS at, c.ended_at IS NULL AND NOT c.by_person AS broken FROM recovery.recovery_record c
			WHERE c.unit <> '' AND (c.detected_at > $1 OR c.ended_at IS NULL)
			UNION ALL SELECT i.key, i.opened_at, i.closed_at IS NULL FROM recovery.incident i
			WHERE i.kind = 'machine_unreachable' AND (i.opened_at > $1 OR i.closed_at IS NULL)) x`)
)

// leastAffected is the number of units that may fail at once in any fleet, however small.
const leastAffected = 2

// mostAffected is the number of units above which the brake engages.
func mostAffected(fleet int32, fraction float64) int32 {
	return max(int32(fraction*float64(fleet)+1e-9), leastAffected)
}

// readBrake reads the brake under an advisory lock that excludes other callers until the transaction ends. With lock it
// locks the row as well, which a transaction must do before it writes or requests anything: replicas of earlier builds
// take the row lock alone.
func readBrake(ctx context.Context, tx pgx.Tx, lock bool) (*brake, error) {
	read := readBrakeRow
	if lock {
		read = lockBrakeRow
	}
	var b brake
	var batch pg.Batch
	batch.Queue(takeBrakeLock)
	batch.Queue(read).Query(func(rows pgx.Rows) error {
		var err error
		b, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[brake])
		return err
	})
	if err := batch.Send(ctx, tx); err != nil {
		return nil, fmt.Errorf("read the brake: %w", err)
	}
	return &b, nil
}

// Proto returns the brake as its event and the API show it.
func (b *brake) Proto() *recoveryv1.Brake {
	return &recoveryv1.Brake{
		Engaged: b.Engaged, Reason: b.Reason, Affected: b.Affected, Fleet: b.Fleet, Limit: b.Most, Since: stamp(b.Since),
		IncidentId: b.IncidentID, ReleasedBy: b.ReleasedBy, ReleaseReason: b.ReleaseReason, ReleasedAt: stamp(b.ReleasedAt),
		Version: b.Version,
	}
}

// save writes the brake, and appends its event if aloud is true.
func (b *brake) save(ctx context.Context, tx pgx.Tx, aloud bool) (string, error) {
	if aloud {
		b.Version++
	}
	_, err := pg.Exec(ctx, tx, updateBrake, b.Engaged, b.Reason, b.Affected, b.Fleet, b.Most, b.Since, b.IncidentID,
		b.ReleasedBy, b.ReleaseReason, b.ReleasedAt, b.CalmSince, b.Version, b.Cause)
	if err != nil {
		return "", fmt.Errorf("write the brake: %w", err)
	}
	if !aloud {
		return "", nil
	}
	return events.Append(ctx, tx, b.event())
}

func (b *brake) event() events.Event {
	return events.Event{
		Kind: "brake.changed", AggregateType: "brake", AggregateID: "fleet", AggregateVersion: b.Version,
		Payload: b.Proto(),
	}
}

// brakeFleet engages the brake when too many units fail at once, and releases it when the cause has been gone for
// BrakeDwell.
func (j *evaluation) brakeFleet(ctx context.Context, fraction float64) error {
	b, cfg := j.brake, j.w.cfg
	j.fraction = fraction
	since := j.now.Add(-cfg.BrakeWindow)
	if b.ReleasedAt != nil && b.ReleasedAt.After(since) {
		since = *b.ReleasedAt // failures from before the last release do not engage it again
	}
	count, err := pg.One[affected](ctx, j.tx, countAffected, since)
	if err != nil {
		return fmt.Errorf("count the affected: %w", err)
	}
	// The size of the fleet is read only if something has failed.
	var fleet int32
	if b.Engaged || count.Lately > 0 {
		if fleet, err = j.fleet(ctx); err != nil {
			return err
		}
	}
	most := mostAffected(fleet, fraction)
	missing, err := wave.Read(ctx, j.tx, j.limits)
	if err != nil {
		return err
	}
	j.out.Engaged = b.Engaged
	switch {
	case b.Engaged:
		return j.whileEngaged(ctx, count.Still, fleet, most, missing)
	case missing.Over(j.limits):
		return j.engageForRecords(ctx, missing)
	case count.Lately > most:
		b.Affected, b.Fleet, b.Most, b.Cause = count.Lately, fleet, most, causeFailures
		b.Reason = fmt.Sprintf("%d of %d instances and machines failed within %s, more than %d: automatic remedies have stopped, since the cause is rather ours than theirs",
			count.Lately, fleet, cfg.BrakeWindow, most)
		return j.engage(ctx, &incident{
			OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW,
			NextAction: "find what they have in common: `gpuaas incidents get`, `gpuaas status`; then `gpuaas brake release --reason TEXT`",
		})
	}
	return nil
}

// engageForRecords engages the brake because recovery lacks records of too many nodes.
func (j *evaluation) engageForRecords(ctx context.Context, missing wave.State) error {
	b, most := j.brake, j.limits.Most(missing.Fleet)
	reasons, nodes, err := wave.Describe(ctx, j.tx)
	if err != nil {
		return err
	}
	b.Affected, b.Fleet, b.Most, b.Cause = missing.Suspects, missing.Fleet, most, causeRecords
	b.Reason = fmt.Sprintf("recovery lacks records of %d nodes that asked within %s (%s), more than %d: they are told to wait, and automatic remedies have stopped, "+
		"since what is missing is rather lost by us than wrong with them", missing.Suspects, wave.Window, reasons, most)
	return j.engage(ctx, &incident{
		OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_DATABASE, Nodes: nodes,
		NextAction: "find out what recovery has lost: was its database restored (docs/restore.md), do its replicas have the same keys? Nodes come back by themselves " +
			"once the records are back; to refuse those that wait for good: `gpuaas brake release --reason TEXT`",
	})
}

// engage stops automatic recoveries and opens the incident. The caller has set the brake's numbers and its reason.
func (j *evaluation) engage(ctx context.Context, i *incident) error {
	if err := j.writes(); err != nil {
		return err
	}
	b, now := j.brake, j.now
	b.Engaged, b.Since, b.CalmSince = true, &now, nil
	b.ReleasedBy, b.ReleaseReason, b.ReleasedAt = "", "", nil
	j.out.Engaged = true
	i.Kind, i.Key, i.Severity, i.Summary = kindBrake, "fleet", commonv1.Severity_SEVERITY_P0, b.Reason
	for _, r := range j.records {
		i.about(r.TenantID, r.WorkspaceID, r.NodeID)
	}
	if err := j.raise(ctx, i); err != nil {
		return err
	}
	b.IncidentID = i.ID
	j.w.deps.Logger.ErrorContext(ctx, "the fleet brake is engaged: automatic remedies have stopped",
		slog.String("cause", b.Cause))
	if err := decided(ctx, j.tx, b, "brake.engage", b.Reason); err != nil {
		return err
	}
	_, err := b.save(ctx, j.tx, true)
	return err
}

// decided writes the audit entry of a decision about the brake. It must be called before the brake's own event is
// appended, whose id is the position that is returned to the person.
func decided(ctx context.Context, tx pgx.Tx, b *brake, action, reason string) error {
	_, err := audit.Record(ctx, tx, audit.Entry{
		Action: action, Reason: reason, SubjectType: "brake", SubjectID: "fleet",
		Details: map[string]any{"affected": b.Affected, "fleet": b.Fleet, "limit": b.Most, "incident_id": b.IncidentID},
	})
	return err
}

func (j *evaluation) whileEngaged(ctx context.Context, still, fleet, most int32, missing wave.State) error {
	b := j.brake
	before := *b
	if b.Cause == causeRecords {
		b.Affected = missing.Suspects
	} else {
		b.Affected, b.Fleet, b.Most = still, fleet, most
	}
	aloud := before.Affected != b.Affected || before.Most != b.Most
	switch {
	case still > most, missing.Over(j.limits):
		b.CalmSince = nil
	case b.CalmSince == nil:
		now := j.now
		b.CalmSince = &now
	case j.now.Sub(*b.CalmSince) >= j.w.cfg.BrakeDwell:
		if err := j.writes(); err != nil {
			return err
		}
		if err := release(ctx, j.tx, b, requesterName,
			fmt.Sprintf("no more than %d have been affected for %s", b.Most, j.w.cfg.BrakeDwell), j.now); err != nil {
			return err
		}
		j.out.Engaged, aloud = false, true
		j.w.deps.Logger.InfoContext(ctx, "the fleet brake has let go: the cause has gone")
	}
	if b.Engaged {
		i := &incident{Kind: kindBrake, Key: "fleet"}
		for _, r := range j.records {
			i.about(r.TenantID, r.WorkspaceID, r.NodeID)
		}
		if err := j.touch(ctx, i); err != nil {
			return err
		}
	}
	if !aloud && (before.CalmSince == nil) == (b.CalmSince == nil) {
		return nil
	}
	if err := j.writes(); err != nil {
		return err
	}
	_, err := b.save(ctx, j.tx, aloud)
	return err
}

// release releases the brake and closes its incident. The caller must save the brake.
func release(ctx context.Context, tx pgx.Tx, b *brake, by, reason string, now time.Time) error {
	b.Engaged, b.ReleasedBy, b.ReleaseReason, b.ReleasedAt, b.CalmSince = false, by, reason, &now, nil
	if err := decided(ctx, tx, b, "brake.release", reason); err != nil {
		return err
	}
	return closeIncident(ctx, tx, kindBrake, "fleet", by, now)
}
