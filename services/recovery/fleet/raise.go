package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

var (
	readOpenIncident = pg.Define(pg.RoleRecovery, "fleet.read_incident", openIncidentSQL)
	lockOpenIncident = pg.Define(pg.RoleRecovery, "fleet.lock_incident", openIncidentSQL+` FOR UPDATE`)

	readOpenIncidents = pg.Define(pg.RoleRecovery, "fleet.read_incidents", openIncidentsSQL)
	lockOpenIncidents = pg.Define(pg.RoleRecovery, "fleet.lock_incidents", openIncidentsSQL+` FOR UPDATE`)

	// The ids of each row come as one text, since unnest makes one list of an array of lists.
	insertIncidents = pg.Define(pg.RoleRecovery, "fleet.insert_incidents", `
		INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, step, error_code, tenant_ids, workspace_ids,
			node_ids, owner_layer, next_action, opened_at, last_seen_at, count)
		SELECT x.incident_id, x.kind, x.key, x.severity, x.summary, x.step, x.error_code, string_to_array(x.tenants, ','),
			string_to_array(x.workspaces, ','), string_to_array(x.nodes, ','), x.owner_layer, x.next_action, x.opened_at,
			x.last_seen_at, x.count
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
			$9::text[], $10::text[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::bigint[])
			AS x (incident_id, kind, key, severity, summary, step, error_code, tenants, workspaces, nodes, owner_layer,
				next_action, opened_at, last_seen_at, count)`)

	updateIncidents = pg.Define(pg.RoleRecovery, "fleet.update_incidents", `
		UPDATE recovery.incident i
			SET summary = x.summary, tenant_ids = string_to_array(x.tenants, ','),
			workspace_ids = string_to_array(x.workspaces, ','), node_ids = string_to_array(x.nodes, ','),
			last_seen_at = x.last_seen_at, count = x.count, version = x.version
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::bigint[], $8::bigint[])
			AS x (incident_id, summary, tenants, workspaces, nodes, last_seen_at, count, version)
		WHERE i.incident_id = x.incident_id`)

	endIncidents = pg.Define(pg.RoleRecovery, "fleet.close_incidents", `
		UPDATE recovery.incident i SET closed_at = $3, closed_by = $4, close_reason = $5, version = version + 1
		WHERE i.kind = $1 AND i.key = ANY($2::text[]) AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))
)

// openIncidentSQL and openIncidentsSQL read the open incident of a kind and key, and all open ones of a kind.
var (
	openIncidentSQL = `
		SELECT ` + pg.Columns[incidentRow]("i") + ` FROM recovery.incident i
			WHERE i.kind = $1 AND i.key = $2 AND i.closed_at IS NULL`
	openIncidentsSQL = `
		SELECT ` + pg.Columns[incidentRow]("i") + ` FROM recovery.incident i WHERE i.kind = $1 AND i.closed_at IS NULL
			ORDER BY i.incident_id`
)

// openIncident returns the open incident of a kind and key; nil if there is none. With lock it locks its row.
func openIncident(ctx context.Context, tx pgx.Tx, lock bool, kind commonv1.IncidentKind, key string) (*Incident,
	error,
) {
	statement := readOpenIncident
	if lock {
		statement = lockOpenIncident
	}
	i, err := readIncident(ctx, tx, statement, names.Of(kind), key)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read incident: %w", err)
	}
	return i, nil
}

// openIncidents returns the open incidents of a kind in the order of their ids. It locks their rows if the round may
// write.
func (r *Round) openIncidents(ctx context.Context, kind commonv1.IncidentKind) ([]*Incident, error) {
	statement := readOpenIncidents
	if r.locked {
		statement = lockOpenIncidents
	}
	rows, err := pg.All[incidentRow](ctx, r.tx, statement, names.Of(kind))
	if err != nil {
		return nil, fmt.Errorf("read incidents: %w", err)
	}
	out := make([]*Incident, len(rows))
	for n := range rows {
		out[n] = rows[n].read(ctx)
	}
	return out, nil
}

// Raise opens an incident, with the severity of its kind unless it has one, or updates the open one of the same kind
// and key: it adds the ids that the incident concerns, and counts it again at most once each incidentEvery. i is set to
// the stored incident.
func (r *Round) Raise(ctx context.Context, i *Incident) error {
	was, err := openIncident(ctx, r.tx, r.locked, i.Kind, i.Key)
	if err != nil {
		return err
	}
	var w writes
	w.raise(was, i, r.now)
	return r.write(ctx, i.Kind, w)
}

// RaiseAll raises all incidents of a kind that there are now, by key, and closes the other open ones for which goesOn
// returns false. How often it asks the database does not depend on how many there are.
func (r *Round) RaiseAll(ctx context.Context, kind commonv1.IncidentKind, raised map[string]*Incident,
	goesOn func(*Incident) bool,
) error {
	list, err := r.openIncidents(ctx, kind)
	if err != nil {
		return err
	}
	var w writes
	open := make(map[string]*Incident, len(list))
	for _, was := range list {
		open[was.Key] = was
		if raised[was.Key] == nil && !goesOn(was) {
			w.closed = append(w.closed, was.Key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(raised)) {
		w.raise(open[key], raised[key], r.now)
	}
	return r.write(ctx, kind, w)
}

// CloseOthers closes the open incidents of a kind for which goesOn returns false.
func (r *Round) CloseOthers(ctx context.Context, kind commonv1.IncidentKind, goesOn func(*Incident) bool) error {
	return r.RaiseAll(ctx, kind, nil, goesOn)
}

// touch updates the open incident of a kind and key; without one it does nothing.
func (r *Round) touch(ctx context.Context, i *Incident) error {
	was, err := openIncident(ctx, r.tx, r.locked, i.Kind, i.Key)
	if err != nil || was == nil {
		return err
	}
	i.LastSeenAt, i.Summary = r.now, was.Summary
	return r.goOn(ctx, was, i)
}

// goOn updates the open incident was by what i adds to it. i is set to the stored incident.
func (r *Round) goOn(ctx context.Context, was, i *Incident) error {
	var w writes
	w.raise(was, i, r.now)
	return r.write(ctx, i.Kind, w)
}

// writes are the incidents of a kind that a round has to write.
type writes struct {
	opened, updated []*Incident
	closed          []string // keys
}

// raise adds what is to be written of i, whose open incident is was; nil if there is none. i is set to the incident as
// it will be stored.
func (w *writes) raise(was, i *Incident, now time.Time) {
	if i.LastSeenAt.IsZero() {
		i.LastSeenAt = now
	}
	i.Tenants, i.Workspaces, i.Nodes = sorted(i.Tenants), sorted(i.Workspaces), sorted(i.Nodes)
	if was == nil {
		i.ID, i.OpenedAt, i.Count, i.Version = ids.New(), now, max(i.Count, 1), 1
		if i.Severity == 0 {
			i.Severity = fault.AlertOf(i.Kind).Severity
		}
		w.opened = append(w.opened, i)
		return
	}
	more := false
	for _, l := range []struct{ was, add *[]string }{
		{&was.Tenants, &i.Tenants}, {&was.Workspaces, &i.Workspaces}, {&was.Nodes, &i.Nodes},
	} {
		known := sorted(*l.was)
		*l.was = known
		for _, id := range *l.add {
			if _, found := slices.BinarySearch(known, id); !found {
				*l.was, more = append(*l.was, id), true
			}
		}
		slices.Sort(*l.was)
	}
	fresh := i.LastSeenAt.Sub(was.LastSeenAt) >= incidentEvery || i.Count > was.Count
	count := max(was.Count+1, i.Count)
	if i.Summary != "" && i.Summary != was.Summary {
		was.Summary, more = i.Summary, true
	}
	if more || fresh {
		was.LastSeenAt, was.Count = i.LastSeenAt, count
		was.Version++
	}
	*i = *was
	if more || fresh {
		w.updated = append(w.updated, i)
	}
}

// write writes what is to be written of incidents of a kind, and reports it.
func (r *Round) write(ctx context.Context, kind commonv1.IncidentKind, w writes) error {
	if len(w.opened)+len(w.updated)+len(w.closed) == 0 {
		return nil
	}
	if err := r.Writes(); err != nil {
		return err
	}
	if err := insert(ctx, r.tx, w.opened); err != nil {
		return err
	}
	if err := update(ctx, r.tx, w.updated); err != nil {
		return err
	}
	if len(w.closed) == 0 {
		return nil
	}
	return closeIncidents(ctx, r.tx, kind, w.closed, byWatchdog, "", r.now)
}

// insert writes new incidents, and reports them.
func insert(ctx context.Context, tx pgx.Tx, list []*Incident) error {
	if len(list) == 0 {
		return nil
	}
	args := append(pg.Texts(list, func(i *Incident) []string {
		return []string{
			i.ID, names.Of(i.Kind), i.Key, names.Of(i.Severity), i.Summary, i.Step, i.ErrorCode, joined(i.Tenants),
			joined(i.Workspaces), joined(i.Nodes), names.OfSet(i.OwnerLayer), i.NextAction,
		}
	}), pg.Column(list, func(i *Incident) time.Time { return i.OpenedAt }),
		pg.Column(list, func(i *Incident) time.Time { return i.LastSeenAt }),
		pg.Column(list, func(i *Incident) int64 { return i.Count }))
	_, err := pg.Exec(ctx, tx, insertIncidents, args...)
	if err != nil {
		return fmt.Errorf("open incidents: %w", err)
	}
	return report(ctx, tx, list...)
}

// update writes what may change of open incidents, of which each has its next version, and reports it.
func update(ctx context.Context, tx pgx.Tx, list []*Incident) error {
	if len(list) == 0 {
		return nil
	}
	args := append(pg.Texts(list, func(i *Incident) []string {
		return []string{i.ID, i.Summary, joined(i.Tenants), joined(i.Workspaces), joined(i.Nodes)}
	}), pg.Column(list, func(i *Incident) time.Time { return i.LastSeenAt }),
		pg.Column(list, func(i *Incident) int64 { return i.Count }),
		pg.Column(list, func(i *Incident) int64 { return i.Version }))
	err := Joined(ctx, tx, len(list), func() error {
		_, err := pg.Exec(ctx, tx, updateIncidents, args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("go on with incidents: %w", err)
	}
	return report(ctx, tx, list...)
}

// closeIncidents closes the open incidents of a kind that have the keys, and reports it. reason is that of the person
// who closes them; empty for incidents that end by themselves.
func closeIncidents(ctx context.Context, tx pgx.Tx, kind commonv1.IncidentKind, keys []string, by, reason string,
	now time.Time,
) error {
	rows, err := pg.All[incidentRow](ctx, tx, endIncidents, names.Of(kind), keys, now, by, reason)
	if err != nil {
		return fmt.Errorf("close incidents: %w", err)
	}
	list := make([]*Incident, len(rows))
	for n := range rows {
		list[n] = rows[n].read(ctx)
	}
	return report(ctx, tx, list...)
}

// joined returns ids as one text.
func joined(ids []string) string { return strings.Join(ids, ",") }
