package events_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestACutKeepsWhatIsUnread: whatever the term is, and wherever the cursors of consumers are, an event that a consumer
// has not read or has parked stays with its position, and so do all later events; older events that all consumers have
// read are cut.
func TestACutKeepsWhatIsUnread(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	writer, reader := db.Pool(pg.RoleLifecycle), db.Pool(pg.RoleReadmodel)
	sequencer, err := events.NewSequencer(events.SequencerDeps{Pool: db.Pool(pg.RoleSequencer), Logger: testkit.Logger(t)},
		events.SequencerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	schemas := []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}
	exec := func(rt *rapid.T, role, sql string, args ...any) {
		if _, err := db.Pool(role).Exec(ctx, sql, args...); err != nil {
			rt.Fatal(err)
		}
	}
	read := func(rt *rapid.T) map[int64]string {
		all, _, err := events.Read(ctx, reader, 0, nil, 100000)
		if err != nil {
			rt.Fatal(err)
		}
		out := map[int64]string{}
		for _, r := range all {
			out[r.Pos] = r.ID
		}
		return out
	}
	rapid.Check(t, func(rt *rapid.T) {
		for range rapid.IntRange(1, 4).Draw(rt, "rounds") {
			n := rapid.IntRange(1, 5).Draw(rt, "events")
			err := pg.InTx(ctx, writer, func(ctx context.Context, tx pgx.Tx) error {
				for range n {
					e := events.Event{Kind: "test.done", AggregateType: "test", AggregateID: ids.New(), AggregateVersion: 1}
					if _, err := events.Append(ctx, tx, e); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				rt.Fatal(err)
			}
			if err := sequencer.Drain(ctx); err != nil {
				rt.Fatal(err)
			}
		}
		before := read(rt)
		end, err := events.Horizon(ctx, reader)
		if err != nil {
			rt.Fatal(err)
		}
		slowest := end
		for _, s := range schemas {
			pos := rapid.Int64Range(max(end-20, 0), end).Draw(rt, s)
			slowest = min(slowest, pos)
			exec(rt, s, `INSERT INTO `+s+`.event_cursor (name, pos) VALUES ('c', $1) ON CONFLICT (name) DO UPDATE SET pos = $1`,
				pos)
			exec(rt, s, `DELETE FROM `+s+`.parked_event`)
			if rapid.IntRange(0, 3).Draw(rt, "parked") == 0 && pos > 0 {
				parked := rapid.Int64Range(max(pos-10, 1), pos).Draw(rt, "at")
				if before[parked] == "" {
					continue // the event was replayed and cut before
				}
				slowest = min(slowest, parked-1)
				exec(rt, s, `INSERT INTO `+s+`.parked_event (consumer, pos, event_id, kind, error, attempts)
						VALUES ('c', $1, $2, 'k', 'e', 1)`,
					parked, before[parked])
			}
		}
		old := rapid.Bool().Draw(rt, "old")
		term := time.Hour
		if old {
			term = 0
		}
		// A term that the caller passes counts only if it is longer than that of the policy.
		exec(rt, pg.RoleRecovery, `INSERT INTO mesh.policy (key, value, updated_by)
			VALUES ('retention.events_seconds', $1, 'test')
			ON CONFLICT (key) DO UPDATE SET value = $1`, strconv.Itoa(int(term.Seconds())))
		for next := new(string); next != nil; {
			if err := reader.QueryRow(ctx, `SELECT x.next::text FROM events.cut_events(make_interval(secs => $1), $2, $3) x`,
				0, "00000000-0000-0000-0000-000000000000", rapid.IntRange(1, 50).Draw(rt, "most")).Scan(&next); err != nil {
				rt.Fatal(err)
			}
		}
		after := read(rt)
		for pos, id := range before {
			switch {
			case after[pos] == id:
				if old && pos < slowest-10 && pos < end-10 {
					rt.Errorf("the event at %d, which all have read up to %d, is left", pos, slowest)
				}
			case after[pos] != "":
				rt.Errorf("position %d means another event", pos)
			case pos > slowest:
				rt.Errorf("the event at %d was cut, and it is read up to %d", pos, slowest)
			case !old:
				rt.Errorf("the event at %d was cut before its term", pos)
			}
		}
		if after[end] == "" {
			rt.Error("the newest event was cut")
		}
	})
}
