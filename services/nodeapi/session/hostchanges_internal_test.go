package session

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// TestChangedAddressesAreBounded: an address that comes and goes is reported at most once a minute, and any other
// change at once.
func TestChangedAddressesAreBounded(t *testing.T) {
	of := func(kernel string, addresses ...string) *commonv1.HostFacts {
		return &commonv1.HostFacts{Kernel: kernel, Addresses: addresses}
	}
	start := time.Now()
	var c hostChanges
	c.reported(of("1", "a"))
	for i, step := range []struct {
		at     int // seconds
		report *commonv1.HostFacts
		want   *commonv1.HostFacts
	}{
		{0, nil, nil},
		{1, of("1", "a"), nil},
		{2, of("1", "a", "b"), of("1", "a", "b")},
		{3, of("1", "a"), nil},
		{4, of("1", "a", "b"), nil}, // back
		{70, nil, nil},
		{71, of("1", "c"), of("1", "c")},
		{72, of("1", "d"), nil},
		{73, of("2", "d"), of("2", "d")}, // another kernel
		{80, of("2", "e"), nil},
		{90, nil, nil},
		{133, nil, of("2", "e")},
		{134, nil, nil},
	} {
		got := c.take(step.report, start.Add(time.Duration(step.at)*time.Second))
		if got.GetKernel() != step.want.GetKernel() || len(got.GetAddresses()) != len(step.want.GetAddresses()) {
			t.Errorf("step %d: %v, want %v", i+1, got, step.want)
		}
	}
}
