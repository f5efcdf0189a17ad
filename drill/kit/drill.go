package kit

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	"github.com/gpuaas/mesh/internal/policy"
)

// Drill is one row of the matrix in executable form. Its severity and budgets are package policy's.
type Drill struct {
	Name string
	// Texts for people: the injected fault, how it is detected, how it ends, and what the drill needs.
	Injects, Sees, Recovers, Needs string
	// Outside marks a fault that can be injected through the API alone, so that it can be drilled on a mesh of another
	// operator.
	Outside bool
	Expect  Verdict
	// Mutation is the reason why the mutation is valid: it changes the detector of the fault, and neither the fault nor
	// what the drill reads of the API.
	Mutation string

	// Mutate changes the detector and returns the undo; nil: Run changes it, at a time of its own.
	Mutate func(ctx context.Context, r *Run) (undo func(context.Context) error, err error)
	// FailsAt is the stage at which the changed detector must make the drill fail.
	FailsAt stage.Stage
	Host    func() error // why this host cannot run it; nil: any host will do
	Run     func(ctx context.Context, r *Run) error
	Scale   time.Duration // by how much a scaled run is to detect sooner than production; zero: scaleDetect
	// Slow: the tests run its controls only when they may take long. It waits for a minute and more, or a control of
	// another drill mutates the same detector in the same way.
	Slow bool
}

// Verdict is what the API must report about the fault.
type Verdict struct {
	Reason    string // closed code
	UserState string // family
	Owner     string // who repairs it
	Next      string // a part of the next action
}

// Able returns why this host cannot run the drill on a mesh of its own; nil if it can. It changes nothing.
func (d Drill) Able() error {
	if d.Host == nil {
		return nil
	}
	if err := d.Host(); err != nil {
		return fmt.Errorf("%s: %w", d.Name, err)
	}
	return nil
}

// Budget returns the drill's row.
func (d Drill) Budget() policy.Budget {
	b, _ := policy.BudgetOf(d.Name) // a test holds that every drill has its row
	return b
}

// Scaled runs are judged by budgets as much shorter as their policy values make detection and repair: a quarter of the
// production budget to detect, where no policy key determines it, and a twelfth to recover.
const (
	scaleDetect  = 4
	scaleRecover = 12
)

// detectWithin returns the detection budget of a run under a policy.
func (d Drill) detectWithin(set policy.Set, scaled bool) time.Duration {
	b := d.Budget()
	if scaled && b.DetectKey == "" {
		return b.Detect / cmp.Or(d.Scale, scaleDetect)
	}
	return b.DetectWithin(set)
}

// RecoverWithin returns the recovery budget of a run.
func (d Drill) RecoverWithin(scaled bool) time.Duration {
	if scaled {
		return d.Budget().RecoverWithin() / scaleRecover
	}
	return d.Budget().RecoverWithin()
}

// Refuse returns why a drill cannot be run on a mesh; nil if it can.
func (d Drill) Refuse(m *mesh.Mesh) error {
	if !m.Own() && !d.Outside {
		return fmt.Errorf("%s: %w", d.Name, mesh.ErrNotOwn)
	}
	return nil
}
