package fleet

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
	"github.com/gpuaas/mesh/services/recovery/incident"
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
	ReleasedAt    *time.Time `db:"released_at"` // last; it stays while the brake is engaged again
	CalmSince     *time.Time `db:"calm_since"`
	Cause         string     `db:"cause"`
	Version       int64      `db:"version"`
}

// The causes that engage the brake.
const (
	causeFailures = "failures" // failures of workspaces and machines
	causeRecords  = "records"  // records of nodes that recovery lacks
)

// affected counts the units that failed within the brake's window, and those that are still broken. A node that people
// keep out is neither.
type affected struct {
	Lately int32 `db:"lately"`
	Still  int32 `db:"still"`
}

var (
	// An advisory lock writes nothing to the write-ahead log, and most rounds change nothing. It is taken by a statement
	// of its own before the brake is read, so that the read sees what the last holder committed. One build took this lock
	// alone.
	takeBrakeLock = pg.Define(pg.RoleRecovery, "fleet.take_brake_lock",
		`SELECT pg_advisory_xact_lock(hashtextextended('recovery.brake', 0))`)

	readBrakeRow = pg.Define(pg.RoleRecovery, "fleet.read_brake",
		`SELECT `+pg.Columns[brake]("b")+` FROM recovery.brake b`)

	// Every build except that one locks the row before it changes anything.
	lockBrakeRow = pg.Define(pg.RoleRecovery, "fleet.lock_brake",
		`SELECT `+pg.Columns[brake]("b")+` FROM recovery.brake b FOR UPDATE`)

	updateBrake = pg.Define(pg.RoleRecovery, "fleet.update_brake", `
		UPDATE recovery.brake
			SET engaged = $1, reason = $2, affected = $3, fleet = $4, most = $5, since = $6, incident_id = $7,
			released_by = $8, release_reason = $9, released_at = $10, calm_since = $11, version = $12, cause = $13`)

	countAffected = pg.Define(pg.RoleRecovery, "fleet.count_affected", `
		SELECT count(DISTINCT unit) FILTER (WHERE at > $1)::int AS lately,
			count(DISTINCT unit) FILTER (WHERE broken)::int AS still FROM (
			SELECT c.unit, c.detected_at AS at, c.ended_at IS NULL AND NOT c.by_person AS broken FROM recovery.recovery_record c
			WHERE c.unit <> '' AND (c.detected_at > $1 OR c.ended_at IS NULL)
				AND NOT EXISTS (SELECT FROM recovery.identity d
					WHERE d.node_id = c.node_id AND d.state IN ('quarantined', 'fenced'))
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
	out := &recoveryv1.Brake{
		Engaged: b.Engaged, Reason: b.Reason, Affected: b.Affected, Fleet: b.Fleet, Limit: b.Most,
		Since: incident.Stamp(b.Since), IncidentId: b.IncidentID, ReleasedBy: b.ReleasedBy, ReleaseReason: b.ReleaseReason,
		Version: b.Version,
	}
	if !b.Engaged {
		out.ReleasedAt = incident.Stamp(b.ReleasedAt)
	}
	return out
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

// EvaluateBrake engages the brake when too many units fail at once, and releases it when the cause has been gone for
// BrakeDwell. concerned adds to the incident of the brake what it is about.
func (r *Round) EvaluateBrake(ctx context.Context, concerned func(*Incident)) error {
	b, cfg := r.brake, r.fleet.cfg
	since := r.now.Add(-cfg.BrakeWindow)
	if b.ReleasedAt != nil && b.ReleasedAt.After(since) {
		since = *b.ReleasedAt // failures from before the last release do not engage it again
	}
	count, err := pg.One[affected](ctx, r.tx, countAffected, since)
	if err != nil {
		return fmt.Errorf("count the affected: %w", err)
	}
	// The size of the fleet is read only if something has failed.
	var units int32
	if b.Engaged || count.Lately > 0 {
		if units, err = r.Units(ctx); err != nil {
			return err
		}
	}
	most := mostAffected(units, r.fraction)
	missing, err := wave.Read(ctx, r.tx, r.limits)
	if err != nil {
		return err
	}
	switch {
	case b.Engaged:
		return r.whileEngaged(ctx, count.Still, units, most, missing, concerned)
	case missing.Over(r.limits):
		return r.engageForRecords(ctx, missing, concerned)
	case count.Lately > most:
		b.Affected, b.Fleet, b.Most, b.Cause = count.Lately, units, most, causeFailures
		b.Reason = fmt.Sprintf("%d of %d instances and machines failed within %s, more than %d: automatic remedies have "+
			"stopped, since the cause is rather ours than theirs",
			count.Lately, units, cfg.BrakeWindow, most)
		return r.engage(ctx, concerned, &Incident{
			OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW,
			NextAction: "find what they have in common: `gpuaas incidents get`, `gpuaas status`; then `gpuaas brake release " +
				"--reason TEXT`",
		})
	}
	return nil
}

// engageForRecords engages the brake because recovery lacks records of too many nodes.
func (r *Round) engageForRecords(ctx context.Context, missing wave.State, concerned func(*Incident)) error {
	b, most := r.brake, r.limits.Most(missing.Fleet)
	reasons, nodes, err := wave.Describe(ctx, r.tx)
	if err != nil {
		return err
	}
	b.Affected, b.Fleet, b.Most, b.Cause = missing.Suspects, missing.Fleet, most, causeRecords
	b.Reason = fmt.Sprintf("recovery lacks records of %d nodes that asked within %s (%s), more than %d: they are told "+
		"to wait, and automatic remedies have stopped, "+
		"since what is missing is rather lost by us than wrong with them", missing.Suspects, wave.Window, reasons, most)
	return r.engage(ctx, concerned, &Incident{
		OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_DATABASE, Nodes: nodes,
		NextAction: "find out what recovery has lost: was its database restored (docs/restore.md), do its replicas have " +
			"the same keys? Nodes come back by themselves " +
			"once the records are back; to refuse those that wait for good: `gpuaas brake release --reason TEXT`",
	})
}

// engage stops automatic recoveries and opens the incident. The caller has set the brake's numbers and its reason.
func (r *Round) engage(ctx context.Context, concerned func(*Incident), i *Incident) error {
	if err := r.Writes(); err != nil {
		return err
	}
	b, now := r.brake, r.now
	b.Engaged, b.Since, b.CalmSince = true, &now, nil
	b.ReleasedBy, b.ReleaseReason = "", ""
	i.Kind, i.Key, i.Summary = kindBrake, "fleet", b.Reason
	concerned(i)
	if err := r.Raise(ctx, i); err != nil {
		return err
	}
	b.IncidentID = i.ID
	r.fleet.deps.Logger.ErrorContext(ctx, "the fleet brake is engaged: automatic remedies have stopped",
		slog.String("cause", b.Cause))
	if err := decided(ctx, r.tx, b, "brake.engage", b.Reason); err != nil {
		return err
	}
	_, err := b.save(ctx, r.tx, true)
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

func (r *Round) whileEngaged(ctx context.Context, still, units, most int32, missing wave.State,
	concerned func(*Incident),
) error {
	b := r.brake
	before := *b
	if b.Cause == causeRecords {
		b.Affected = missing.Suspects
	} else {
		b.Affected, b.Fleet, b.Most = still, units, most
	}
	aloud := before.Affected != b.Affected || before.Most != b.Most
	switch {
	case still > most, missing.Over(r.limits):
		b.CalmSince = nil
	case b.CalmSince == nil:
		now := r.now
		b.CalmSince = &now
	case r.now.Sub(*b.CalmSince) >= r.fleet.cfg.BrakeDwell:
		if err := r.Writes(); err != nil {
			return err
		}
		if err := release(ctx, r.tx, b, byWatchdog,
			fmt.Sprintf("no more than %d have been affected for %s", b.Most, r.fleet.cfg.BrakeDwell), r.now); err != nil {
			return err
		}
		aloud = true
		r.fleet.deps.Logger.InfoContext(ctx, "the fleet brake has let go: the cause has gone")
	}
	if b.Engaged {
		i := &Incident{Kind: kindBrake, Key: "fleet"}
		concerned(i)
		if err := r.touch(ctx, i); err != nil {
			return err
		}
	}
	if !aloud && (before.CalmSince == nil) == (b.CalmSince == nil) {
		return nil
	}
	if err := r.Writes(); err != nil {
		return err
	}
	_, err := b.save(ctx, r.tx, aloud)
	return err
}

// release releases the brake and closes its incident. The caller must save the brake.
func release(ctx context.Context, tx pgx.Tx, b *brake, by, reason string, now time.Time) error {
	b.Engaged, b.ReleasedBy, b.ReleaseReason, b.ReleasedAt, b.CalmSince = false, by, reason, &now, nil
	if err := decided(ctx, tx, b, "brake.release", reason); err != nil {
		return err
	}
	if by == byWatchdog {
		reason = "" // the incident ends by itself
	}
	return closeIncidents(ctx, tx, kindBrake, []string{"fleet"}, by, reason, now)
}
