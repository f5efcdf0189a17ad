package storage

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

const (
	// Every is how often the size is measured.
	Every = 5 * time.Minute

	kind       = commonv1.IncidentKind_INCIDENT_KIND_STORAGE
	layer      = commonv1.OwnerLayer_OWNER_LAYER_DATABASE
	closedBy   = "recovery"
	nextAction = "give the database more room and set storage.limit_mebibytes to it; or shorten the terms of history " +
		"(`gpuaas retention status` shows what each keeps, and what holds the event log) and rewrite the tables when it " +
		"is cut " +
		"(VACUUM FULL), for their files do not shrink by themselves"
)

// current is the present and an earlier size of the database. was and span are of a sample of a day ago, or of the
// oldest sample if there is none. seen is the limit that a process with access to the volume found in the last hour; 0:
// none did.
type current struct {
	Bytes int64   `db:"bytes"`
	Was   int64   `db:"was"`
	Span  float64 `db:"span"` // seconds
	Seen  int64   `db:"seen"`
}

// incidentRow is the row of the incident.
type incidentRow struct {
	ID         string     `db:"incident_id" expr:"@.incident_id::text"`
	Summary    string     `db:"summary"`
	OpenedAt   time.Time  `db:"opened_at"`
	LastSeenAt time.Time  `db:"last_seen_at"`
	ClosedAt   *time.Time `db:"closed_at"`
	ClosedBy   string     `db:"closed_by"`
	Count      int64      `db:"count"`
	Version    int64      `db:"version"`
}

// severity is that of its incidents.
var severity = fault.AlertOf(kind).Severity

var (
	readCurrent = pg.Define(pg.RoleRecovery, "storage.read_current", `
		SELECT pg_database_size(current_database()) AS bytes, coalesce(o.bytes, 0) AS was,
			coalesce(extract(epoch FROM mesh.clock() - o.at), 0)::float8 AS span, coalesce(v.limit_bytes, 0) AS seen
		FROM (SELECT) one
		LEFT JOIN (
			SELECT x.bytes, x.at FROM (
				(SELECT 1 AS place, s.bytes, s.at FROM mesh.storage_sample s WHERE s.at <= mesh.clock() - interval '1 day'
					ORDER BY s.at DESC LIMIT 1)
				UNION ALL (SELECT 2, s.bytes, s.at FROM mesh.storage_sample s ORDER BY s.at LIMIT 1)
			) x ORDER BY x.place LIMIT 1) o ON true
		LEFT JOIN (SELECT s.limit_bytes FROM mesh.storage_sample s WHERE s.volume AND s.at > mesh.clock() - interval '1 hour'
			ORDER BY s.at DESC LIMIT 1) v ON true`)

	// keepSample inserts a sample and deletes those older than a week.
	keepSample = pg.Define(pg.RoleRecovery, "storage.keep_sample", `
		WITH old AS (DELETE FROM mesh.storage_sample s WHERE s.at < mesh.clock() - interval '7 days')
		INSERT INTO mesh.storage_sample (at, bytes, limit_bytes, bytes_per_day, problem, volume)
			VALUES (mesh.clock(), $1, $2, $3, $4, $5)`)

	lockIncident = pg.Define(pg.RoleRecovery, "storage.lock_incident", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i WHERE i.kind = 'storage' AND i.closed_at IS NULL
			FOR UPDATE`)

	insertIncident = pg.Define(pg.RoleRecovery, "storage.insert_incident", `
		INSERT INTO recovery.incident AS i (incident_id, kind, key, severity, summary, node_ids, owner_layer, next_action,
			opened_at, last_seen_at)
		VALUES ($1, 'storage', 'database', $2, $3, '{}', $4, $5, mesh.clock(), mesh.clock())
		ON CONFLICT (kind, key) WHERE closed_at IS NULL DO NOTHING RETURNING `+pg.Columns[incidentRow]("i"))

	goOn = pg.Define(pg.RoleRecovery, "storage.go_on", `
		UPDATE recovery.incident i SET summary = $2, last_seen_at = mesh.clock(), count = count + 1, version = version + 1
		WHERE i.incident_id = $1 AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))

	endIncident = pg.Define(pg.RoleRecovery, "storage.end_incident", `
		UPDATE recovery.incident i SET closed_at = mesh.clock(), closed_by = $2, version = version + 1
		WHERE i.incident_id = $1 AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))
)

// Watch measures the size of the database.
type Watch struct {
	DB     *pgxpool.Pool
	Policy *policy.Source
	Volume string // a directory on the volume of the database; empty: this process has no access to it
	// Free returns the free bytes of the volume of a directory; nil: the kernel is asked.
	Free func(dir string) (int64, error)
}

// Measure takes a sample, and opens, updates or closes the incident. It reports whether it has appended events.
func (w Watch) Measure(ctx context.Context) (bool, error) {
	appended := false
	err := pg.InTx(ctx, w.DB, func(ctx context.Context, tx pgx.Tx) error {
		now, err := pg.One[current](ctx, tx, readCurrent)
		if err != nil {
			return fmt.Errorf("read size of the database: %w", err)
		}
		size := Size{Bytes: now.Bytes, Was: now.Was, Span: time.Duration(now.Span * float64(time.Second))}
		if size.Limit, err = w.limit(now); err != nil {
			return err
		}
		row, err := pg.One[incidentRow](ctx, tx, lockIncident)
		if err != nil && !pg.IsNoRows(err) {
			return fmt.Errorf("read incident of storage: %w", err)
		}
		open := err == nil
		problem := size.Problem(open)
		if open && size.Limit == 0 {
			problem = row.Summary // an open incident stays open while the limit is unknown
		}
		if _, err := pg.Exec(ctx, tx, keepSample, size.Bytes, size.Limit, size.PerDay(), problem,
			w.Volume != ""); err != nil {
			return fmt.Errorf("keep sample of storage: %w", err)
		}
		appended, err = updateIncident(ctx, tx, row, open, problem)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("look at storage: %w", err)
	}
	return appended, nil
}

// limit returns the size in bytes up to which the database may grow: the policy's limit, or that of the free space on
// its volume if that is less. A process without access to the volume uses the limit that another process found.
func (w Watch) limit(now current) (int64, error) {
	limit := w.Policy.Current().StorageLimit()
	if w.Volume == "" {
		if limit == 0 || now.Seen > 0 && now.Seen < limit {
			limit = now.Seen
		}
		return limit, nil
	}
	free := w.Free
	if free == nil {
		free = freeOn
	}
	room, err := free(w.Volume)
	if err != nil {
		return 0, err
	}
	if limit == 0 || now.Bytes+room < limit {
		limit = now.Bytes + room
	}
	return limit, nil
}

func freeOn(dir string) (int64, error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return 0, fmt.Errorf("read free space of %s: %w", dir, err)
	}
	return int64(fs.Bavail) * fs.Bsize, nil // no volume has so many bytes
}

// updateIncident opens, updates or closes the incident according to the problem that was found.
func updateIncident(ctx context.Context, tx pgx.Tx, row incidentRow, open bool, problem string) (bool, error) {
	action, statement, args := "", goOn, []any{row.ID, problem}
	switch {
	case !open && problem == "":
		return false, nil
	case !open:
		action, statement = "incident.open", insertIncident
		args = []any{ids.New(), names.Of(severity), problem, names.Of(layer), nextAction}
	case problem == "":
		action, statement, args = "incident.close", endIncident, []any{row.ID, closedBy}
	case problem == row.Summary:
		return false, nil
	}
	row, err := pg.One[incidentRow](ctx, tx, statement, args...)
	if pg.IsNoRows(err) {
		return false, nil // another replica or a person has closed or opened it first
	}
	if err != nil {
		return false, fmt.Errorf("write incident of storage: %w", err)
	}
	return true, row.report(ctx, tx, action)
}

// report appends the incident's event, and the audit entry of an action.
func (r *incidentRow) report(ctx context.Context, tx pgx.Tx, action string) error {
	return incident.Report(ctx, tx, &recoveryv1.Incident{
		IncidentId: r.ID, Kind: kind, Severity: severity, Summary: r.Summary, OwnerLayer: layer, NextAction: nextAction,
		OpenedAt: timestamppb.New(r.OpenedAt), LastSeenAt: timestamppb.New(r.LastSeenAt),
		ClosedAt: incident.Stamp(r.ClosedAt), ClosedBy: r.ClosedBy, Count: r.Count, Version: r.Version,
	}, action, "")
}
