package app

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
)

const (
	// heapGrowth is by how many bytes a heap that is larger than it may grow between two collections.
	heapGrowth = 32 << 20
	// leastHeapPercent is the least growth in percent: a heap of many sessions must not be collected all the time.
	leastHeapPercent = 25
	usualHeapPercent = 100
)

// heapPercent returns by how many percent a heap with live bytes may grow until the next collection.
func heapPercent(live uint64) int {
	if live <= heapGrowth {
		return usualHeapPercent
	}
	return max(leastHeapPercent, int(heapGrowth*100/live)) //nolint:gosec // at most 100
}

// BoundHeap makes the heap of this process grow by at most 32 MiB, or by a quarter of what is live if that is more, until it is collected, in place of
// doubling. It is for a process whose heap is mostly connections that rest: what is thrown away while they open is
// spread between what they keep, and the memory between stays with the process. GOGC in the environment counts
// instead. The returned function ends it.
func BoundHeap() func() {
	if _, set := os.LookupEnv("GOGC"); set {
		return func() {}
	}
	b := &heapBound{percent: usualHeapPercent}
	before := debug.SetGCPercent(usualHeapPercent)
	b.arm()
	return func() {
		b.stopped.Store(true)
		debug.SetGCPercent(before)
	}
}

type heapBound struct {
	stopped atomic.Bool
	percent int // is changed by cleanups alone, one after the other
}

// arm has the bound adjusted after the next collection: by the cleanup of an object that nothing holds.
func (b *heapBound) arm() {
	object := new([16]byte)
	runtime.AddCleanup(object, func(b *heapBound) {
		if b.stopped.Load() {
			return
		}
		b.adjust()
		b.arm()
	}, b)
}

func (b *heapBound) adjust() {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return
	}
	want := heapPercent(sample[0].Value.Uint64())
	// Each change stops the program for a moment.
	if d := want - b.percent; -b.percent/8 <= d && d <= b.percent/8 {
		return
	}
	b.percent = want
	debug.SetGCPercent(want)
}
