package trust

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
)

// The phases of a rotation as rows have them.
var (
	phaseAnnounced = names.Of(recoveryv1.RotationPhase_ROTATION_PHASE_ANNOUNCED)
	phaseBoth      = names.Of(recoveryv1.RotationPhase_ROTATION_PHASE_BOTH_VALID)
	phaseDone      = names.Of(recoveryv1.RotationPhase_ROTATION_PHASE_DONE)
	phaseCancelled = names.Of(recoveryv1.RotationPhase_ROTATION_PHASE_CANCELLED)
)

// rotationRow is a row of a rotation of the node authority.
type rotationRow struct {
	ID          string    `db:"rotation_id" expr:"@.rotation_id::text"`
	Phase       string    `db:"phase"`
	WithRoot    bool      `db:"with_root"`
	Former      string    `db:"former"`
	FormerRoot  string    `db:"former_root"`
	Next        string    `db:"next"`
	NextRoot    string    `db:"next_root"`
	WaitsFor    string    `db:"waits_for"`
	Forced      bool      `db:"forced"`
	Reason      string    `db:"reason"`
	By          string    `db:"requested_by"`
	RequestedAt time.Time `db:"requested_at"`
	Since       time.Time `db:"since"`
	Version     int64     `db:"version"`
}

var (
	insertRotation = pg.Define(pg.RoleRecovery, "trust.insert_rotation", `
		INSERT INTO recovery.authority_rotation AS r (rotation_id, with_root, former, former_root, waits_for, reason,
			requested_by, idempotency_key)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING RETURNING `+pg.Columns[rotationRow]("r"))

	readRotationOf = pg.Define(pg.RoleRecovery, "trust.read_rotation_of_request", `
		SELECT `+pg.Columns[rotationRow]("r")+` FROM recovery.authority_rotation r
		WHERE r.requested_by = $1 AND r.idempotency_key = $2`)

	readOpenRotation = pg.Define(pg.RoleRecovery, "trust.read_open_rotation", `
		SELECT `+pg.Columns[rotationRow]("r")+` FROM recovery.authority_rotation r
		WHERE r.phase IN ('announced', 'both_valid')`)

	lockOpenRotation = pg.Define(pg.RoleRecovery, "trust.lock_open_rotation", `
		SELECT `+pg.Columns[rotationRow]("r")+` FROM recovery.authority_rotation r
		WHERE r.phase IN ('announced', 'both_valid') FOR UPDATE`)

	readLastRotation = pg.Define(pg.RoleRecovery, "trust.read_last_rotation", `
		SELECT `+pg.Columns[rotationRow]("r")+` FROM recovery.authority_rotation r
		ORDER BY r.requested_at DESC LIMIT 1`)

	saveRotation = pg.Define(pg.RoleRecovery, "trust.save_rotation", `
		UPDATE recovery.authority_rotation AS r SET phase = $2, next = $3, next_root = $4, waits_for = $5, forced = $6,
			since = CASE WHEN r.phase = $2 THEN r.since ELSE mesh.clock() END, version = r.version + 1
		WHERE r.rotation_id = $1 AND r.version = $7 RETURNING `+pg.Columns[rotationRow]("r"))

	insertHolder = pg.Define(pg.RoleRecovery, "trust.insert_holder", `
		INSERT INTO recovery.authority_holder (replica_id, issuer) VALUES ($1, $2)
		ON CONFLICT (replica_id) DO UPDATE SET issuer = EXCLUDED.issuer`)

	readHolders = pg.Define(pg.RoleRecovery, "trust.read_holders", `
		SELECT h.replica_id FROM recovery.authority_holder h WHERE h.issuer = $1`)

	deleteHolders = pg.Define(pg.RoleRecovery, "trust.delete_holders", `DELETE FROM recovery.authority_holder`)

	// lastOutstanding is when the last certificate of an issuer ends that counts; NULL: none counts.
	lastOutstanding = pg.Define(pg.RoleRecovery, "trust.last_outstanding", `
		SELECT max(s.not_after) FROM recovery.serial s
		WHERE s.issuer_fingerprint = $1 AND s.state IN ('current', 'next') AND s.not_after > mesh.clock()`)
)

// save writes the row if it is as it was read, and appends its event.
func (r *rotationRow) save(ctx context.Context, tx pgx.Tx) error {
	next, err := pg.One[rotationRow](ctx, tx, saveRotation, r.ID, r.Phase, r.Next, r.NextRoot, r.WaitsFor, r.Forced,
		r.Version)
	if err != nil {
		return fmt.Errorf("write rotation %s: %w", r.ID, err)
	}
	*r = next
	return r.append(ctx, tx)
}

func (r *rotationRow) append(ctx context.Context, tx pgx.Tx) error {
	_, err := events.Append(ctx, tx, events.Event{
		Kind: "authority_rotation.changed", AggregateType: "authority_rotation", AggregateID: r.ID,
		AggregateVersion: r.Version, Payload: r.message(), Correlation: events.Correlation{CorrelationID: r.ID},
	})
	if err != nil {
		return fmt.Errorf("append event of rotation %s: %w", r.ID, err)
	}
	return nil
}

// message returns the row as events and responses carry it. A phase of a newer build is unspecified.
func (r *rotationRow) message() *recoveryv1.AuthorityRotation {
	phase := aside.Value[recoveryv1.RotationPhase]("authority_rotation", r.ID, r.Phase)
	return &recoveryv1.AuthorityRotation{
		RotationId: r.ID, Phase: phase, WithRoot: r.WithRoot, FormerFingerprint: r.Former, NextFingerprint: r.Next,
		WaitsFor: r.WaitsFor, Reason: r.Reason, By: r.By, RequestedAt: timestamppb.New(r.RequestedAt),
		Since: timestamppb.New(r.Since), Version: r.Version,
	}
}

// rotation returns the last rotation, with how long certificates of the former issuer count; nil: there was none.
func rotation(ctx context.Context, tx pgx.Tx) (*recoveryv1.AuthorityRotation, error) {
	row, err := pg.One[rotationRow](ctx, tx, readLastRotation)
	if pg.IsNoRows(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the last rotation: %w", err)
	}
	out := row.message()
	if row.Phase == phaseAnnounced {
		live, err := liveReplicas(ctx, tx)
		if err != nil {
			return nil, err
		}
		out.WaitsFor = markGone(out.GetWaitsFor(), live)
	}
	if row.Phase == phaseBoth {
		last, err := pg.Value[*time.Time](ctx, tx, lastOutstanding, row.Former)
		if err != nil {
			return nil, fmt.Errorf("read certificates of the former issuer: %w", err)
		}
		if last != nil {
			out.WaitsFor += ": the last of them ends at " + last.UTC().Format(time.RFC3339)
		}
	}
	return out, nil
}

// liveReplicas returns the ids of the replicas for which a rotation waits.
func liveReplicas(ctx context.Context, tx pgx.Tx) ([]string, error) {
	holders, err := keyset.Holders(ctx, tx)
	if err != nil {
		return nil, err
	}
	trusting, err := replicas.ReadTrust(ctx, tx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, h := range holders {
		out = append(out, h.ReplicaID)
	}
	for _, r := range trusting {
		out = append(out, r.ReplicaID)
	}
	return out, nil
}

var replicaID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// markGone returns what a rotation waits for, as it was noted, with a mark at the replicas that are not there any more:
// the note is written anew in the second check after they went.
func markGone(waits string, live []string) string {
	return replicaID.ReplaceAllStringFunc(waits, func(id string) string {
		if slices.Contains(live, id) {
			return id
		}
		return id + " (gone: it is waited for no longer)"
	})
}
