package readmodel_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
)

// TestADatabaseThatABenchSeededIsRefused: its rows do not describe a mesh, and a service that trusted them would act on
// them.
func TestADatabaseThatABenchSeededIsRefused(t *testing.T) {
	k := newKit(t)
	admin, err := pgx.Connect(testkit.Context(t), k.DB.AdminURL())
	k.check(err)
	defer admin.Close(testkit.Context(t))
	_, err = admin.Exec(testkit.Context(t), `INSERT INTO mesh.seeded (seeded_by) VALUES ('gpuaas bench')`)
	k.check(err)
	registry, err := obs.NewRegistry()
	k.check(err)
	_, err = readmodel.New(testkit.Context(t), readmodel.Deps{Logger: testkit.Logger(t), Registry: registry}, k.config)
	if !fault.Has(err, commonv1.Reason_REASON_DATABASE_SEEDED) {
		t.Errorf("a service on a database that a bench seeded: %v", err)
	}
	allowed := k.config
	allowed.SeededDatabase = true
	k.start(allowed)
}

// TestADatabaseThatDoesNotSayWhetherItWasSeededIsAskedAgain: the service waits for one that is not migrated yet, and
// ends if a bench seeded it.
func TestADatabaseThatDoesNotSayWhetherItWasSeededIsAskedAgain(t *testing.T) {
	k := newKit(t)
	admin, err := pgx.Connect(testkit.Context(t), k.DB.AdminURL())
	k.check(err)
	defer admin.Close(testkit.Context(t))
	exec := func(sql string) {
		t.Helper()
		_, err := admin.Exec(testkit.Context(t), sql)
		k.check(err)
	}
	exec(`ALTER TABLE mesh.seeded RENAME TO seeded_later`)
	registry, err := obs.NewRegistry()
	k.check(err)
	service, err := readmodel.New(testkit.Context(t), readmodel.Deps{Logger: testkit.Logger(t), Registry: registry},
		k.config)
	k.check(err)
	exec(`INSERT INTO mesh.seeded_later (seeded_by) VALUES ('gpuaas bench')`)
	ended := make(chan error, 1)
	go func() { ended <- service.Run(testkit.Context(t)) }()
	exec(`ALTER TABLE mesh.seeded_later RENAME TO seeded`)
	if err := <-ended; !fault.Has(err, commonv1.Reason_REASON_DATABASE_SEEDED) {
		t.Errorf("a service whose database turned out to be seeded by a bench: %v", err)
	}
}
