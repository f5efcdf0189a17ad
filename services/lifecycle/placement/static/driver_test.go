package static_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement/placementtest"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConformance(t *testing.T) {
	testkit.IO(t)
	placementtest.Conform(t, static.New(testkit.DB(t).Pool(pg.RoleLifecycle)), ids.New())
}
