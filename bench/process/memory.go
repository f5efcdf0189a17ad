package process

import "runtime"

func read() (Memory, error) {
	rss, err := RSS()
	if err != nil {
		return Memory{}, err
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	// sizes of one process
	return Memory{RSS: rss, Heap: int64(m.HeapInuse), Stacks: int64(m.StackInuse), Goroutines: runtime.NumGoroutine()}, nil
}
