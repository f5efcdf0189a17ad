package stack_test

import (
	"sync"
	"testing"

	"github.com/gpuaas/mesh/internal/stack"
)

// deep uses about n KB of stack in many frames.
//
//go:noinline
func deep(n int) int {
	var frame [1000]byte
	frame[n%len(frame)] = 1
	if n == 0 {
		return 0
	}
	return deep(n-1) + int(frame[n%len(frame)])
}

func BenchmarkGrow(b *testing.B) {
	for name, first := range map[string]func(){"not": func() {}, "grown": stack.Grow} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				var wg sync.WaitGroup
				wg.Go(func() {
					first()
					deep(12)
				})
				wg.Wait()
			}
		})
	}
}
