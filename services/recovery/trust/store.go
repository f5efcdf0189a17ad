package trust

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// The states as rows have them.
var (
	stateOK       = names.Of(agree)
	stateMismatch = names.Of(mismatch)
)

// preflightRow is the row of the preflight.
type preflightRow struct {
	State         string     `db:"state"`
	Since         *time.Time `db:"since"`
	Side          string     `db:"failing_side"`
	Summary       string     `db:"summary"`
	NextAction    string     `db:"next_action"`
	Issuer        string     `db:"issuer"`
	TrustedIssuer string     `db:"trusted_issuer"`
	RefusedBy     []string   `db:"refused_by"`
	CheckedAt     *time.Time `db:"checked_at"`
	IncidentID    string     `db:"incident_id"`
	Version       int64      `db:"version"`
}

var (
	// takeLease also notes when the holder checked last, $3 seconds ago; NULL: it has not. With $4 it takes the lease from
	// whichever replica holds it.
	takeLease = pg.Define(pg.RoleRecovery, "trust.take_lease", `
		WITH taken AS (
			UPDATE recovery.ca_preflight_lease SET holder = $1, until = mesh.clock() + make_interval(secs => $2),
				checked_at = COALESCE(mesh.clock() - make_interval(secs => $3), checked_at)
			WHERE $4 OR until <= mesh.clock() OR (holder = $1 AND until <= mesh.clock() + make_interval(secs => $2 * 2 / 3))
				RETURNING 1)
		SELECT EXISTS (SELECT FROM taken) OR EXISTS (SELECT FROM recovery.ca_preflight_lease
			WHERE holder = $1 AND until > mesh.clock())`)

	leaveLease = pg.Define(pg.RoleRecovery, "trust.leave_lease", `
		UPDATE recovery.ca_preflight_lease SET until = mesh.clock() WHERE holder = $1 AND until > mesh.clock()`)

	hasLease = pg.Define(pg.RoleRecovery, "trust.has_lease", `
		SELECT EXISTS (SELECT FROM recovery.ca_preflight_lease WHERE holder = $1 AND until > mesh.clock())`)

	readLastCheck = pg.Define(pg.RoleRecovery, "trust.read_last_check",
		`SELECT checked_at FROM recovery.ca_preflight_lease`)

	readClock = pg.Define(pg.RoleRecovery, "trust.read_clock", `SELECT mesh.clock()`)

	readRow = pg.Define(pg.RoleRecovery, "trust.read", `
		SELECT `+pg.Columns[preflightRow]("p")+` FROM recovery.ca_preflight p`)

	lockRow = pg.Define(pg.RoleRecovery, "trust.lock", `
		SELECT `+pg.Columns[preflightRow]("p")+` FROM recovery.ca_preflight p FOR UPDATE`)

	saveRow = pg.Define(pg.RoleRecovery, "trust.save", `
		UPDATE recovery.ca_preflight SET state = $1, since = $2, failing_side = $3, summary = $4, next_action = $5,
			issuer = $6, trusted_issuer = $7, refused_by = $8, checked_at = $9, incident_id = $10, version = $11
		WHERE version = $11 - 1`)
)

func readPreflight(ctx context.Context, q pg.Querier) (preflightRow, error) {
	row, err := pg.One[preflightRow](ctx, q, readRow)
	if err != nil {
		return preflightRow{}, fmt.Errorf("read preflight: %w", err)
	}
	return row, nil
}

// save writes the row and appends its event.
func (r *preflightRow) save(ctx context.Context, tx pgx.Tx) error {
	r.Version++
	if r.RefusedBy == nil {
		r.RefusedBy = []string{}
	}
	tag, err := pg.Exec(ctx, tx, saveRow, r.State, r.Since, r.Side, r.Summary, r.NextAction, r.Issuer, r.TrustedIssuer,
		r.RefusedBy, r.CheckedAt, r.IncidentID, r.Version)
	if err != nil {
		return fmt.Errorf("write preflight: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fmt.Errorf("write preflight: version %d is not the one before", r.Version)
	}
	_, err = events.Append(ctx, tx, events.Event{
		Kind: "ca_preflight.changed", AggregateType: "ca_preflight", AggregateID: "mesh", AggregateVersion: r.Version,
		Payload: r.message(), Correlation: events.Correlation{CorrelationID: r.IncidentID},
	})
	return err
}

// stateOf returns the state of a row. A state of a newer build counts as unknown.
func stateOf(text string) recoveryv1.PreflightState {
	if state := aside.Value[recoveryv1.PreflightState]("ca_preflight", "mesh", text); state != 0 {
		return state
	}
	return unknown
}

// message returns the row as events and responses carry it.
func (r *preflightRow) message() *recoveryv1.CaPreflight {
	side := aside.Value[recoveryv1.TrustSide]("ca_preflight", "mesh", r.Side)
	return &recoveryv1.CaPreflight{
		State: stateOf(r.State), Since: incident.Stamp(r.Since), FailingSide: side, Summary: r.Summary,
		NextAction: r.NextAction, IssuerFingerprint: r.Issuer, RefusedBy: r.RefusedBy,
		TrustedIssuerFingerprint: r.TrustedIssuer, CheckedAt: incident.Stamp(r.CheckedAt), IncidentId: r.IncidentID,
		Version: r.Version,
	}
}
