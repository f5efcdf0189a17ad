package plans_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// logOf appends as many events as there are days, times perDay, a day each if byDay, and returns a seq and an id from
// the middle.
func logOf(t *testing.T, db *testkit.Database, days, perDay int, byDay bool) (int64, string) {
	t.Helper()
	ctx := testkit.Context(t)
	sequencer, err := events.NewSequencer(
		events.SequencerDeps{Pool: db.Pool(pg.RoleSequencer), Logger: testkit.Logger(t)}, events.SequencerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for day := range days {
		if byDay {
			testkit.SetClockOffset(db, time.Duration(day)*24*time.Hour)
			for more := true; more; {
				if err := db.Pool(pg.RoleReadmodel).QueryRow(ctx,
					`SELECT x.next IS NOT NULL
					FROM events.cut_events('0', '00000000-0000-0000-0000-000000000000', 500) x`).Scan(&more); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := db.Pool(pg.RoleLifecycle).Exec(ctx, `
			INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
			SELECT gen_random_uuid(), 'run.changed', 'run', n::text, 1, '{}'
			FROM generate_series(1, $1) n`, perDay); err != nil {
			t.Fatal(err)
		}
		if err := sequencer.Drain(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.OwnerPool().Exec(ctx, `VACUUM ANALYZE`); err != nil {
		t.Fatal(err)
	}
	var seq int64
	var id string
	if err := db.Pool(pg.RoleLifecycle).QueryRow(ctx,
		`SELECT seq, id::text FROM events.event ORDER BY seq OFFSET $1 LIMIT 1`, days*perDay/2).
		Scan(&seq, &id); err != nil {
		t.Fatal(err)
	}
	return seq, id
}

// TestPartitionsOfTheLogCostAProbeEach: with fifteen days a statement over events touches no more buffers than over a
// log of one partition, and a probe of an index in each of the others.
func TestPartitionsOfTheLogCostAProbeEach(t *testing.T) {
	testkit.IO(t)
	const days, perDay, probe = 15, 1000, 4
	one, many := testkit.DB(t), testkit.DB(t)
	oneSeq, oneID := logOf(t, one, days, perDay, false)
	manySeq, manyID := logOf(t, many, days, perDay, true)
	args := func(seq int64, id string) map[string][]string {
		var list []string
		for i := range int64(100) {
			list = append(list, fmt.Sprint(seq+i))
		}
		seqs, kinds, lo, hi := "'{"+strings.Join(list, ",")+"}'", "'{run.changed}'", fmt.Sprint(seq), fmt.Sprint(seq+99)
		return map[string][]string{
			"events.read_positions":         {"'" + id + "'", "'c'"},
			"events.read_positions_of_seq":  {lo, "'c'"},
			"events.fetch_listed":           {lo, hi, seqs},
			"events.fetch_listed_of_kinds":  {lo, hi, seqs, kinds},
			"events.fetch_between":          {lo, hi},
			"events.fetch_between_of_kinds": {lo, hi, kinds},
			"events.measure_age":            {seqs},
			"events.measure_lag":            {"'c'"},
			"project.newest_event":          {kinds},
			"project.newest_of_late_events": {kinds},
			"events.read_horizon":           {},
			"auditlog.end_of_audit":         {"'c'"},
		}
	}
	before, after := args(oneSeq, oneID), args(manySeq, manyID)
	ran := 0
	for _, s := range plans.Measured() {
		role := s.Roles()[0]
		if before[s.Name()] == nil || role != pg.RoleReadmodel && !slices.Contains(s.Roles(), pg.RoleReadmodel) {
			continue
		}
		ran++
		was, err := plans.Explain(testkit.Context(t), one.Pool(pg.RoleReadmodel), s, before[s.Name()])
		if err != nil {
			t.Fatal(err)
		}
		is, err := plans.Explain(testkit.Context(t), many.Pool(pg.RoleReadmodel), s, after[s.Name()])
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d buffers, %d with a partition a day", s.Name(), was.Buffers, is.Buffers)
		most := was.Buffers + probe*(days+4)
		if s.Name() == "project.newest_of_late_events" {
			most = was.Buffers + 2*probe // of what was written last, and no other
		}
		if is.Buffers > most {
			t.Errorf("%s touches %d buffers with a partition a day, and %d with one:\n%s",
				s.Name(), is.Buffers, was.Buffers, is.Plan)
		}
	}
	if ran < 9 {
		t.Errorf("%d statements were measured", ran)
	}
}
