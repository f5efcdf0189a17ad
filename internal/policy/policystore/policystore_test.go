package policystore_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestStoredPolicyIsReadByEveryServiceAndWrittenByRecoveryOnly(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	db := testkit.DB(t)
	owner := db.Pool(pg.RoleRecovery)
	for _, value := range []string{"7", "9"} {
		if err := policystore.Put(ctx, owner, policy.SagaStallSeconds, value, "tester", "because"); err != nil {
			t.Fatal(err)
		}
	}
	for _, role := range pg.ServiceRoles() {
		if role == pg.RoleSequencer { // it numbers events and has no policy to follow
			continue
		}
		pool := db.Pool(role)
		source := policy.NewSource(policystore.Load(pool), testkit.Logger(t), policy.SourceConfig{})
		if err := source.Refresh(ctx); err != nil {
			t.Errorf("%s: %v", role, err)
			continue
		}
		if got := source.Current().SagaStall().Seconds(); got != 9 {
			t.Errorf("%s: saga stall %v", role, got)
		}
		err := policystore.Put(ctx, pool, policy.SagaRetryLimit, "1", role, "")
		if (role == pg.RoleRecovery) != (err == nil) {
			t.Errorf("%s: Put = %v", role, err)
		}
	}
	rows, err := policystore.List(ctx, owner)
	if err != nil || len(rows) != 2 || rows[1].Key != policy.SagaStallSeconds || rows[1].UpdatedBy != "tester" ||
		rows[1].Reason != "because" || rows[1].UpdatedAt.IsZero() {
		t.Errorf("List = %+v, %v", rows, err)
	}
}
