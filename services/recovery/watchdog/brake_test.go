package watchdog_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// TestARoundThatChangesNothingLocksNoRow holds that such a round leaves the row of the brake as it is: a lock of a row is written to it.
func TestARoundThatChangesNothingLocksNoRow(t *testing.T) {
	k := newKit(t)
	k.round()
	if n := k.count(`SELECT count(*) FROM recovery.brake WHERE xmax <> 0`); n != 0 {
		t.Error("a round that changed nothing has locked the row of the brake")
	}
}

// before runs fn before a statement of a connection.
type before struct {
	name string
	fn   func()
}

func (b before) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, b.name) {
		b.fn()
	}
	return ctx
}

func (before) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestABrakeThatAnotherChangedIsNotWritten holds for a replica of an earlier build, which locks the row and not what this one locks.
func TestABrakeThatAnotherChangedIsNotWritten(t *testing.T) {
	k := newKit(t)
	change := func(sql string) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, sql)
		k.must(err)
	}
	change(`UPDATE recovery.brake SET engaged = true, since = mesh.clock(), affected = 3, version = 1`)
	config, err := pgxpool.ParseConfig(k.db.URL(pg.RoleRecovery))
	k.must(err)
	config.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	config.ConnConfig.Tracer = before{name: "watchdog.update_brake", fn: func() { change(`UPDATE recovery.brake SET affected = 4, version = version + 1`) }}
	pool, err := pgxpool.NewWithConfig(k.ctx, config)
	k.must(err)
	t.Cleanup(pool.Close)
	w, err := watchdog.New(watchdog.Deps{Logger: testkit.Logger(t), Pool: pool, Lifecycle: k.owner, Policy: policy.Fixed{Set: k.policy}}, k.cfg)
	k.must(err)
	ada := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	_, err = w.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "the switch was replaced"})
	if !fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
		t.Errorf("the release of a brake that was changed meanwhile answered %v", err)
	}
	if n := k.count(`SELECT count(*) FROM recovery.brake WHERE engaged AND affected = 4 AND version = 2`); n != 1 {
		t.Error("the other's change was lost")
	}
}
