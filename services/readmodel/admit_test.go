package readmodel_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
)

// TestAdmittingAPersonWakesSequencers: `gpuaas dev` and `gpuaas compose admit` admit people over a connection of their
// own. The audit entry is numbered at once by the processes of services, whose sequencers poll every ten seconds.
func TestAdmittingAPersonWakesSequencers(t *testing.T) {
	testkit.IO(t)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	db := testkit.DB(t)
	file := t.TempDir() + "/url"
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(pki.WriteFile(file, []byte(db.URL(pg.RoleSequencer))))
	numbering, err := service.NewNumbering(ctx, testkit.Logger(t), "test", config.SecretFile(file))
	check(err)
	done := make(chan error, 1)
	go func() { done <- numbering.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		if !numbering.Numbered.Listening() {
			return errors.New("nothing listens yet")
		}
		return nil
	})
	woken := numbering.Wake.C()
	_, err = readmodel.AdmitPerson(ctx, db.Pool(pg.RoleReadmodel), readmodel.Admission{
		Name: "ada", Roles: []string{"viewer"}, Life: time.Hour,
	})
	check(err)
	select {
	case <-woken:
	case <-ctx.Done():
		t.Fatal("no sequencer was woken")
	}
}
