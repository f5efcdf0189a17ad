package keys

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

const (
	incidentKind = commonv1.IncidentKind_INCIDENT_KIND_SIGNING_KEYS
	layer        = commonv1.OwnerLayer_OWNER_LAYER_AUTH
	// incidentEvery is how often further evidence of the same key is counted.
	incidentEvery = time.Minute
	// incidentQuiet is the time without evidence after which an incident is closed. A node that waits tries far more
	// often.
	incidentQuiet = 10 * time.Minute
	// mostOpen bounds the open incidents of key ids that the set of keys does not have, since a node may send any text as
	// a key id. Those of the set are as many as its keys, and those of replicas as many as there are replicas.
	mostOpen = 8
	// mostNodes bounds the nodes that an incident lists.
	mostNodes = 32
	// closedBy is recorded as the closer of an incident that no person closed.
	closedBy = "recovery"
)

// Unknown is a join state that names a key which a replica does not have.
type Unknown struct{ KeyID, NodeID string }

// incidentRow is the row of an incident of this kind.
type incidentRow struct {
	ID         string     `db:"incident_id" expr:"@.incident_id::text"`
	Key        string     `db:"key"`
	Summary    string     `db:"summary"`
	Nodes      []string   `db:"node_ids"`
	NextAction string     `db:"next_action"`
	OpenedAt   time.Time  `db:"opened_at"`
	LastSeenAt time.Time  `db:"last_seen_at"`
	ClosedAt   *time.Time `db:"closed_at"`
	ClosedBy   string     `db:"closed_by"`
	Count      int64      `db:"count"`
	Version    int64      `db:"version"`
}

// severity is that of its incidents.
var severity = fault.AlertOf(incidentKind).Severity

var (
	readClock = pg.Define(pg.RoleRecovery, "keys.read_clock", `SELECT mesh.clock()`)

	readIncidents = pg.Define(pg.RoleRecovery, "keys.read_incidents", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i WHERE i.kind = 'signing_keys' AND i.closed_at IS NULL
			ORDER BY i.key`)

	readJoinStateKeys = pg.Define(pg.RoleRecovery, "keys.read_join_state_keys",
		`SELECT k.key_id FROM mesh.signing_key k WHERE k.kind = 'join_state'`)

	lockIncident = pg.Define(pg.RoleRecovery, "keys.lock_incident", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i
		WHERE i.kind = 'signing_keys' AND i.key = $1 AND i.closed_at IS NULL FOR UPDATE`)

	insertIncident = pg.Define(pg.RoleRecovery, "keys.insert_incident", `
		INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, node_ids, owner_layer, next_action,
			opened_at, last_seen_at)
		VALUES ($1, 'signing_keys', $2, $3, $4, $5, $6, $7, $8, $8) ON CONFLICT (kind, key)
			WHERE closed_at IS NULL DO NOTHING`)

	updateIncident = pg.Define(pg.RoleRecovery, "keys.update_incident", `
		UPDATE recovery.incident
			SET summary = $2, node_ids = $3, last_seen_at = $4, count = $5, version = $6, next_action = $7
		WHERE incident_id = $1`)

	endIncidents = pg.Define(pg.RoleRecovery, "keys.close_incidents", `
		UPDATE recovery.incident i SET closed_at = mesh.clock(), closed_by = $3, version = version + 1
		WHERE i.kind = 'signing_keys' AND i.closed_at IS NULL
			AND (i.key = ANY($1) OR i.last_seen_at < mesh.clock() - make_interval(secs => $2))
				RETURNING `+pg.Columns[incidentRow]("i"))
)

// ReportUnknown opens an incident for each key that a replica lacks, or updates the open one. It reports whether it has
// appended events. In a storm most calls change nothing, since an incident is counted once a minute.
func ReportUnknown(ctx context.Context, tx pgx.Tx, replica string, seen []Unknown) (bool, error) {
	if len(seen) == 0 {
		return false, nil
	}
	byKey := map[string][]string{}
	for _, u := range seen {
		if !slices.Contains(byKey[u.KeyID], u.NodeID) {
			byKey[u.KeyID] = append(byKey[u.KeyID], u.NodeID)
		}
	}
	var list []Report
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		list = append(list, Report{
			Key: key, Nodes: byKey[key],
			Summary: fmt.Sprintf("nodes show join states signed by key %s, which replica %s of recovery does not hold", key,
				replica),
			NextAction: fmt.Sprintf("copy the file of key %s into the join_state_keys directory of replica %s from one that "+
				"holds it"+
				" (`gpuaas keys list` names them); the nodes wait until then", key, replica),
		})
	}
	return Raise(ctx, tx, list...)
}

// Report describes a problem with one key.
type Report struct {
	Key, Summary, NextAction string
	Nodes                    []string
}

// Raise opens one incident for each key, or updates the open ones. It reports whether it has appended events. Of keys
// that nodes name and the set of keys does not have, mostOpen incidents are open at most.
func Raise(ctx context.Context, tx pgx.Tx, reports ...Report) (bool, error) {
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return false, fmt.Errorf("read clock: %w", err)
	}
	rows, err := pg.All[incidentRow](ctx, tx, readIncidents)
	if err != nil {
		return false, fmt.Errorf("read incidents of keys: %w", err)
	}
	open := map[string]*incidentRow{}
	for i := range rows {
		open[rows[i].Key] = &rows[i]
	}
	inSet, err := keysOfSet(ctx, tx, open, reports)
	if err != nil {
		return false, err
	}
	room := mostOpen
	for i := range rows {
		if len(rows[i].Nodes) > 0 && !inSet[rows[i].Key] {
			room--
		}
	}
	// the order of the rows' locks
	slices.SortFunc(reports, func(x, y Report) int { return strings.Compare(x.Key, y.Key) })
	appended := false
	for _, report := range reports {
		was := open[report.Key]
		if was != nil && !was.news(report, now) {
			continue
		}
		if was == nil && len(report.Nodes) > 0 && !inSet[report.Key] {
			if room <= 0 {
				continue
			}
			room--
		}
		row, err := raise(ctx, tx, report, now)
		if err != nil {
			return appended, err
		}
		open[report.Key], appended = row, true
	}
	return appended, nil
}

// keysOfSet returns the keys of join states that the set has, if a report of nodes would open an incident; else nil.
func keysOfSet(ctx context.Context, tx pgx.Tx, open map[string]*incidentRow, reports []Report) (map[string]bool,
	error,
) {
	opens := func(r Report) bool { return len(r.Nodes) > 0 && open[r.Key] == nil }
	if !slices.ContainsFunc(reports, opens) {
		return nil, nil
	}
	list, err := pg.Values[string](ctx, tx, readJoinStateKeys)
	if err != nil {
		return nil, fmt.Errorf("read keys of join states: %w", err)
	}
	out := make(map[string]bool, len(list))
	for _, key := range list {
		out[key] = true
	}
	return out, nil
}

// news reports whether a report changes the incident.
func (r *incidentRow) news(report Report, now time.Time) bool {
	if now.Sub(r.LastSeenAt) >= incidentEvery {
		return true
	}
	return len(r.Nodes) < mostNodes &&
		slices.ContainsFunc(report.Nodes, func(id string) bool { return !slices.Contains(r.Nodes, id) })
}

func raise(ctx context.Context, tx pgx.Tx, report Report, now time.Time) (*incidentRow, error) {
	row := &incidentRow{
		ID: ids.New(), Key: report.Key, Summary: report.Summary, NextAction: report.NextAction, OpenedAt: now,
		LastSeenAt: now, Count: 1, Version: 1,
	}
	row.add(report.Nodes)
	tag, err := pg.Exec(ctx, tx, insertIncident, row.ID, row.Key, names.Of(severity), row.Summary, row.Nodes,
		names.Of(layer), row.NextAction, now)
	if err != nil {
		return nil, fmt.Errorf("open incident of key %s: %w", report.Key, err)
	}
	if tag.RowsAffected() == 1 {
		return row, row.report(ctx, tx, "incident.open")
	}
	was, err := pg.One[incidentRow](ctx, tx, lockIncident, report.Key)
	if pg.IsNoRows(err) {
		return row, nil // it was closed concurrently; the next report opens it again
	}
	if err != nil {
		return nil, fmt.Errorf("read incident of key %s: %w", report.Key, err)
	}
	was.add(report.Nodes)
	was.Summary, was.NextAction, was.LastSeenAt = report.Summary, report.NextAction, now
	was.Count++
	was.Version++
	if _, err := pg.Exec(ctx, tx, updateIncident, was.ID, was.Summary, was.Nodes, now, was.Count,
		was.Version, was.NextAction); err != nil {
		return nil, fmt.Errorf("go on with incident of key %s: %w", report.Key, err)
	}
	return &was, was.report(ctx, tx, "")
}

func (r *incidentRow) add(nodes []string) {
	if r.Nodes == nil {
		r.Nodes = []string{}
	}
	for _, id := range nodes {
		if len(r.Nodes) < mostNodes && !slices.Contains(r.Nodes, id) {
			r.Nodes = append(r.Nodes, id)
		}
	}
	slices.Sort(r.Nodes)
}

// Close closes the incidents of keys that are in order again, and those that had no evidence for incidentQuiet. It
// reports whether it closed any.
func Close(ctx context.Context, tx pgx.Tx, inOrder []string) (bool, error) {
	if inOrder == nil {
		inOrder = []string{}
	}
	rows, err := pg.All[incidentRow](ctx, tx, endIncidents, inOrder, incidentQuiet.Seconds(), closedBy)
	if err != nil {
		return false, fmt.Errorf("close incidents of keys: %w", err)
	}
	for i := range rows {
		if err := rows[i].report(ctx, tx, "incident.close"); err != nil {
			return false, err
		}
	}
	return len(rows) > 0, nil
}

// report appends the incident's event and the audit entry of an action.
func (r *incidentRow) report(ctx context.Context, tx pgx.Tx, action string) error {
	return incident.Report(ctx, tx, &recoveryv1.Incident{
		IncidentId: r.ID, Kind: incidentKind, Severity: severity, Summary: r.Summary, NodeIds: r.Nodes, OwnerLayer: layer,
		NextAction: r.NextAction, OpenedAt: timestamppb.New(r.OpenedAt), LastSeenAt: timestamppb.New(r.LastSeenAt),
		ClosedAt: incident.Stamp(r.ClosedAt), ClosedBy: r.ClosedBy, Count: r.Count, Version: r.Version,
	}, action, "")
}

// Sweep opens an incident for each live replica that reports keys it cannot use, and closes incidents that had no
// evidence for incidentQuiet. It reports whether it has appended events.
func Sweep(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	appended := false
	err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		holders, err := keyset.Holders(ctx, tx)
		if err != nil {
			return err
		}
		var list []Report
		for _, h := range holders {
			if len(h.Problems) == 0 {
				continue
			}
			list = append(list, Report{
				Key: h.Service + "/" + h.ReplicaID,
				Summary: fmt.Sprintf("replica %s of %s cannot use a key: %s", h.ReplicaID, h.Service,
					strings.Join(h.Problems, "; ")),
				NextAction: "put the file right, or copy it from a replica that holds it (`gpuaas keys list`); the replica goes " +
					"on with the keys" +
					" that it loaded before, and does not start again without the one that signs",
			})
		}
		raised, err := Raise(ctx, tx, list...)
		if err != nil {
			return err
		}
		closed, err := Close(ctx, tx, nil)
		appended = raised || closed
		return err
	})
	if err != nil {
		return false, fmt.Errorf("sweep incidents of keys: %w", err)
	}
	return appended, nil
}
