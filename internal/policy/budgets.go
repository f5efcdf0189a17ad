package policy

import "time"

// Recovery is what ends a failure: recovery within a number of minutes, or something else.
type Recovery string

// What may end a failure.
const (
	WithinBudget      Recovery = "within_budget"
	Automatic         Recovery = "automatic"
	NextSweep         Recovery = "next_sweep"
	NextProbe         Recovery = "next_probe"
	MaintenanceWindow Recovery = "maintenance_window"
	NoRecovery        Recovery = "none" // nothing is broken: the drill verifies that evidence stays
)

// Budget is one row of the failure matrix: how fast the failure is detected, and how fast it is over.
type Budget struct {
	Row      int
	Name     string // the drill's
	Severity Severity
	Detect   time.Duration // zero: nothing to detect
	// DetectKey adds the value of a policy key to Detect.
	DetectKey string
	// DetectFrom is the moment detection is counted from: `fault`, or `return` of the node or of the control plane.
	DetectFrom string
	// Deadline marks a detection budget that is itself a deadline: the 95th percentile may use all of it, not half.
	Deadline bool
	Recovery Recovery
	Recover  time.Duration // zero unless WithinBudget
}

// BudgetOf returns the row of a drill, and whether there is one.
func BudgetOf(name string) (Budget, bool) {
	for _, b := range budgets {
		if b.Name == name {
			return b, true
		}
	}
	return Budget{}, false
}

// DetectWithin returns the detection budget under a policy.
func (b Budget) DetectWithin(s Set) time.Duration {
	return budgetUnder(s, b.Detect, b.Severity.Detect(), detectKeys[b.Severity]) + s.Duration(b.DetectKey)
}

// RecoverUnder returns the recovery budget under a policy, as RecoverWithin does under the defaults.
func (b Budget) RecoverUnder(s Set) time.Duration {
	return budgetUnder(s, b.RecoverWithin(), b.Severity.Recover(), recoverKeys[b.Severity])
}

// The keys of the budgets of each severity.
var (
	detectKeys  = [...]string{P0: BudgetP0DetectSeconds, P1: BudgetP1DetectSeconds, P2: BudgetP2DetectSeconds}
	recoverKeys = [...]string{P0: BudgetP0RecoverSeconds, P1: BudgetP1RecoverSeconds, P2: BudgetP2RecoverSeconds}
)

// budgetUnder returns a row's budget under the value of its severity's key: the value, if the row has the severity's
// default or a weaker one, and otherwise the tighter of the two.
func budgetUnder(s Set, row, byDefault time.Duration, key string) time.Duration {
	value := s.Duration(key)
	if row == 0 || row < byDefault && row < value {
		return row
	}
	return value
}

// RecoverWithin returns the recovery budget: that of the row if Recovery is WithinBudget, zero if it is NoRecovery, and
// otherwise the severity's default, as the bound that a drill measures against.
func (b Budget) RecoverWithin() time.Duration {
	switch b.Recovery {
	case NoRecovery:
		return 0
	case WithinBudget:
		return b.Recover
	case Automatic, NextSweep, NextProbe, MaintenanceWindow:
		return b.Severity.Recover()
	default:
		return b.Severity.Recover()
	}
}

func within(row int, name string, severity Severity, detect, recov time.Duration) Budget {
	return Budget{
		Row: row, Name: name, Severity: severity, Detect: detect, DetectFrom: "fault", Recovery: WithinBudget,
		Recover: recov,
	}
}

func byItself(row int, name string, severity Severity, detect time.Duration, recovery Recovery) Budget {
	return Budget{Row: row, Name: name, Severity: severity, Detect: detect, DetectFrom: "fault", Recovery: recovery}
}

// budgets is never written after the process starts.
var budgets = []Budget{
	byItself(1, "short-node-outage", P2, 5*time.Minute, Automatic),
	{
		Row: 2, Name: "long-node-outage", Severity: P1, Detect: 5 * time.Minute, DetectFrom: "return", Recovery: WithinBudget,
		Recover: time.Hour,
	},
	within(3, "identity-rejected-after-profile-change", P1, 5*time.Minute, time.Hour),
	within(4, "control-plane-outage", P1, time.Minute, time.Hour),
	within(5, "ca-restart-drift", P0, time.Minute, 15*time.Minute),
	within(6, "ingress-trust-drift", P0, time.Minute, 15*time.Minute),
	within(7, "endpoint-profile-drift", P1, 5*time.Minute, time.Hour),
	within(8, "host-trust-drift", P1, 5*time.Minute, time.Hour),
	within(9, "trust-drift-blocks-recovery", P1, 5*time.Minute, time.Hour),
	within(10, "pre-auth-blind-spot", P1, 5*time.Minute, time.Hour),
	byItself(11, "edge-rate-limited", P2, 5*time.Minute, Automatic),
	within(12, "recovery-token-missing", P1, 5*time.Minute, time.Hour),
	within(13, "identity-fenced", P0, time.Minute, 15*time.Minute),
	within(14, "cloned-identity", P0, time.Minute, 15*time.Minute),
	byItself(15, "ip-route-drift", P2, 30*time.Minute, NextSweep),
	byItself(16, "task-backlog-stale", P2, 5*time.Minute, NextSweep),
	byItself(17, "dispatched-result-lost", P2, 30*time.Minute, Automatic),
	byItself(18, "app-probe-expires", P2, 5*time.Minute, NextProbe),
	within(19, "app-stopped", P1, 5*time.Minute, time.Hour),
	byItself(20, "app-false-unhealthy", P2, 5*time.Minute, NextProbe),
	within(21, "app-route-fails", P1, 5*time.Minute, time.Hour),
	within(22, "app-token-fails", P1, 5*time.Minute, time.Hour),
	within(23, "terminal-gateway-outage", P1, 5*time.Minute, time.Hour),
	{
		Row: 24, Name: "terminal-stream-never-connects", Severity: P1, Detect: 30 * time.Second, DetectFrom: "fault",
		Deadline: true, Recovery: WithinBudget, Recover: time.Hour,
	},
	byItself(25, "agent-version-drift", P2, 30*time.Minute, MaintenanceWindow),
	within(26, "clock-skew", P1, 5*time.Minute, time.Hour),
	byItself(27, "double-provision-race", P0, time.Minute, Automatic),
	byItself(28, "register-401-no-live-token", P1, time.Minute, Automatic),
	{
		Row: 29, Name: "saga-step-wedged", Severity: P1, Detect: 10 * time.Second, DetectKey: SagaStepStallSeconds,
		DetectFrom: "fault", Deadline: true, Recovery: WithinBudget, Recover: time.Hour,
	},
	within(30, "release-failed-stuck", P1, 5*time.Minute, time.Hour),
	{Row: 31, Name: "evidence-survives-reimage", Severity: P2, DetectFrom: "fault", Recovery: NoRecovery},
	byItself(32, "projection-drift", P2, 5*time.Minute, Automatic),
	within(33, "host-runtime-drift", P1, 5*time.Minute, time.Hour),
	within(34, "control-plane-rollback", P0, time.Minute, 15*time.Minute),
	{
		Row: 35, Name: "restore-reuses-nothing", Severity: P0, Detect: time.Minute, DetectFrom: "return",
		Recovery: WithinBudget, Recover: 15 * time.Minute,
	},
	byItself(36, "old-instance-wakes", P0, time.Minute, Automatic),
	within(37, "node-disk-full", P1, 5*time.Minute, time.Hour),
}
