// Package policy owns what may be tuned and what may not be exceeded: the policy keys with their bounds, the budgets of
// the failure matrix, and the table that gives every state a budget, exits, an owner and an operator's verb.
//
// It is data and pure functions. It accepts values only within the bounds; a stored value outside them counts as
// absent. It decides nothing about a node or a workspace: sweeps, alerts and drills read the same numbers from it.
//
// Guarantees: a Set never changes; a Source always returns one: the last good one, or the defaults if there was none.
package policy

import (
	"slices"
	"time"
)

// Severity grades a failure. A lower number is worse.
type Severity int

// The severities, with their default budgets: P0 is found within a minute and ended within 15, P1 within five minutes
// and an hour, P2 within half an hour and by the next business day.
const (
	P0 Severity = iota
	P1
	P2
)

func (s Severity) String() string { return [...]string{"P0", "P1", "P2"}[min(max(s, P0), P2)] }

// Detect returns the default detection budget.
func (s Severity) Detect() time.Duration {
	return [...]time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute}[min(max(s, P0), P2)]
}

// Recover returns the default recovery budget.
func (s Severity) Recover() time.Duration {
	return [...]time.Duration{15 * time.Minute, time.Hour, 24 * time.Hour}[min(max(s, P0), P2)]
}

// The names of the policy keys.
const (
	RecoveryTokenMaxAgeSeconds    = "node.recovery_token_max_age_seconds"
	HeartbeatStaleAfterSeconds    = "node.heartbeat_stale_after_seconds"
	TaskStaleSweepIntervalSeconds = "node.task_stale_sweep_interval_seconds"
	AuditDedupeWindowSeconds      = "audit.dedupe_window_seconds"
	CertificateTTLSeconds         = "node.certificate_ttl_seconds"
	StreamMaxAgeSeconds           = "node.stream_max_age_seconds"
	AutoRecovery                  = "node.auto_recovery"
	RecoveryAttemptsPerHour       = "node.recovery_attempts_per_hour"
	TrustDwellSeconds             = "trust.dwell_seconds"
	SagaStepStallSeconds          = "saga.step_stall_seconds"
	SagaWaitReadyStallSeconds     = "saga.wait_ready_stall_seconds"
	SagaStallSeconds              = "saga.stall_seconds"
	SagaRetryLimit                = "saga.retry_limit"
	SagaCancelGraceSeconds        = "saga.cancel_grace_seconds"
	ChurnRecreatesPerHour         = "churn.recreates_per_hour"
	BrakeFleetFraction            = "brake.fleet_fraction"
	BrakeIdentityFraction         = "brake.identity_fraction"
	BrakeIdentityLeast            = "brake.identity_least"
	WorkloadCrashLoopRestarts     = "workload.crash_loop_restarts"
	OperationKeyPromiseSeconds    = "operation.key_promise_seconds"
	RetentionTasksSeconds         = "retention.tasks_seconds"
	RetentionRunsSeconds          = "retention.runs_seconds"
	RetentionWorkspacesSeconds    = "retention.workspaces_seconds"
	RetentionOperationKeysSeconds = "retention.operation_keys_seconds"
	RetentionFindingsSeconds      = "retention.findings_seconds"
	RetentionIdentitiesSeconds    = "retention.identities_seconds"
	RetentionCredentialsSeconds   = "retention.credentials_seconds" //nolint:gosec // the name of a key
	RetentionRecoveriesSeconds    = "retention.recoveries_seconds"
	RetentionTimelineSeconds      = "retention.timeline_seconds"
	RetentionEventsSeconds        = "retention.events_seconds"
	RetentionAuditSeconds         = "retention.audit_seconds"
	RetentionAuthoritySeconds     = "retention.authority_seconds"
	FencedReviewSeconds           = "node.fenced_review_seconds"
	StorageLimitMebibytes         = "storage.limit_mebibytes"
	BudgetP0DetectSeconds         = "budget.p0.detect_seconds"
	BudgetP0RecoverSeconds        = "budget.p0.recover_seconds"
	BudgetP1DetectSeconds         = "budget.p1.detect_seconds"
	BudgetP1RecoverSeconds        = "budget.p1.recover_seconds"
	BudgetP2DetectSeconds         = "budget.p2.detect_seconds"
	BudgetP2RecoverSeconds        = "budget.p2.recover_seconds"
)

// Kind is the type of a key's value.
type Kind int

// The kinds.
const (
	Seconds  Kind = iota // a whole number of seconds
	Count                // a whole number
	Fraction             // 0 to 1
	Flag                 // true or false
)

func (k Kind) String() string {
	return [...]string{"seconds", "count", "fraction", "flag"}[min(max(k, Seconds), Flag)]
}

// Direction is the direction in which a key is tightened.
type Direction int

// The directions.
const (
	Neither Direction = iota // a trade-off: no value is weaker than another
	Lower                    // lower is tighter
	Higher
)

// Key is one policy key. Values are spelled as text, as they are stored.
type Key struct {
	Name      string
	Kind      Kind
	Default   string
	Min, Max  string // refused outside; empty for a flag
	Tightens  Direction
	Severity  Severity // of what gets worse when the key is weakened
	Owner     string   // the service that acts on it
	Meaning   string
	Guarded   bool // a weakening is acknowledged whatever the severity
	min, max  float64
	defaulted float64
}

// Keys returns every key in the order they are listed to people.
func Keys() []Key { return slices.Clone(keys) }

// Lookup returns the key of a name.
func Lookup(name string) (Key, bool) {
	for _, k := range keys {
		if k.Name == name {
			return k, true
		}
	}
	return Key{}, false
}

// keys is never written after the process starts.
var keys = prepare([]Key{
	{
		Name: RecoveryTokenMaxAgeSeconds, Kind: Seconds, Default: "86400", Min: "60", Max: "604800", Tightens: Lower,
		Severity: P1, Owner: "recovery",
		Meaning: "how old a recovery token may be and still enrol its node without an operator",
	},
	{
		Name: HeartbeatStaleAfterSeconds, Kind: Seconds, Default: "120", Min: "2", Max: "900", Tightens: Lower, Severity: P1,
		Owner:   "recovery",
		Meaning: "how long a node may be silent, while we listen, before its heartbeat counts as stale",
	},
	{
		Name: TaskStaleSweepIntervalSeconds, Kind: Seconds, Default: "60", Min: "1", Max: "600", Tightens: Lower,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how often tasks past their last moment to start are swept into history",
	},
	{
		Name: AuditDedupeWindowSeconds, Kind: Seconds, Default: "300", Min: "10", Max: "3600", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "the window within which equal audit rows are counted instead of repeated",
	},
	{
		Name: CertificateTTLSeconds, Kind: Seconds, Default: "28800", Min: "20", Max: "172800", Tightens: Lower, Severity: P0,
		Owner: "recovery",
		Meaning: "how long a node certificate lives; it is renewed at about half of that, and may not exceed a third of " +
			"the recovery token's age",
	},
	{
		Name: StreamMaxAgeSeconds, Kind: Seconds, Default: "3600", Min: "10", Max: "86400", Tightens: Lower, Severity: P1,
		Owner:   "nodeapi",
		Meaning: "how long one stream lives, plus or minus a fifth, before it is replaced by a new connection",
	},
	{
		Name: AutoRecovery, Kind: Flag, Default: "true", Tightens: Neither, Severity: P1, Owner: "recovery",
		Meaning: "whether a node may enrol again by its recovery token; false leaves it to operators",
	},
	{
		Name: RecoveryAttemptsPerHour, Kind: Count, Default: "6", Min: "1", Max: "60", Tightens: Lower, Severity: P1,
		Owner:   "recovery",
		Meaning: "how often one node may try to enrol again by itself within an hour",
	},
	{
		Name: TrustDwellSeconds, Kind: Seconds, Default: "600", Min: "1", Max: "3600", Tightens: Lower, Severity: P1,
		Owner:   "recovery",
		Meaning: "how long an agent does not trust the node API before it asks recovery for the trust that is current",
	},
	{
		Name: FencedReviewSeconds, Kind: Seconds, Default: "604800", Min: "60", Max: "31536000", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "how long a node may stay fenced before an incident reminds operators of it",
	},
	{
		Name: SagaStepStallSeconds, Kind: Seconds, Default: "300", Min: "1", Max: "3600", Tightens: Lower, Severity: P1,
		Owner:   "lifecycle",
		Meaning: "how long a step may go without progress before it is flagged as stalled",
	},
	{
		Name: SagaWaitReadyStallSeconds, Kind: Seconds, Default: "600", Min: "1", Max: "7200", Tightens: Lower, Severity: P1,
		Owner:   "lifecycle",
		Meaning: "the same for the step that waits for workloads to be ready",
	},
	{
		Name: SagaStallSeconds, Kind: Seconds, Default: "900", Min: "1", Max: "14400", Tightens: Lower, Severity: P1,
		Owner:   "lifecycle",
		Meaning: "how long a whole run may take before it is flagged as stalled",
	},
	{
		Name: SagaRetryLimit, Kind: Count, Default: "3", Min: "1", Max: "10", Tightens: Lower, Severity: P2,
		Owner:   "lifecycle",
		Meaning: "how many retries a workspace has in a window before one needs an override",
	},
	{
		Name: SagaCancelGraceSeconds, Kind: Seconds, Default: "30", Min: "1", Max: "300", Tightens: Neither, Severity: P2,
		Owner:   "lifecycle",
		Meaning: "how long a cancelled step may take to stop before it is abandoned and compensated",
	},
	{
		Name: ChurnRecreatesPerHour, Kind: Count, Default: "4", Min: "1", Max: "60", Tightens: Lower, Severity: P1,
		Owner: "recovery",
		Meaning: "how often the watchdog may recreate a workspace within an hour; the instances of a placement share a " +
			"budget of their own",
	},
	{
		Name: WorkloadCrashLoopRestarts, Kind: Count, Default: "3", Min: "1", Max: "100", Tightens: Neither, Severity: P2,
		Owner: "lifecycle",
		Meaning: "after how many restarts the next exit of a workload that is not ready yet is a crash loop, which fails " +
			"the operation that provisions it; " +
			"one that is not restarted fails it with its first exit; a recreation fails by neither and waits on. In an " +
			"active workspace as many restarts in a row, each " +
			"after a run shorter than a minute, and one more exit are shown as a crash loop",
	},
	{
		Name: BrakeFleetFraction, Kind: Fraction, Default: "0.2", Min: "0.01", Max: "0.5", Tightens: Lower, Severity: P0,
		Owner: "recovery",
		Meaning: "the share of the fleet that may drift within five minutes before we suspect ourselves and stop " +
			"automatic repair",
	},
	{
		Name: BrakeIdentityFraction, Kind: Fraction, Default: "0.01", Min: "0.001", Max: "0.5", Tightens: Lower, Severity: P0,
		Owner: "recovery",
		Meaning: "the share of the active nodes that may be refused or held within five minutes because recovery lacks a " +
			"record of theirs, before it suspects " +
			"itself, engages the brake and tells them to wait. Such nodes come singly, machine by machine; many at once lack " +
			"what we have lost",
	},
	{
		Name: BrakeIdentityLeast, Kind: Count, Default: "3", Min: "1", Max: "1000", Tightens: Lower, Severity: P0,
		Owner:   "recovery",
		Meaning: "how many nodes may be refused or held in this way however small the fleet is",
	},
	{
		Name: OperationKeyPromiseSeconds, Kind: Seconds, Default: "2592000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "the least value of retention.operation_keys_seconds: it bounds that term, and keeps no key by itself",
	},
	{
		Name: RetentionTasksSeconds, Kind: Seconds, Default: "1209600", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how long a task stays in the rows of its owner after its end, with what came late of it",
	},
	{
		Name: RetentionRunsSeconds, Kind: Seconds, Default: "2592000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how long runs, their steps, released claims, released allocations and ended instances stay after their end",
	},
	{
		Name: RetentionWorkspacesSeconds, Kind: Seconds, Default: "2592000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how long a workspace stays after it was decommissioned",
	},
	{
		Name: RetentionOperationKeysSeconds, Kind: Seconds, Default: "2592000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how long idempotency keys of operations are kept, and get the same answer; not less than " +
			"operation.key_promise_seconds",
	},
	{
		Name: RetentionFindingsSeconds, Kind: Seconds, Default: "7776000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "lifecycle",
		Meaning: "how long a finding stays after it was resolved, and settled evidence of changes by hand",
	},
	{
		Name: RetentionIdentitiesSeconds, Kind: Seconds, Default: "7776000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "how long a retired node stays, with its gate and its tombstones",
	},
	{
		Name: RetentionCredentialsSeconds, Kind: Seconds, Default: "1209600", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "how long certificates, tokens and enrolments of nodes stay after they are of no use",
	},
	{
		Name: RetentionRecoveriesSeconds, Kind: Seconds, Default: "15552000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "how long recovery records and incidents stay after their end",
	},
	{
		Name: RetentionTimelineSeconds, Kind: Seconds, Default: "7776000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "readmodel",
		Meaning: "how long what has ended is shown: timelines, tasks, instances, decommissioned workspaces, retired nodes",
	},
	{
		Name: RetentionEventsSeconds, Kind: Seconds, Default: "1209600", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "readmodel",
		Meaning: "how long events stay that every consumer has read",
	},
	{
		Name: RetentionAuditSeconds, Kind: Seconds, Default: "34560000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "readmodel",
		Meaning: "how long rows of the audit log stay; they are cut up to a signed checkpoint alone",
	},
	{
		Name: RetentionAuthoritySeconds, Kind: Seconds, Default: "7776000", Min: "1", Max: "315360000", Tightens: Neither,
		Severity: P2, Owner: "recovery",
		Meaning: "how long certificates, tokens and revocations stay in the authority's own database after they have " +
			"ended, where it has one",
	},
	{
		Name: StorageLimitMebibytes, Kind: Count, Default: "0", Min: "0", Max: "1000000000", Tightens: Neither, Severity: P1,
		Owner:   "recovery",
		Meaning: "how many MiB the database may take before its disk is full; 0 if that is not known",
	},
	{
		Name: BudgetP0DetectSeconds, Kind: Seconds, Default: "60", Min: "1", Max: "600", Tightens: Lower, Severity: P0,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P0 is detected; a row of the matrix that is tighter stays so",
	},
	{
		Name: BudgetP0RecoverSeconds, Kind: Seconds, Default: "900", Min: "1", Max: "6300", Tightens: Lower, Severity: P0,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P0 is over, where no person decides; a row that is tighter stays so",
	},
	{
		Name: BudgetP1DetectSeconds, Kind: Seconds, Default: "300", Min: "1", Max: "3000", Tightens: Lower, Severity: P1,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P1 is detected; a row of the matrix that is tighter stays so",
	},
	{
		Name: BudgetP1RecoverSeconds, Kind: Seconds, Default: "3600", Min: "1", Max: "25200", Tightens: Lower, Severity: P1,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P1 is over, where no person decides; a row that is tighter stays so",
	},
	{
		Name: BudgetP2DetectSeconds, Kind: Seconds, Default: "1800", Min: "1", Max: "18000", Tightens: Lower, Severity: P2,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P2 is detected; a row of the matrix that is tighter stays so",
	},
	{
		Name: BudgetP2RecoverSeconds, Kind: Seconds, Default: "86400", Min: "1", Max: "604800", Tightens: Lower, Severity: P2,
		Owner: "recovery", Guarded: true,
		Meaning: "within which a failure of severity P2 is over, where no person decides; a row that is tighter stays so",
	},
})

func prepare(list []Key) []Key {
	for i := range list {
		k := &list[i]
		k.defaulted, _ = k.parse(k.Default)
		if k.Kind != Flag {
			k.min, _ = k.parse(k.Min)
			k.max, _ = k.parse(k.Max)
		}
	}
	return list
}
