package drive_test

import (
	"context"
	"errors"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// bed is a bed of sagatest with what the tests of this package add.
type bed struct{ *sagatest.Bed }

func newBed(t *testing.T, defs ...saga.Definition) *bed {
	t.Helper()
	return &bed{sagatest.NewBed(t, defs...)}
}

func bedOn(t *testing.T, db *testkit.Database, onPoint func(context.Context, string, saga.Place) error,
	defs ...saga.Definition,
) *bed {
	t.Helper()
	return &bed{sagatest.BedOn(t, db, onPoint, defs...)}
}

// second is another replica's core and driver on the same database.
func (b *bed) second(defs ...saga.Definition) *bed {
	b.T.Helper()
	return bedOn(b.T, b.DB, nil, defs...)
}

func (b *bed) exec(sql string, args ...any) {
	b.T.Helper()
	if _, err := b.DB.Pool(pg.RoleLifecycle).Exec(testkit.Context(b.T), sql, args...); err != nil {
		b.T.Fatalf("%s: %v", sql, err)
	}
}

var errBoom = errors.New("boom")
