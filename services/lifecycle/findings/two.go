package findings

import (
	"context"
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// sourceTwo begins the source of findings on two instances of one workspace; the placement that runs both follows.
const sourceTwo = "two_instances"

// errStillAsked means that a placement has not answered an earlier sweep.
var errStillAsked = errors.New("the placement has not answered an earlier question for its list")

// sourceOfTwo returns the source of findings on two instances that a placement runs.
func sourceOfTwo(kind commonv1.PlacementDriver) string { return sourceTwo + "/" + names.Of(kind) }

// lastReport is how long a sweep whose context ended waits for placements that heed the context.
const lastReport = time.Second

// SweepTwoInstances finds the workspaces of which a placement runs two instances at once. It is a sweep of its own, and
// queries each placement separately: a failure or a missing answer of another check or placement does not prevent the
// finding. It returns when ctx ends; a placement that ignores its context is not queried again until it has answered.
func (s *Sweeper) SweepTwoInstances(ctx context.Context) (Swept, error) {
	standing, err := s.standing(ctx)
	if err != nil { // each placement is settled, whatever stands
		standing = s.sources
	}
	type result struct {
		swept Swept
		err   error
	}
	results := make(chan result, len(s.deps.Drivers)) // with room for all: a goroutine that is left behind does not block
	for kind, driver := range s.deps.Drivers {
		if _, asked := s.asked.LoadOrStore(kind, true); asked {
			results <- result{err: fmt.Errorf("%s: %w", sourceOfTwo(kind), errStillAsked)}
			continue
		}
		go func() {
			defer s.asked.Delete(kind)
			var one result
			one.err = app.Protect(ctx, func(ctx context.Context) error {
				source := sourceOfTwo(kind)
				return s.check(ctx, detector{source, func(ctx context.Context) ([]finding.Seen, error) {
					return s.detect.TwoInstances(ctx, kind, driver)
				}}, standing, &one.swept)
			})
			results <- one
		}()
	}
	var total Swept
	var errs []error
	for range s.deps.Drivers {
		select {
		case one := <-results:
			total.add(one.swept)
			errs = append(errs, one.err)
		case <-ctx.Done():
			// A result that arrives with the end of ctx is more useful than the error of ctx.
			select {
			case one := <-results:
				total.add(one.swept)
				errs = append(errs, one.err)
			case <-time.After(lastReport):
				return total, errors.Join(append(errs,
					fmt.Errorf("%s: a placement does not answer: %w", sourceTwo, context.Cause(ctx)))...)
			}
		}
	}
	return total, errors.Join(errs...)
}
