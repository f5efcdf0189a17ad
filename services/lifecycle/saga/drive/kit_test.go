package drive_test

import (
	"testing"

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
