package app

import (
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

func TestHeapPercent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		live uint64
		want int
	}{
		{0, 400},
		{4 << 20, 400},
		{8 << 20, 200},
		{smallGrowth, 100},
		{heapGrowth, 100},
		{2 * heapGrowth, 50},
		{4 * heapGrowth, 25},
		{1 << 40, 25},
	} {
		if got := heapPercent(tt.live); got != tt.want {
			t.Errorf("heapPercent(%d) = %d, want %d", tt.live, got, tt.want)
		}
	}
}

// TestALargeHeapIsCollectedSooner holds four times the growth and watches the pace of collections, of the whole
// process: it must not run beside other tests.
func TestALargeHeapIsCollectedSooner(t *testing.T) {
	if pace, set := os.LookupEnv("GOGC"); set {
		t.Setenv("GOGC", pace) // t.Setenv restores it at the end
		if err := os.Unsetenv("GOGC"); err != nil {
			t.Fatal(err)
		}
	}
	pace := func() uint64 {
		sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	stop := BoundHeap()
	held := [][]byte{make([]byte, 4*heapGrowth)}
	defer stop()
	becomes := func(what string, least, most uint64) {
		testkit.Eventually(t, testkit.Patience, func() error {
			runtime.GC()
			if got := pace(); got < least || got > most {
				return fmt.Errorf("%s is collected when it has grown by %d %%, want %d to %d", what, got, least, most)
			}
			return nil
		})
	}
	becomes("a heap of 128 MiB", leastHeapPercent, leastHeapPercent)
	clear(held)
	becomes("a small heap", usualHeapPercent, mostHeapPercent)
	runtime.KeepAlive(held)
}
