package findings

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
)

const (
	cursorName  = "row-witness"
	followBatch = 1000
)

// rowType is a kind of rows that sagas own.
type rowType struct {
	name  string
	event string
	// fixed fields are never changed by any operation; rising ones never fall.
	fixed, rising []string
	// quiet fields change without an event.
	quiet []string
	// over says when the life of the row ended, by the field that dates its state; a row with none of these states lives.
	over   []string
	overAt string
}

var rowTypes = map[string]*rowType{ //nolint:gochecknoglobals // data
	"workspace": {
		name: "workspace", event: "workspace.changed", fixed: []string{"tenant_id", "name", "spec_digest", "created_at", "created_by"},
		rising: []string{"epoch"}, quiet: []string{"op_seq", "tenant"},
		over: []string{"WORKSPACE_STATE_DECOMMISSIONED"}, overAt: "state_at",
	},
	"run": {
		name: "run", event: "run.changed", fixed: []string{
			"workspace_id", "tenant_id", "kind", "definition", "def_version", "round", "parent_run_id", "epoch", "created_at", "step_names", "requester", "correlation_id",
		},
		rising: []string{"fence"}, quiet: []string{"next_at", "heartbeat_at", "changed_steps"},
		over: []string{"RUN_STATE_SUCCEEDED", "RUN_STATE_FAILED"}, overAt: "finished_at",
	},
	"allocation": {
		name: "allocation", event: "allocation.changed", fixed: []string{"workspace_id", "tenant_id", "epoch", "placement", "created_at"},
		rising: []string{"fence"}, quiet: []string{"orphans"},
		over: []string{"ALLOCATION_STATE_RELEASED"}, overAt: "state_at",
	},
}

const observedKind = "workload.observed"

func followedKinds() []string {
	kinds := []string{observedKind}
	for _, t := range rowTypes {
		kinds = append(kinds, t.event)
	}
	return kinds
}

// rowKey names a row.
type rowKey struct{ rowType, id string }

// witness is what the log last said of a row.
type witness struct {
	version int64
	payload map[string]any
	image   map[string]any // the whole row as it stood when it last agreed
	breach  map[string]any
}

// Follow reads the log up to its end and keeps what it last said of each row and of each workspace's workloads. It writes once for each row that
// changed, however often it did.
func (s *Sweeper) Follow(ctx context.Context) error {
	for {
		more := false
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			more, err = s.followOnce(ctx, tx)
			return err
		})
		if err != nil {
			return fmt.Errorf("follow the log: %w", err)
		}
		if !more {
			return nil
		}
	}
}

var makeCursor = pg.Define(pg.RoleLifecycle, "findings.make_cursor",
	`INSERT INTO lifecycle.event_cursor (name) VALUES ($1) ON CONFLICT DO NOTHING`)

var lockCursor = pg.Define(pg.RoleLifecycle, "findings.lock_cursor",
	`SELECT pos FROM lifecycle.event_cursor WHERE name = $1 FOR UPDATE`)

var moveCursor = pg.Define(pg.RoleLifecycle, "findings.move_cursor",
	`UPDATE lifecycle.event_cursor SET pos = $2, updated_at = mesh.clock() WHERE name = $1`)

func (s *Sweeper) followOnce(ctx context.Context, tx pgx.Tx) (bool, error) {
	_, err := pg.Exec(ctx, tx, makeCursor, cursorName)
	if err != nil {
		return false, fmt.Errorf("make cursor: %w", err)
	}
	var pos int64
	if err := pg.QueryRow(ctx, tx, lockCursor, cursorName).Scan(&pos); err != nil {
		return false, fmt.Errorf("read cursor: %w", err)
	}
	records, next, err := events.Read(ctx, tx, pos, followedKinds(), followBatch)
	if err != nil {
		return false, err //nolint:wrapcheck // it says what it read
	}
	if next <= pos {
		return false, nil
	}
	if err := s.keep(ctx, tx, records); err != nil {
		return false, err
	}
	if _, err := pg.Exec(ctx, tx, moveCursor, cursorName, next); err != nil {
		return false, fmt.Errorf("move cursor: %w", err)
	}
	return true, nil
}

// keep applies records, in order, to what is kept.
func (s *Sweeper) keep(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	held, err := witnessesOf(ctx, tx, records)
	if err != nil {
		return err
	}
	changed := map[rowKey]*witness{}
	seen := map[place]events.Record{}
	for _, r := range records {
		if r.Kind == observedKind {
			if r.Source == pg.RoleNodeAPI && ids.Valid(r.WorkspaceID) && ids.Valid(r.NodeID) {
				seen[place{r.WorkspaceID, r.NodeID}] = r
			}
			continue
		}
		k, payload, ok := s.witnessed(ctx, r)
		if !ok {
			continue
		}
		w := held[k]
		if w == nil {
			w = &witness{}
			held[k] = w
		}
		if r.AggregateVersion <= w.version {
			continue
		}
		if b := breach(rowTypes[k.rowType], w, r.AggregateVersion, payload); b != nil {
			w.breach = b
		}
		w.version, w.payload = r.AggregateVersion, payload
		changed[k] = w
	}
	if err := s.writeWitnesses(ctx, tx, changed); err != nil {
		return err
	}
	return writeReports(ctx, tx, seen)
}

// witnessed reads one event of a row. An event that cannot be read is another build's and is passed over; so is one that another service wrote.
func (s *Sweeper) witnessed(ctx context.Context, r events.Record) (rowKey, map[string]any, bool) {
	t := rowTypes[r.AggregateType]
	if t == nil || t.event != r.Kind || r.Source != pg.RoleLifecycle || !ids.Valid(r.AggregateID) {
		return rowKey{}, nil, false
	}
	payload := map[string]any{}
	raw, err := r.Payload()
	if err == nil && t.name == "workspace" {
		raw, err = secretenv.ShowNamesIn(raw)
	}
	if err == nil {
		err = json.Unmarshal(raw, &payload)
	}
	if err != nil {
		s.deps.Logger.WarnContext(ctx, "an event of a row cannot be read", slog.Int64("position", r.Pos), slog.String("kind", r.Kind), obs.Err(err))
		return rowKey{}, nil, false
	}
	delete(payload, "changed_steps")
	return rowKey{t.name, r.AggregateID}, payload, true
}

// breach says how an event cannot follow the last one: a version between them that no event spoke of, or a field that no operation changes. Nil if it
// can. A row whose first event was before the log or was forgotten has nothing to compare.
func breach(t *rowType, last *witness, version int64, payload map[string]any) map[string]any {
	if last.version == 0 {
		return nil
	}
	before, after := map[string]any{}, map[string]any{}
	if version != last.version+1 {
		before["version"], after["version"] = last.version, version
	}
	for _, f := range t.fixed {
		if !reflect.DeepEqual(last.payload[f], payload[f]) && !keyed(f, last.payload[f], payload[f]) {
			before[f], after[f] = last.payload[f], payload[f]
		}
	}
	for _, f := range t.rising {
		if number(payload[f]) < number(last.payload[f]) {
			before[f], after[f] = last.payload[f], payload[f]
		}
	}
	if len(before) == 0 {
		return nil
	}
	return map[string]any{"before": before, "after": after, "from": last.version, "to": version}
}

// keyed reports whether a field is the digest of a spec that was bare or under another key, and is keyed: the changes that lifecycle makes to rows of a
// build before keyed digests, and under a new first key. A digest under the same key is of another spec.
func keyed(field string, before, after any) bool {
	if field != "spec_digest" {
		return false
	}
	was, _ := before.(string)
	now, _ := after.(string)
	keyBefore, keyAfter := secretenv.KeysOfSpec(nil, was), secretenv.KeysOfSpec(nil, now)
	return keyBefore != "" && keyAfter != "" && keyAfter != secretenv.Unsealed && keyBefore != keyAfter
}

// number reads a 64-bit number as events spell it: a string, or absent for zero.
func number(v any) int64 {
	text, ok := v.(string)
	if !ok {
		return 0
	}
	var n int64
	if _, err := fmt.Sscan(text, &n); err != nil {
		return 0
	}
	return n
}

// witnessesOf reads what is kept of the rows that records speak of.
func witnessesOf(ctx context.Context, tx pgx.Tx, records []events.Record) (map[rowKey]*witness, error) {
	var types, rowIDs []string
	for _, r := range records {
		if rowTypes[r.AggregateType] != nil && ids.Valid(r.AggregateID) {
			types, rowIDs = append(types, r.AggregateType), append(rowIDs, r.AggregateID)
		}
	}
	return readWitnesses(ctx, tx, ofPairs, types, rowIDs)
}

// whose says which witnesses are read.
type whose string

const (
	ofPairs    whose = `JOIN (SELECT DISTINCT * FROM unnest($1::text[], $2::uuid[]) AS u (t, id)) x ON x.t = v.row_type AND x.id = v.row_id`
	ofRow      whose = `WHERE v.row_type = $1 AND v.row_id = $2`
	ofRows     whose = `WHERE v.row_type = $1 AND v.row_id = ANY ($2::uuid[])`
	ofBreaches whose = `WHERE v.breach_at IS NOT NULL`
)

// ofMissing is of the rows of a type that do not stand.
func ofMissing(rowType string) whose {
	src := sources[rowType]
	return whose(`WHERE v.row_type = $1 AND NOT EXISTS (SELECT 1 FROM ` + src.table + ` x WHERE x.` + src.id + ` = v.row_id)`)
}

var witnessesBy = pg.DefineDynamic(pg.RoleLifecycle, "findings.witnesses_by", func(clause whose) string {
	return `SELECT v.row_type, v.row_id::text, v.version, v.payload, v.image, v.breach FROM lifecycle.row_witness v ` + string(clause)
}, ofPairs, ofRow, ofRows, ofBreaches, ofMissing("workspace"), ofMissing("run"), ofMissing("allocation"))

func readWitnesses(ctx context.Context, q pg.Querier, clause whose, args ...any) (map[rowKey]*witness, error) {
	rows, err := pg.Query(ctx, q, witnessesBy.For(clause), args...)
	if err != nil {
		return nil, fmt.Errorf("read witnesses: %w", err)
	}
	out := map[rowKey]*witness{}
	for rows.Next() {
		var k rowKey
		w := &witness{}
		var image []byte
		err := rows.Scan(&k.rowType, &k.id, &w.version, &w.payload, &image, &w.breach)
		if err == nil {
			w.image, err = decode(image)
		}
		if err != nil {
			rows.Close()
			return nil, fmt.Errorf("read witness: %w", err)
		}
		out[k] = w
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read witnesses: %w", err)
	}
	return out, nil
}

var keepWitnesses = pg.Define(pg.RoleLifecycle, "findings.keep_witnesses", `
		INSERT INTO lifecycle.row_witness AS v (row_type, row_id, version, payload, over_at, breach, breach_at)
		SELECT x.t, x.id, x.version, x.payload::jsonb, x.over, x.breach::jsonb, CASE WHEN x.breach IS NOT NULL THEN mesh.clock() END
		FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::timestamptz[], $6::text[]) AS x (t, id, version, payload, over, breach)
		ON CONFLICT (row_type, row_id) DO UPDATE SET version = EXCLUDED.version, payload = EXCLUDED.payload, over_at = EXCLUDED.over_at,
			breach = EXCLUDED.breach, breach_at = CASE WHEN EXCLUDED.breach IS NULL THEN NULL
				WHEN EXCLUDED.breach = v.breach THEN v.breach_at ELSE EXCLUDED.breach_at END
		WHERE v.version < EXCLUDED.version`)

func (s *Sweeper) writeWitnesses(ctx context.Context, tx pgx.Tx, changed map[rowKey]*witness) error {
	if len(changed) == 0 {
		return nil
	}
	n := len(changed)
	types, rowIDs, versions, payloads := make([]string, 0, n), make([]string, 0, n), make([]int64, 0, n), make([]string, 0, n)
	over, breaches := make([]*time.Time, 0, n), make([]*string, 0, n)
	for k, w := range changed {
		payload, err := json.Marshal(w.payload)
		if err != nil {
			return fmt.Errorf("spell witness: %w", err)
		}
		var found *string
		if w.breach != nil {
			raw, err := json.Marshal(w.breach)
			if err != nil {
				return fmt.Errorf("spell witness: %w", err)
			}
			text := string(raw)
			found = &text
		}
		types, rowIDs, versions, payloads = append(types, k.rowType), append(rowIDs, k.id), append(versions, w.version), append(payloads, string(payload))
		over, breaches = append(over, rowTypes[k.rowType].ended(w.payload)), append(breaches, found)
	}
	_, err := pg.Exec(ctx, tx, keepWitnesses, types, rowIDs, versions, payloads, over, breaches)
	if err != nil {
		return fmt.Errorf("keep witnesses: %w", err)
	}
	return nil
}

// ended is when the life of a row ended; nil while it lives.
func (t *rowType) ended(payload map[string]any) *time.Time {
	for _, state := range t.over {
		if payload["state"] == state {
			text, _ := payload[t.overAt].(string)
			at, err := time.Parse(time.RFC3339Nano, text)
			if err != nil {
				return nil
			}
			return &at
		}
	}
	return nil
}

var keepReports = pg.Define(pg.RoleLifecycle, "findings.keep_reports", `
		INSERT INTO lifecycle.observed_workload AS o (workspace_id, node_id, payload, observed_at)
		SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[], $4::timestamptz[])
		ON CONFLICT (workspace_id, node_id) DO UPDATE SET payload = EXCLUDED.payload, observed_at = EXCLUDED.observed_at
		WHERE o.observed_at <= EXCLUDED.observed_at`)

// writeReports keeps the last word of each agent on each workspace.
func writeReports(ctx context.Context, tx pgx.Tx, seen map[place]events.Record) error {
	if len(seen) == 0 {
		return nil
	}
	var workspaces, nodes, payloads []string
	var at []time.Time
	for p, r := range seen {
		payload, err := r.Payload()
		if err != nil {
			continue // what cannot be read reports nothing
		}
		workspaces, nodes, payloads, at = append(workspaces, p.WorkspaceID), append(nodes, p.NodeID), append(payloads, string(payload)), append(at, r.CreatedAt)
	}
	_, err := pg.Exec(ctx, tx, keepReports, workspaces, nodes, payloads, at)
	if err != nil {
		return fmt.Errorf("keep agents' reports: %w", err)
	}
	return nil
}

var forgetWitnesses = pg.Define(pg.RoleLifecycle, "findings.forget_witnesses",
	`DELETE FROM lifecycle.row_witness v WHERE (v.row_type, v.row_id) IN (
		SELECT x.row_type, x.row_id FROM lifecycle.row_witness x WHERE x.over_at < mesh.clock() - make_interval(secs => $1)
			AND x.breach_at IS NULL LIMIT 1000)`)

var forgetReports = pg.Define(pg.RoleLifecycle, "findings.forget_reports",
	`DELETE FROM lifecycle.observed_workload o WHERE o.observed_at < mesh.clock() - make_interval(secs => $1)`)

// forget drops what is kept of rows whose life ended long ago, and reports that are stale.
func (s *Sweeper) forget(ctx context.Context) error {
	_, err := pg.Exec(ctx, s.deps.DB, forgetWitnesses, s.cfg.Keep.Seconds())
	if err != nil {
		return fmt.Errorf("forget witnesses: %w", err)
	}
	_, err = pg.Exec(ctx, s.deps.DB, forgetReports, s.cfg.Keep.Seconds())
	if err != nil {
		return fmt.Errorf("forget reports: %w", err)
	}
	return nil
}
