package drill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
	// Mutation is the reason why the mutation is valid: it changes the detector of the fault, and not the fault.
	Mutation string

	// mutate changes the detector and returns the undo; nil: the drill itself gives its verifier a changed reading.
	mutate func(ctx context.Context, r *Run) (undo func(context.Context) error, err error)
	// mutated is the stage at which the changed detector must make the drill fail.
	mutated Stage
	able    func() error // nil: any host will do
	run     func(ctx context.Context, r *Run) error
	scale   time.Duration // by how much a scaled run is to detect sooner than production; zero: scaleDetect
}

// Verdict is what the API must report about the fault.
type Verdict struct {
	Reason    string // closed code
	UserState string // family
	Owner     string // who repairs it
	Next      string // a part of the next action
}

// Stage is a part of a drill; of a failure, the part that failed.
type Stage string

// The stages, in their order.
const (
	StageGood     Stage = "known_good"
	StageInjected Stage = "injected"
	StageDetected Stage = "detected"
	StageVerdict  Stage = "verdict"
	StageRecover  Stage = "recovered"
	StageEvidence Stage = "evidence"
)

// Control is a drill that must fail.
type Control string

// The controls of every drill; none is the drill itself.
const (
	None     Control = ""
	Withheld Control = "fault-withheld"
	Mutated  Control = "detector-mutated"
)

// Result is the result of one drill. Durations are seconds of wall time.
type Result struct {
	Name                   string   `json:"name"`
	Severity               string   `json:"severity"`
	Injected               bool     `json:"injected"` // measured by something that shares no code with the detector
	Reason                 string   `json:"reason"`
	UserState              string   `json:"user_state"`
	DetectedSeconds        float64  `json:"detected_seconds"`
	DetectionBudgetSeconds float64  `json:"detection_budget_seconds"`
	RecoveredSeconds       float64  `json:"recovered_seconds"`
	RecoveryBudgetSeconds  float64  `json:"recovery_budget_seconds"`
	Passed                 bool     `json:"passed"`
	EvidenceIDs            []string `json:"evidence_ids"` // workspaces, runs, instances, allocations: each may be traced
	// Why names the failure and its stage; of a control, the expected failure.
	Why string `json:"why"`

	Row            int       `json:"row"`
	Form           string    `json:"form"` // `scaled` or `production`
	Control        string    `json:"control"`
	Stage          string    `json:"stage"` // where it failed
	Owner          string    `json:"owner"`
	NextAction     string    `json:"next_action"`
	InjectedBy     string    `json:"injected_by"` // how the fault was injected, and what measured it
	Recovery       string    `json:"recovery"`    // what ends the failure: `automatic`, `within_budget`
	DetectionP95   float64   `json:"detection_p95_seconds"`
	Notes          []string  `json:"notes"`
	StartedAt      time.Time `json:"started_at"`
	ElapsedSeconds float64   `json:"elapsed_seconds"`
}

// stageError is the failure of one stage.
type stageError struct {
	stage Stage
	err   error
}

func (e *stageError) Error() string { return fmt.Sprintf("%s: %v", e.stage, e.err) }
func (e *stageError) Unwrap() error { return e.err }

// stageOf returns the stage of which an error is the failure.
func stageOf(err error) (Stage, bool) {
	failed, ok := errors.AsType[*stageError](err)
	if !ok {
		return "", false
	}
	return failed.stage, true
}

// at makes an error the failure of a stage, unless it is one already.
func at(stage Stage, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := stageOf(err); ok {
		return err
	}
	return &stageError{stage, err}
}

// Drills returns every drill, in the order of the matrix.
func Drills() []Drill {
	return []Drill{doubleProvision(), register(), wedged(), releaseFailed(), restoreReusesNothing(), oldInstance(),
		diskFull()}
}

// Find returns the drills of these names in the order of the matrix; an unknown name is an error that lists the known
// ones.
func Find(names ...string) ([]Drill, error) {
	all := Drills()
	var unknown []string
	for _, n := range names {
		if !slices.ContainsFunc(all, func(d Drill) bool { return d.Name == n }) {
			unknown = append(unknown, n)
		}
	}
	if len(unknown) > 0 {
		known := make([]string, 0, len(all))
		for _, d := range all {
			known = append(known, d.Name)
		}
		return nil, fmt.Errorf("there is no drill %s; there are %s", strings.Join(unknown, ", "), strings.Join(known, ", "))
	}
	return slices.DeleteFunc(all, func(d Drill) bool { return !slices.Contains(names, d.Name) }), nil
}

// Able returns why this host cannot run the drill on a mesh of its own; nil if it can. It changes nothing.
func (d Drill) Able() error {
	if d.able == nil {
		return nil
	}
	if err := d.able(); err != nil {
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
		return b.Detect / cmp.Or(d.scale, scaleDetect)
	}
	return b.DetectWithin(set)
}

// recoverWithin returns the recovery budget of a run.
func (d Drill) recoverWithin(scaled bool) time.Duration {
	if scaled {
		return d.Budget().RecoverWithin() / scaleRecover
	}
	return d.Budget().RecoverWithin()
}
