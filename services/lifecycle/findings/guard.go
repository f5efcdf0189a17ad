package findings

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// guardBatch is how many rows are compared at once.
const guardBatch = 500

const nextChanged = "start no operation on it; set the row back to what stands under before, in one UPDATE, then look at who could have changed it; " +
	"the finding ends with the next sweep once it has been put back"

const nextBreach = "an operation has taken over what was changed by hand: compare before and after, correct what is wrong by an operation of its own, " +
	"look at who could have changed it, then acknowledge the finding with gpuaas findings acknowledge"

// actual is a row as it stands.
type actual struct {
	version     int64
	payload     map[string]any
	workspaceID string
	tenantID    string
	nodeID      string
	unreadable  string // why it cannot be shown; the rest is empty then
}

// source says where the rows of a type are.
type source struct {
	table, id string
	// recent is the condition, over x, that a row of which the log says nothing should be spoken of by it.
	recent string
	// always is the condition, over x, under which a row is compared although no transaction wrote it since it last agreed: part of it stands elsewhere.
	always string
	read   func(ctx context.Context, s *Sweeper, ids []string) (map[string]actual, error)
}

// guarded are the types of rows, in the order in which they are compared.
var guarded = []string{"workspace", "run", "allocation"} //nolint:gochecknoglobals // data

var sources = map[string]source{ //nolint:gochecknoglobals // data
	"workspace": {
		table: "lifecycle.workspace", id: "id", always: "false", read: readWorkspaces,
		recent: "(x.state <> 'decommissioned' OR x.created_at > mesh.clock() - make_interval(secs => $2))",
	},
	"run": {
		table: "lifecycle.saga_run", id: "id", always: "false", read: readRuns,
		recent: "(x.finished_at IS NULL OR x.created_at > mesh.clock() - make_interval(secs => $2))",
	},
	"allocation": {
		table: "lifecycle.allocation", id: "allocation_id", always: "x.state <> 'released'", read: readAllocations, // its devices
		recent: "(x.state <> 'released' OR x.created_at > mesh.clock() - make_interval(secs => $2))",
	},
}

var readCursor = pg.Define(pg.RoleLifecycle, "findings.read_cursor",
	`SELECT coalesce((SELECT pos FROM lifecycle.event_cursor WHERE name = $1), 0)`)

// lookAtRows is the drift guard. The rows are read before what the log says of them, up to the last event that is committed: an event of a row's version
// is committed with it, so that what the log does not say then was never said.
func (s *Sweeper) lookAtRows(ctx context.Context) ([]Seen, error) {
	if err := s.forget(ctx); err != nil {
		return nil, err
	}
	var pos int64
	if err := pg.QueryRow(ctx, s.deps.DB, readCursor, cursorName).Scan(&pos); err != nil {
		return nil, fmt.Errorf("read cursor: %w", err)
	}
	var out []Seen
	for _, name := range guarded {
		t, src := rowTypes[name], sources[name]
		rows, err := s.suspects(ctx, t)
		if err != nil {
			return nil, err
		}
		for chunk := range slices.Chunk(rows, guardBatch) {
			seen, err := s.compare(ctx, t, src, pos, chunk)
			if err != nil {
				return nil, err
			}
			out = append(out, seen...)
		}
		broken, err := s.unsealed(ctx, t, rows)
		if err != nil {
			return nil, err
		}
		out = append(out, broken...)
		gone, err := s.gone(ctx, t)
		if err != nil {
			return nil, err
		}
		out = append(out, gone...)
	}
	broken, err := s.breaches(ctx)
	if err != nil {
		return nil, err
	}
	return s.withEvidence(ctx, append(out, broken...))
}

// suspect is a row that was written since it last agreed with the log: by which transaction, whether its seal fits, and what stood in it then.
type suspect struct {
	ID     string `db:"id"`
	Xmin   string `db:"written_by"`
	Sealed bool   `db:"sealed"`
	Image  []byte `db:"image"`
}

// changedRows reads the rows of a type that were written since they last agreed with the log.
var changedRows = pg.DefineDynamic(pg.RoleLifecycle, "findings.changed_rows", func(rowType string) string {
	src := sources[rowType]
	return `SELECT x.` + src.id + `::text AS id, x.xmin::text AS written_by, x.seal IS NOT DISTINCT FROM lifecycle.digest(x) AS sealed, to_jsonb(x) - 'seal' AS image
		FROM ` + src.table + ` x LEFT JOIN lifecycle.row_witness v ON v.row_type = $1 AND v.row_id = x.` + src.id + `
		WHERE CASE WHEN v.row_id IS NULL THEN ` + src.recent + ` ELSE v.agreed_xmin <> x.xmin::text OR ` + src.always + ` END`
}, guarded...)

// suspects reads which rows there are to compare. Whoever writes a row leaves the id of his transaction on it: a row that carries the same as when it
// last agreed is as it was.
func (s *Sweeper) suspects(ctx context.Context, t *rowType) ([]suspect, error) {
	out, err := pg.All[suspect](ctx, s.deps.DB, changedRows.For(t.name), t.name, s.cfg.Keep.Seconds())
	if err != nil {
		return nil, fmt.Errorf("look for changed rows: %w", err)
	}
	return out, nil
}

// said is what the log says of one row: every version that is at hand, and the highest.
type said struct {
	versions map[int64]map[string]any
	highest  int64
}

func (w *said) add(version int64, payload map[string]any) {
	if w.versions == nil {
		w.versions = map[int64]map[string]any{}
	}
	w.versions[version] = payload
	w.highest = max(w.highest, version)
}

func (s *Sweeper) compare(ctx context.Context, t *rowType, src source, pos int64, chunk []suspect) ([]Seen, error) {
	rowIDs := make([]string, len(chunk))
	for i, c := range chunk {
		rowIDs[i] = c.ID
	}
	now, err := src.read(ctx, s, rowIDs)
	if err != nil {
		return nil, err
	}
	log, err := s.saidOf(ctx, t, pos, rowIDs)
	if err != nil {
		return nil, err
	}
	var out []Seen
	var back []string // rows that look as if they had gone back: they may have been read before the event that is ahead of them
	var agreed []suspect
	for _, c := range chunk {
		a, ok := now[c.ID]
		if !ok {
			continue // gone says so
		}
		w := log[c.ID]
		payload, at := w.versions[a.version]
		switch {
		case a.unreadable != "":
			out = append(out, changed(t, c.ID, a, w, map[string]any{}, map[string]any{"unreadable": a.unreadable}, "it cannot be read"))
		case at:
			before, after, err := differences(t, payload, a.payload)
			if err != nil {
				return nil, err
			}
			if len(before) > 0 {
				out = append(out, changed(t, c.ID, a, w, before, after, strings.Join(sortedKeys(before), ", ")+" differ from the event of its version"))
			} else if a.version == w.highest && c.Sealed {
				agreed = append(agreed, c)
			}
		case w.highest == 0:
			out = append(out, changed(t, c.ID, a, w, map[string]any{"row": nil}, a.payload, "no event speaks of it"))
		case a.version > w.highest:
			before, after, err := differences(t, w.versions[w.highest], a.payload)
			if err != nil {
				return nil, err
			}
			out = append(out, changed(t, c.ID, a, w, before, after, fmt.Sprintf("no event speaks of its version %d", a.version)))
		default:
			back = append(back, c.ID)
		}
	}
	wentBack, err := s.wentBack(ctx, t, src, log, back)
	if err != nil {
		return nil, err
	}
	out = append(out, wentBack...)
	return out, s.agree(ctx, t, agreed)
}

// wentBack reads rows once more that stood below their highest event, now that the event is known.
func (s *Sweeper) wentBack(ctx context.Context, t *rowType, src source, log map[string]*said, rowIDs []string) ([]Seen, error) {
	if len(rowIDs) == 0 {
		return nil, nil
	}
	now, err := src.read(ctx, s, rowIDs)
	if err != nil {
		return nil, err
	}
	var out []Seen
	for _, id := range rowIDs {
		a, ok := now[id]
		w := log[id]
		if !ok || a.version >= w.highest {
			continue
		}
		before, after, err := differences(t, w.versions[w.highest], a.payload)
		if err != nil {
			return nil, err
		}
		out = append(out, changed(t, id, a, w, before, after, fmt.Sprintf("its version went back from %d to %d", w.highest, a.version)))
	}
	return out, nil
}

// saidOf reads what the log says of rows: what is kept, and what is committed and not yet followed.
func (s *Sweeper) saidOf(ctx context.Context, t *rowType, pos int64, rowIDs []string) (map[string]*said, error) {
	out := map[string]*said{}
	for _, id := range rowIDs {
		out[id] = &said{}
	}
	kept, err := readWitnesses(ctx, s.deps.DB, ofRows, t.name, rowIDs)
	if err != nil {
		return nil, err
	}
	for k, w := range kept {
		out[k.id].add(w.version, w.payload)
	}
	unread, err := events.Unread(ctx, s.deps.DB, pos, t.name, rowIDs)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it read
	}
	for _, r := range unread {
		if k, payload, ok := s.witnessed(ctx, r); ok {
			out[k.id].add(r.AggregateVersion, payload)
		}
	}
	return out, nil
}

var noteAgreement = pg.Define(pg.RoleLifecycle, "findings.note_agreement",
	`UPDATE lifecycle.row_witness v SET agreed_xmin = x.xmin, image = x.image::jsonb
		FROM unnest($2::uuid[], $3::text[], $4::text[]) AS x (id, xmin, image)
		WHERE v.row_type = $1 AND v.row_id = x.id AND v.agreed_xmin <> x.xmin`)

// agree notes which transaction's rows were found in agreement, and what stood in them.
func (s *Sweeper) agree(ctx context.Context, t *rowType, rows []suspect) error {
	if len(rows) == 0 {
		return nil
	}
	var rowIDs, xmins, images []string
	for _, r := range rows {
		rowIDs, xmins, images = append(rowIDs, r.ID), append(xmins, r.Xmin), append(images, string(r.Image))
	}
	_, err := pg.Exec(ctx, s.deps.DB, noteAgreement, t.name, rowIDs, xmins, images)
	if err != nil {
		return fmt.Errorf("note agreement: %w", err)
	}
	return nil
}

// gone finds rows that the log speaks of and that are not there: the product deletes none.
func (s *Sweeper) gone(ctx context.Context, t *rowType) ([]Seen, error) {
	kept, err := readWitnesses(ctx, s.deps.DB, ofMissing(t.name), t.name)
	if err != nil {
		return nil, err
	}
	var out []Seen
	for k, w := range kept {
		before, err := spelled(t, w.payload)
		if err != nil {
			return nil, err
		}
		text := func(name string) string { v, _ := w.payload[name].(string); return v }
		a := actual{workspaceID: text("workspace_id"), tenantID: text("tenant_id"), nodeID: text("node_id")}
		out = append(out, changed(t, k.id, a, &said{highest: w.version}, before, map[string]any{"row": nil}, "it is gone"))
	}
	return out, nil
}

// breaches are the breaks within the log that nobody has acknowledged.
func (s *Sweeper) breaches(ctx context.Context) ([]Seen, error) {
	kept, err := readWitnesses(ctx, s.deps.DB, ofBreaches)
	if err != nil {
		return nil, err
	}
	var out []Seen
	for k, w := range kept {
		t := rowTypes[k.rowType]
		before, _ := w.breach["before"].(map[string]any)
		after, _ := w.breach["after"].(map[string]any)
		text := func(name string) string { v, _ := w.payload[name].(string); return v }
		a := actual{workspaceID: text("workspace_id"), tenantID: text("tenant_id"), nodeID: text("node_id"), version: w.version}
		x := changed(t, k.id, a, &said{highest: w.version}, before, after,
			fmt.Sprintf("what follows version %v in the log is version %v, with %s changed", w.breach["from"], w.breach["to"], strings.Join(sortedKeys(before), ", ")))
		x.NextAction = nextBreach
		out = append(out, x)
	}
	return out, nil
}

// changedOutside is how the summary of every finding on a row begins.
func changedOutside(rowType, id string) string {
	return fmt.Sprintf("the row of %s %s was changed outside its saga: ", rowType, id)
}

// changed is a row's finding.
func changed(t *rowType, id string, a actual, w *said, before, after map[string]any, why string) Seen {
	out := Seen{
		Kind: rowChanged, Severity: p1, SubjectType: t.name, SubjectID: id, WorkspaceID: a.workspaceID, TenantID: a.tenantID, NodeID: a.nodeID,
		Summary: changedOutside(t.name, id) + why, NextAction: nextChanged,
		Before: map[string]any{"version": w.highest}, After: map[string]any{"version": a.version}, Certain: true,
	}
	if t.name == "allocation" {
		out.AllocationID = id
	}
	maps.Copy(out.Before, before)
	maps.Copy(out.After, after)
	return out
}

// differences are the fields that matter and differ, as people read them.
func differences(t *rowType, log, now map[string]any) (map[string]any, map[string]any, error) {
	was, err := spelled(t, log)
	if err != nil {
		return nil, nil, err
	}
	before, after := map[string]any{}, map[string]any{}
	for k := range now {
		if k != "version" && !slices.Contains(t.quiet, k) && !reflect.DeepEqual(was[k], now[k]) {
			before[k], after[k] = was[k], now[k]
		}
	}
	return before, after, nil
}

func (t *rowType) message() proto.Message {
	switch t.name {
	case "workspace":
		return &lifecyclev1.Workspace{}
	case "run":
		return &lifecyclev1.Run{}
	default:
		return &lifecyclev1.Allocation{}
	}
}

// spelled spells an event's payload as a row that stands is spelled.
func spelled(t *rowType, payload map[string]any) (map[string]any, error) {
	raw, err := json.Marshal(payload)
	if err != nil {
		return nil, fmt.Errorf("spell event: %w", err)
	}
	m := t.message()
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, m); err != nil {
		return nil, fmt.Errorf("read event: %w", err)
	}
	return fields(m)
}

func fields(m proto.Message) (map[string]any, error) {
	raw, err := names.MarshalJSON(m)
	if err != nil {
		return nil, fmt.Errorf("spell row: %w", err)
	}
	out := map[string]any{}
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, fmt.Errorf("spell row: %w", err)
	}
	return out, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func readWorkspaces(ctx context.Context, s *Sweeper, rowIDs []string) (map[string]actual, error) {
	rows, err := saga.ReadWorkspaces(ctx, s.deps.DB, rowIDs)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it read
	}
	out := map[string]actual{}
	for i := range rows {
		w := &rows[i]
		a := actual{version: w.Version, workspaceID: w.ID, tenantID: w.TenantID, nodeID: w.NodeID}
		p, err := w.Proto()
		if err != nil {
			a.unreadable = err.Error()
		} else if a.payload, err = fields(p); err != nil {
			a.unreadable = err.Error()
		}
		out[w.ID] = a
	}
	return out, nil
}

func readRuns(ctx context.Context, s *Sweeper, rowIDs []string) (map[string]actual, error) {
	rows, err := saga.ReadRuns(ctx, s.deps.DB, rowIDs)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it read
	}
	out := map[string]actual{}
	for i := range rows {
		r := &rows[i]
		a := actual{version: r.Version, workspaceID: r.WorkspaceID, tenantID: r.TenantID}
		if a.payload, err = fields(r.Proto()); err != nil {
			a.unreadable = err.Error()
		}
		out[r.ID] = a
	}
	return out, nil
}

func readAllocations(ctx context.Context, s *Sweeper, rowIDs []string) (map[string]actual, error) {
	rows, err := workspace.ReadAllocations(ctx, s.deps.DB, rowIDs)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it read
	}
	out := map[string]actual{}
	for _, p := range rows {
		a := actual{version: p.GetVersion(), workspaceID: p.GetWorkspaceId(), tenantID: p.GetTenantId(), nodeID: p.GetNodeId()}
		if a.payload, err = fields(p); err != nil {
			a.unreadable = err.Error()
		}
		out[p.GetAllocationId()] = a
	}
	return out, nil
}
