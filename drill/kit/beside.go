package kit

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/gpuaas/mesh/drill/kit/mesh"
)

// Beside runs drills on some meshes at a time, since most of what a drill does is wait: each mesh takes the next drill
// when it has ended one. The results are in the order of the drills. The error is one of the meshes, not of a drill.
func Beside(ctx context.Context, meshes []*mesh.Mesh, drills []Drill, o Options) ([]Result, error) {
	results, failed := make([][]Result, len(drills)), make([]error, len(meshes))
	var mu sync.Mutex
	if each := o.Each; each != nil {
		o.Each = func(r Result) {
			mu.Lock()
			defer mu.Unlock()
			each(r)
		}
	}
	next := make(chan int, len(drills))
	for i := range drills {
		next <- i
	}
	close(next)
	var running sync.WaitGroup
	for at, m := range meshes {
		running.Go(func() {
			for i := range next {
				if results[i], failed[at] = All(ctx, m, drills[i:i+1], o); failed[at] != nil {
					return
				}
			}
		})
	}
	running.Wait()
	return slices.Concat(results...), errors.Join(failed...)
}
