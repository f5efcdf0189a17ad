package kit

import (
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// Control is a drill that must fail.
type Control string

// The controls of every drill; none is the drill itself.
const (
	None     Control = ""
	Withheld Control = "fault-withheld"
	Mutated  Control = "detector-mutated"
)

// Controls returns the controls of a drill, in the order in which they run.
func Controls() []Control { return []Control{Withheld, Mutated} }

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

	// Nodes are those of the fault, as the API showed them once the verdict was there.
	Nodes []*readmodelv1.Node `json:"-"`
}
