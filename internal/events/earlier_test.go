package events_test

import (
	"context"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestALogOfAnEarlierBuildIsNotWrittenAnew takes databases of the first build that was measured (6ab6b95) and of the
// build before the partitions (baf0d5c) to this one: the table is the first partition as it is, its events are read by
// their positions, and events that are appended next get later positions.
func TestALogOfAnEarlierBuildIsNotWrittenAnew(t *testing.T) {
	testkit.IO(t)
	for build, last := range map[string]string{"6ab6b95": "00053", "baf0d5c": "00219"} {
		t.Run(build, func(t *testing.T) {
			ctx, d := testkit.Context(t), testkit.DB(t)
			admin, err := pgx.Connect(ctx, d.AdminURL())
			must(t, err)
			defer admin.Close(context.WithoutCancel(ctx))
			_, err = admin.Exec(ctx, `DO $$ DECLARE s text; BEGIN
				FOREACH s IN ARRAY '{events, lifecycle, nodeapi, recovery, readmodel, mesh}'::text[] LOOP
					EXECUTE 'DROP SCHEMA ' || s || ' CASCADE';
				END LOOP;
			END $$`)
			must(t, err)
			_, err = schema.Migrate(ctx, d.URL(pg.RoleOwner), schema.MigrateOptions{Files: upTo(t, last)})
			must(t, err)
			for range 3 {
				_, err = d.Pool(pg.RoleLifecycle).Exec(ctx,
					`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
					VALUES ($1, 'e', 'probe', 'x', 1, '{}')`, ids.New())
				must(t, err)
			}
			seq := newSequencer(t, d, nil, nil, events.SequencerConfig{})
			must(t, seq.Drain(ctx))
			var before, after uint32
			file := `SELECT pg_relation_filenode($1::regclass)`
			must(t, admin.QueryRow(ctx, file, "events.event").Scan(&before))
			_, err = schema.Migrate(ctx, d.URL(pg.RoleOwner), schema.MigrateOptions{})
			must(t, err)
			if must(t, admin.QueryRow(ctx, file, "events.event_first").Scan(&after)); after != before {
				t.Errorf("the log was written anew: it was in file %d, and is in %d", before, after)
			}
			appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2))
			must(t, seq.Drain(ctx))
			d.Pool(pg.RoleReadmodel).Reset()
			all, _, err := events.Read(ctx, d.Pool(pg.RoleReadmodel), 0, nil, 10)
			must(t, err)
			if len(all) != 4 || all[3].Pos != all[0].Pos+3 || all[3].AggregateVersion != 2 {
				t.Errorf("read %+v", all)
			}
			// A migration that is interrupted before it is recorded is run again.
			owner, err := pgx.Connect(ctx, d.URL(pg.RoleOwner))
			must(t, err)
			defer owner.Close(context.WithoutCancel(ctx))
			up, _ := halves(t, "00220_event_partitions.sql")
			execEach(t, owner, up)
		})
	}
}

// upTo returns the migrations up to the one with the number last.
func upTo(t *testing.T, last string) fs.FS {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql")
	must(t, err)
	out := fstest.MapFS{}
	for _, name := range names {
		if strings.Compare(name[:5], last) <= 0 {
			data, err := fs.ReadFile(migrations.FS, name)
			must(t, err)
			out[name] = &fstest.MapFile{Data: data}
		}
	}
	return out
}
