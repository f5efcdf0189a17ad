package schema

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// ServicesConnectedError is the refusal to declare a restore while services are connected.
type ServicesConnectedError struct {
	// Connected lists the role and application name of each group of sessions, with their number.
	Connected []string
}

// Error names the connected services, and what to do.
func (e *ServicesConnectedError) Error() string {
	return "services are connected to the database: " + strings.Join(e.Connected, ", ") +
		": stop every service, then run this again; a service that runs through a restore goes on with numbers of the " +
		"lost history"
}

// errLocked is returned after too long a wait for the rows that a restore changes.
var errLocked = errors.New("the era is locked by another session")

// Rollback is the state of rollback mode as the schema's owner reads it.
type Rollback struct {
	Era      int64
	RaisedAt time.Time // of the era
	RaisedBy string
	Reason   string // for which it was raised
	Active   bool
	Declared bool
	Since    time.Time // zero if it is not active
}

// DeclareRestored raises the era above every era in the database or its evidence and sets rollback mode, in one
// transaction. It is run by the schema's owner after the database was restored from a backup, before any service is
// started. While a service is connected it refuses with ServicesConnectedError; services that connect meanwhile wait
// for the end of the transaction.
func DeclareRestored(ctx context.Context, ownerURL, reason string) (Rollback, error) {
	pool, err := ownerPool(ctx, ownerURL)
	if err != nil {
		return Rollback{}, fmt.Errorf("declare restored: %w", err)
	}
	defer pool.Close()
	if err := pg.CheckMigrated(ctx, pool); err != nil {
		return Rollback{}, fmt.Errorf("declare restored: %w", err)
	}
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := refuseConnected(ctx, tx); err != nil {
			return err
		}
		// A service that connects from here on waits as soon as it draws a number, or reads the era or the rollback.
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '10s'"); err != nil {
			return fmt.Errorf("bound the wait for locks: %w", err)
		}
		if _, err := tx.Exec(ctx, "LOCK TABLE mesh.era, recovery.rollback IN ACCESS EXCLUSIVE MODE"); err != nil {
			return fmt.Errorf("%w: %w", errLocked, err)
		}
		if err := refuseConnected(ctx, tx); err != nil {
			return err
		}
		return declare(ctx, tx, reason)
	})
	if err != nil {
		return Rollback{}, fmt.Errorf("declare restored: %w", err)
	}
	return readRollback(ctx, pool)
}

func declare(ctx context.Context, tx pgx.Tx, reason string) error {
	var seen int64
	err := tx.QueryRow(ctx, `SELECT CASE WHEN state = 'active' THEN seen_era ELSE -1 END
		FROM recovery.rollback`).Scan(&seen)
	if err != nil {
		return fmt.Errorf("read evidence: %w", err)
	}
	era, err := raiseEra(ctx, tx, seen, reason)
	if err != nil {
		return err
	}
	// Recovery sets the id of the incident: it alone may append that event.
	_, err = tx.Exec(ctx, `UPDATE recovery.rollback SET state = 'active', declared = true,
		since = COALESCE(CASE WHEN state = 'active' THEN since END, mesh.clock()), era = $1, reported_by = session_user,
		reason = $2, incident_id = '', accepted_at = NULL, accepted_by = '', accept_reason = '', seen_era = -1,
		evidence = CASE WHEN state = 'active' THEN evidence ELSE '[]' END,
		evidence_total = CASE WHEN state = 'active' THEN evidence_total ELSE 0 END, version = version + 1`, era, reason)
	if err != nil {
		return fmt.Errorf("set rollback mode: %w", err)
	}
	// A restore of some tables alone leaves counts that are not those of their rows.
	if _, err := tx.Exec(ctx, "SELECT recovery.recount_fleet()"); err != nil {
		return fmt.Errorf("count the fleet anew: %w", err)
	}
	return nil
}

// refuseConnected returns a ServicesConnectedError if services have sessions in this database.
func refuseConnected(ctx context.Context, tx pgx.Tx) error {
	// A transaction caches the sessions that it has read; this drops the cache.
	if _, err := tx.Exec(ctx, "SELECT pg_stat_clear_snapshot()"); err != nil {
		return fmt.Errorf("read sessions: %w", err)
	}
	rows, err := tx.Query(ctx, `SELECT usename || COALESCE(' (' || NULLIF(application_name, '') || ')', '') || ' x'
			|| count(*)
		FROM pg_stat_activity WHERE datname = current_database() AND usename = ANY ($1) AND pid <> pg_backend_pid()
		GROUP BY usename, application_name ORDER BY 1`, pg.ServiceRoles())
	if err != nil {
		return fmt.Errorf("read sessions: %w", err)
	}
	connected, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("read sessions: %w", err)
	}
	if len(connected) > 0 {
		return &ServicesConnectedError{Connected: connected}
	}
	return nil
}

// RollbackStatus returns the era and rollback mode. It changes nothing. The second value is false for a database that
// does not have them yet.
func RollbackStatus(ctx context.Context, ownerURL string) (Rollback, bool, error) {
	pool, err := ownerPool(ctx, ownerURL)
	if err != nil {
		return Rollback{}, false, fmt.Errorf("read rollback mode: %w", err)
	}
	defer pool.Close()
	var exists bool
	err = pool.QueryRow(ctx, `SELECT to_regclass('mesh.era') IS NOT NULL
		AND to_regclass('recovery.rollback') IS NOT NULL`).Scan(&exists)
	if err != nil || !exists {
		if err != nil {
			err = fmt.Errorf("read rollback mode: %w", err)
		}
		return Rollback{}, false, err
	}
	out, err := readRollback(ctx, pool)
	return out, err == nil, err
}

// rollbackRow is a Rollback as it is stored.
type rollbackRow struct {
	Era      int64      `db:"era"`
	RaisedAt time.Time  `db:"raised_at"`
	RaisedBy string     `db:"raised_by"`
	Reason   string     `db:"reason"`
	Active   bool       `db:"active"`
	Declared bool       `db:"declared"`
	Since    *time.Time `db:"since"`
}

func readRollback(ctx context.Context, pool *pgxpool.Pool) (Rollback, error) {
	rows, err := pool.Query(ctx, `SELECT e.era, e.raised_at, e.raised_by, e.reason, r.state = 'active' AS active,
			r.declared, r.since
		FROM mesh.era e CROSS JOIN recovery.rollback r`)
	if err != nil {
		return Rollback{}, fmt.Errorf("read rollback mode: %w", err)
	}
	row, err := pgx.CollectOneRow(rows, pgx.RowToStructByName[rollbackRow])
	if err != nil {
		return Rollback{}, fmt.Errorf("read rollback mode: %w", err)
	}
	out := Rollback{
		Era: row.Era, RaisedAt: row.RaisedAt, RaisedBy: row.RaisedBy, Reason: row.Reason, Active: row.Active,
		Declared: row.Declared,
	}
	if out.Active && row.Since != nil {
		out.Since = *row.Since
	}
	return out, nil
}

// raiseEra sets the era above itself and above another one.
func raiseEra(ctx context.Context, q pg.Querier, above int64, reason string) (int64, error) {
	var era int64
	err := q.QueryRow(ctx, `UPDATE mesh.era SET era = GREATEST(era, $2) + 1, raised_at = clock_timestamp(),
		raised_by = session_user, reason = $1 RETURNING era`, reason, above).Scan(&era)
	if err != nil {
		return 0, fmt.Errorf("raise era: %w", err)
	}
	return era, nil
}
