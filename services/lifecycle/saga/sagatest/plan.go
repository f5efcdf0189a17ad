package sagatest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// point is a kill point as one step passes it.
type point struct {
	name string
	step int
	dir  string
}

func (p point) String() string { return fmt.Sprintf("%s at step %d (%s)", p.name, p.step, p.dir) }

// plan is the fault to inject into one run. newPlan returns a plan without a fault.
type plan struct {
	failDo     int  // step whose Do fails for good; -1 none
	afterwards bool // it fails after its work was done
	failUndo   int  // step whose Undo fails; -1 none
	undoTimes  int  // how often; -1 until healed
	twice      bool // every Do and Undo is called twice
	cancelAt   int  // step at which the run is cancelled before its work; -1 none
	turnBack   bool // the run is cancelled after the work of its last step
	beside     bool // the run is started beside a driver that runs already
	crash      *point

	mu      sync.Mutex
	hits    int // of the intended fault
	healed  bool
	seen    []point
	crashed chan struct{}
}

func newPlan() *plan {
	return &plan{failDo: -1, failUndo: -1, cancelAt: -1, crashed: make(chan struct{})}
}

var (
	errInjected = errors.New("injected failure")
	errCrash    = errors.New("injected crash")
)

func (p *plan) hit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hits++
}

// points returns the OnPoint hook of one core: it records the kill points passed, and crashes at the intended one,
// once. A core that crashed commits nothing more.
func (p *plan) points() func(context.Context, string, saga.Place) error {
	var dead atomic.Bool
	return func(_ context.Context, name string, at saga.Place) error {
		if dead.Load() {
			return errCrash
		}
		here := point{name: name, step: at.Step, dir: at.Direction}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.seen = append(p.seen, here)
		if p.crash == nil || *p.crash != here || p.hits > 0 {
			return nil
		}
		p.hits++
		dead.Store(true)
		close(p.crashed)
		return errCrash
	}
}

// wrap puts the plan around every step of def.
func (p *plan) wrap(def saga.Definition, core func() *saga.Core, db pg.Beginner) saga.Definition {
	steps := make([]saga.Step, len(def.Steps))
	copy(steps, def.Steps)
	cancel := func(ctx context.Context, env *saga.Env) error {
		err := pg.InTx(context.WithoutCancel(ctx), db, func(ctx context.Context, tx pgx.Tx) error {
			_, err := core().Cancel(ctx, tx, env.RunID, "sagatest", "planned")
			return err
		})
		core().Committed()
		return err
	}
	for i := range steps {
		do, undo := steps[i].Do, steps[i].Undo
		last := i == len(steps)-1
		steps[i].Retry = quick(steps[i].Retry)
		steps[i].UndoRetry = quick(steps[i].UndoRetry)
		steps[i].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
			if p.failDo == i && !p.afterwards {
				p.hit()
				return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INTERNAL,
					"planned", errInjected)
			}
			if p.cancelAt == i {
				p.hit()
				if err := cancel(ctx, env); err != nil {
					return saga.Outcome{}, err
				}
				<-ctx.Done()
				return saga.Outcome{}, context.Cause(ctx)
			}
			out, err := do(ctx, env)
			if p.twice && err == nil {
				out, err = do(ctx, env)
			}
			if err != nil || out.Waits() {
				return out, err
			}
			if p.failDo == i {
				p.hit()
				return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INTERNAL,
					"planned", errInjected)
			}
			if p.turnBack && last {
				if err := cancel(ctx, env); err != nil {
					return saga.Outcome{}, err
				}
			}
			return out, nil
		}
		if undo == nil {
			continue
		}
		steps[i].Undo = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
			if p.failUndo == i && p.stillFails() {
				return saga.Outcome{}, fmt.Errorf("undo: %w", errInjected)
			}
			out, err := undo(ctx, env)
			if p.twice && err == nil {
				out, err = undo(ctx, env)
			}
			return out, err
		}
	}
	def.Steps = steps
	return def
}

func (p *plan) stillFails() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.healed || (p.undoTimes >= 0 && p.hits >= p.undoTimes) {
		return false
	}
	p.hits++
	return true
}

func (p *plan) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.healed = true
}

func (p *plan) passed() ([]point, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]point(nil), p.seen...), p.hits
}
