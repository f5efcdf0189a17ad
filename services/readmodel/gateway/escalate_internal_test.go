package gateway

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// A person gets one bundle at a time, and people of tenants cannot take the last slot, which is for people of the
// operator.
func TestSlotsOfBundles(t *testing.T) {
	var s slots
	take := func(tenant, subject string) func() {
		t.Helper()
		free, err := s.take(rpc.Person{TenantID: tenant, Subject: subject})
		if err != nil {
			t.Fatal(err)
		}
		return free
	}
	refused := func(tenant, subject string) {
		t.Helper()
		if _, err := s.take(rpc.Person{TenantID: tenant, Subject: subject}); !fault.Has(err,
			commonv1.Reason_REASON_OVERLOADED) {
			t.Errorf("%s of %q: %v", subject, tenant, err)
		}
	}
	ana := take("a", "ana")
	refused("a", "ana")
	take("b", "ana") // another person
	take("a", "bob")
	refused("a", "carla")
	refused("b", "carla")
	op := take("", "op")
	refused("", "other")
	ana()
	refused("a", "ana") // the last one is not for tenants
	op()
	take("a", "ana")
	take("", "other")
}
