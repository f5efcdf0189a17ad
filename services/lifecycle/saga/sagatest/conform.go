// Package sagatest checks that a saga definition keeps the contract of the saga core.
//
// It owns the faults: it fails each step and each undo, does both twice, crashes the driver at every kill point the
// definition passes, and cancels at every step. It trusts only the resource's own list, never the claims. It never
// passes a run whose intended fault was not reached. A Bed is what the tests of the saga core run definitions of their
// own on.
package sagatest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Resource lists what a definition makes, by a query of the resource itself and not of our rows. A thing that was made
// twice is listed twice.
type Resource interface {
	List(ctx context.Context) ([]string, error)
}

// Case is a definition to be checked.
type Case struct {
	DB         *testkit.Database
	Definition saga.Definition
	Resource   Resource
	Input      any
	// Workspace prepares a workspace and returns its id; nil inserts a plain one of a tenant of its own.
	Workspace func(ctx context.Context, core *saga.Core, tx pgx.Tx) (string, error)
	// Clean removes the resources of a run that succeeded, by any means.
	Clean func(ctx context.Context, workspaceID string) error
	// Timeout bounds one run; zero means a minute.
	Timeout time.Duration
	// Running is called with the core of each run before its driver starts, for definitions that need its Wake. May be
	// nil.
	Running func(core *saga.Core)
}

// Conform runs every fault against the definition. Each is a subtest.
func Conform(t *testing.T, c Case) {
	t.Helper()
	if c.Timeout == 0 {
		c.Timeout = time.Minute
	}
	skew := new(time.Duration)
	begin := func(t *testing.T, p *plan) *trial {
		t.Helper()
		tr := &trial{t: t, c: c, plan: p, skew: skew}
		tr.begin()
		return tr
	}
	var there, back []point
	var made int
	ok := t.Run("succeeds", func(t *testing.T) {
		tr := begin(t, newPlan())
		tr.ends("succeeded", c.Definition.States.Succeeded)
		there, _ = tr.plan.passed()
		made = len(tr.list())
		tr.clean()
	})
	ok = ok && t.Run("is undone from its end", func(t *testing.T) {
		p := newPlan()
		p.turnBack = true
		tr := begin(t, p)
		tr.endsClean()
		back, _ = tr.plan.passed()
	})
	if !ok {
		return // nothing below can mean anything
	}
	for i := range c.Definition.Steps {
		conformStep(t, c, i, begin)
	}
	t.Run("does twice", func(t *testing.T) {
		p := newPlan()
		p.twice = true
		tr := begin(t, p)
		tr.ends("succeeded", c.Definition.States.Succeeded)
		if got := tr.list(); len(got) != made {
			t.Errorf("done twice, the resource lists %v: want %d", got, made)
		}
		tr.clean()
	})
	t.Run("undoes twice", func(t *testing.T) {
		p := newPlan()
		p.twice, p.turnBack = true, true
		begin(t, p).endsClean()
	})
	for _, at := range distinct(there) {
		t.Run("crashes on the way "+at.String(), func(t *testing.T) {
			p := newPlan()
			p.crash = &at
			tr := begin(t, p)
			tr.ends("succeeded", c.Definition.States.Succeeded)
			if got := tr.list(); len(got) != made {
				t.Errorf("after the crash the resource lists %v: want %d", got, made)
			}
			tr.wasHit()
			tr.clean()
		})
	}
	for _, name := range []string{"lease.opened", "lease.after_commit", "advance.before_commit"} {
		at := point{name: name, step: 0, dir: "do"}
		if len(c.Definition.Steps) == 1 || !slices.Contains(there, at) {
			continue // it has no such point
		}
		t.Run("started beside a driver, crashes "+at.String(), func(t *testing.T) {
			p := newPlan()
			p.crash, p.beside = &at, true
			tr := begin(t, p)
			tr.ends("succeeded", c.Definition.States.Succeeded)
			if got := tr.list(); len(got) != made {
				t.Errorf("after the crash the resource lists %v: want %d", got, made)
			}
			tr.wasHit()
			tr.clean()
		})
	}
	for _, at := range distinct(back) {
		if at.dir != "undo" && at.step != len(c.Definition.Steps)-1 {
			continue // shown on the way there
		}
		t.Run("crashes on the way back "+at.String(), func(t *testing.T) {
			p := newPlan()
			p.crash, p.turnBack = &at, true
			tr := begin(t, p)
			tr.endsClean()
			tr.wasHit()
		})
	}
}

func conformStep(t *testing.T, c Case, i int, begin func(*testing.T, *plan) *trial) {
	t.Helper()
	step := c.Definition.Steps[i]
	for _, afterwards := range []bool{false, true} {
		t.Run(fmt.Sprintf("fails at %q, work done %v", step.Name, afterwards), func(t *testing.T) {
			p := newPlan()
			p.failDo, p.afterwards = i, afterwards
			tr := begin(t, p)
			switch {
			case step.Retain:
				tr.ends("failed", c.Definition.States.Failed)
				tr.clean()
			case c.Definition.Sticks:
				tr.ends("stuck", commonv1.WorkspaceState_WORKSPACE_STATE_STUCK)
				tr.clean()
			default:
				tr.endsClean()
			}
			tr.wasHit()
		})
	}
	t.Run(fmt.Sprintf("is cancelled at %q", step.Name), func(t *testing.T) {
		if c.Definition.Uncancellable {
			return
		}
		p := newPlan()
		p.cancelAt = i
		tr := begin(t, p)
		tr.endsClean()
		tr.wasHit()
	})
	if step.Undo == nil {
		return
	}
	t.Run(fmt.Sprintf("undo of %q fails once", step.Name), func(t *testing.T) {
		p := newPlan()
		p.turnBack, p.failUndo, p.undoTimes = true, i, 1
		tr := begin(t, p)
		tr.endsClean()
		tr.wasHit()
	})
	t.Run(fmt.Sprintf("undo of %q fails until stuck", step.Name), func(t *testing.T) {
		p := newPlan()
		p.turnBack, p.failUndo, p.undoTimes = true, i, -1
		tr := begin(t, p)
		tr.ends("stuck", commonv1.WorkspaceState_WORKSPACE_STATE_STUCK)
		tr.wasHit()
		p.heal()
		err := pg.InTx(testkit.Context(t), tr.db(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := tr.core.RetryUndo(ctx, tx, tr.run, "sagatest")
			return err
		})
		tr.core.Committed()
		if err != nil {
			t.Fatal(err)
		}
		tr.endsClean()
	})
}

func distinct(points []point) []point {
	seen := map[point]bool{}
	var out []point
	for _, p := range points {
		if !seen[p] {
			seen[p] = true
			out = append(out, p)
		}
	}
	return out
}
