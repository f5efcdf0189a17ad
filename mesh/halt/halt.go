// Package halt removes what a mesh would leave behind: it is the forced stop of a process that runs one, and it removes
// the leftovers of others that died suddenly.
//
// It relies on the kernel for running processes and live owners: package reap finds processes, package scratch
// directories. Guarantees: nothing of a live mesh is touched; Force ends processes before it removes their directory.
package halt

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/mesh/agents"
)

// Kinds of temporary directories.
const (
	Dev   = "dev"
	Drill = "drill"
	Bench = "bench"
)

// Force returns the function that a forced stop calls before the process exits: it kills the children of this process
// and all agents, instances and workloads that run below dirs or below a temporary directory of this process, and
// removes the temporary ones. An empty path is passed over.
func Force(dirs ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		errs := []error{child.EndAll(ctx)}
		temporary := scratch.Held()
		below := dirs[:len(dirs):len(dirs)]
		for _, d := range temporary {
			below = append(below, d.Path())
		}
		for _, dir := range below {
			if dir != "" {
				errs = append(errs, endBelow(ctx, dir))
			}
		}
		for _, d := range temporary {
			errs = append(errs, d.Remove())
		}
		return errors.Join(errs...)
	}
}

func endBelow(ctx context.Context, dir string) error {
	_, err := agents.End(ctx, dir, 0)
	return err
}

// sweepWithin bounds a sweep: its caller waits to start something.
const sweepWithin = 20 * time.Second

// Sweep ends the processes that meshes, drills and benches have left running after a sudden death below their temporary
// directories, and removes those. It returns their paths.
func Sweep(ctx context.Context, logger *slog.Logger) []string {
	ctx, cancel := context.WithTimeout(ctx, sweepWithin)
	defer cancel()
	return scratch.Sweep(ctx, logger, endBelow, Dev, Drill, Bench)
}
