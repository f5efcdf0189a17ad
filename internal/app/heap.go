package app

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
)

const (
	// heapGrowth is the number of bytes by which a heap larger than heapGrowth may grow between two collections.
	heapGrowth = 32 << 20
	// leastHeapPercent is the least growth in percent: a heap of many sessions must not be collected all the time.
	leastHeapPercent = 25
	usualHeapPercent = 100
	// smallGrowth is the number of bytes by which a smaller heap may grow, and mostHeapPercent the most in percent.
	smallGrowth     = 16 << 20
	mostHeapPercent = 400
)

// heapPercent returns by how many percent a heap with live bytes may grow until the next collection.
func heapPercent(live uint64) int {
	switch {
	case live <= smallGrowth*100/mostHeapPercent:
		return mostHeapPercent
	case live < smallGrowth:
		return int(smallGrowth * 100 / live)
	case live <= heapGrowth:
		return usualHeapPercent
	}
	return max(leastHeapPercent, int(heapGrowth*100/live))
}

// BoundHeap makes the heap of this process grow by at most 32 MiB, or by a quarter of what is live if that is more,
// until it is collected, in place of doubling. It is for a process whose heap is mostly idle connections: the garbage
// made while they open lies between the objects that they keep, so the process does not give that memory back. A heap
// of less than 16 MiB grows by that much, but at most to five times its size: to collect it more often saves little
// memory, and took an eighth of the processor time of a service while a fleet returned. If GOGC is set in the
// environment, BoundHeap leaves it in force and does nothing. The returned function removes the bound.
func BoundHeap() func() {
	if _, set := os.LookupEnv("GOGC"); set {
		return func() {}
	}
	b := &heapBound{percent: mostHeapPercent}
	before := debug.SetGCPercent(mostHeapPercent)
	b.arm()
	return func() {
		b.stopped.Store(true)
		debug.SetGCPercent(before)
	}
}

type heapBound struct {
	stopped atomic.Bool
	percent int // only cleanups change it, one after the other
}

// arm has the bound adjusted after the next collection, by the cleanup of an object that nothing refers to.
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
	// Each change of the percentage stops the program for a moment, so small ones are not made.
	if d := want - b.percent; -b.percent/8 <= d && d <= b.percent/8 {
		return
	}
	b.percent = want
	debug.SetGCPercent(want)
}
