package policy_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

func TestKeysAreWhole(t *testing.T) {
	want := map[string]string{
		"node.recovery_token_max_age_seconds": "86400", "node.heartbeat_stale_after_seconds": "120",
		"node.task_stale_sweep_interval_seconds": "60", "audit.dedupe_window_seconds": "300",
		"node.certificate_ttl_seconds": "28800", "node.stream_max_age_seconds": "3600", "node.auto_recovery": "true",
		"node.recovery_attempts_per_hour": "6", "trust.dwell_seconds": "600", "saga.step_stall_seconds": "300",
		"saga.wait_ready_stall_seconds": "600", "saga.stall_seconds": "900", "saga.retry_limit": "3",
		"saga.cancel_grace_seconds": "30", "churn.recreates_per_hour": "4", "brake.fleet_fraction": "0.2",
		"workload.crash_loop_restarts": "3", "brake.identity_fraction": "0.01", "brake.identity_least": "3",
		"operation.key_promise_seconds": "2592000", "retention.operation_keys_seconds": "2592000",
		"retention.tasks_seconds": "1209600", "retention.runs_seconds": "2592000", "retention.workspaces_seconds": "2592000",
		"retention.findings_seconds": "7776000", "retention.identities_seconds": "7776000",
		"retention.credentials_seconds": "1209600", "retention.recoveries_seconds": "15552000",
		"retention.audit_seconds": "34560000", "retention.authority_seconds": "7776000",
		"retention.timeline_seconds": "7776000", "retention.events_seconds": "1209600", "storage.limit_mebibytes": "0",
		"node.fenced_review_seconds": "604800",
		"budget.p0.detect_seconds":   "60", "budget.p0.recover_seconds": "900", "budget.p1.detect_seconds": "300",
		"budget.p1.recover_seconds": "3600", "budget.p2.detect_seconds": "1800", "budget.p2.recover_seconds": "86400",
	}
	got := map[string]string{}
	for _, k := range policy.Keys() {
		got[k.Name] = k.Default
		if k.Meaning == "" || k.Owner == "" {
			t.Errorf("%s: meaning or owner missing", k.Name)
		}
		for _, v := range []string{k.Default, k.Min, k.Max} {
			if v == "" && k.Kind == policy.Flag {
				continue
			}
			if err := policy.Defaults().Validate(k.Name, v, policy.Ack{Weakening: true, Reason: "test"}); err != nil &&
				!strings.Contains(err.Error(), "third") &&
				!strings.Contains(err.Error(), "is shorter than") {
				t.Errorf("%s=%s: %v", k.Name, v, err)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestShortestCertificate: agents and the node API replace a certificate of twenty seconds in time, and no shorter
// one is allowed.
func TestShortestCertificate(t *testing.T) {
	for value, allowed := range map[string]bool{"20": true, "19": false} {
		err := policy.Defaults().Validate(policy.CertificateTTLSeconds, value, policy.Ack{Weakening: true, Reason: "test"})
		if allowed != (err == nil) || (err != nil && !fault.Has(err, commonv1.Reason_REASON_POLICY_VALUE_REFUSED)) {
			t.Errorf("%s s: %v", value, err)
		}
	}
}

func TestDefaultsByGetter(t *testing.T) {
	s := policy.Defaults()
	for name, got := range map[string]struct{ got, want any }{
		"token":     {s.RecoveryTokenMaxAge(), 24 * time.Hour},
		"heartbeat": {s.HeartbeatStaleAfter(), 2 * time.Minute},
		"sweep":     {s.TaskStaleSweepInterval(), time.Minute},
		"audit":     {s.AuditDedupeWindow(), 5 * time.Minute},
		"ttl":       {s.CertificateTTL(), 8 * time.Hour},
		"age":       {s.StreamMaxAge(), time.Hour},
		"auto":      {s.AutoRecovery(), true},
		"attempts":  {s.RecoveryAttemptsPerHour(), 6},
		"dwell":     {s.TrustDwell(), 10 * time.Minute},
		"step":      {s.SagaStepStall(), 5 * time.Minute},
		"ready":     {s.SagaWaitReadyStall(), 10 * time.Minute},
		"saga":      {s.SagaStall(), 15 * time.Minute},
		"retry":     {s.SagaRetryLimit(), 3},
		"grace":     {s.SagaCancelGrace(), 30 * time.Second},
		"churn":     {s.ChurnRecreatesPerHour(), 4},
		"crashes":   {s.WorkloadCrashLoopRestarts(), 3},
		"brake":     {s.BrakeFleetFraction(), 0.2},
		"share":     {s.BrakeIdentityFraction(), 0.01},
		"least":     {s.BrakeIdentityLeast(), 3},
	} {
		if got.got != got.want {
			t.Errorf("%s: %v, want %v", name, got.got, got.want)
		}
	}
}

func TestValidate(t *testing.T) {
	ack := policy.Ack{Weakening: true, Reason: "planned"}
	weak := mustSet(t, map[string]string{policy.HeartbeatStaleAfterSeconds: "600"})
	tight := mustSet(t, map[string]string{policy.HeartbeatStaleAfterSeconds: "30"})
	short := mustSet(t, map[string]string{policy.CertificateTTLSeconds: "60"})
	tests := []struct {
		name       string
		over       policy.Set
		key, value string
		ack        policy.Ack
		want       commonv1.Reason
	}{
		{name: "unknown", key: "node.nonsense", value: "1", want: commonv1.Reason_REASON_POLICY_KEY_UNKNOWN},
		{
			name: "not a number", key: policy.SagaStallSeconds, value: "soon",
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{
			name: "fraction of a second", key: policy.SagaStallSeconds, value: "1.5",
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{
			name: "below", key: policy.HeartbeatStaleAfterSeconds, value: "1",
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{
			name: "above, even acknowledged", key: policy.HeartbeatStaleAfterSeconds, value: "901", ack: ack,
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{name: "negative", key: policy.SagaRetryLimit, value: "-1", want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED},
		{
			name: "huge", key: policy.SagaRetryLimit, value: strings.Repeat("9", 400),
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{name: "flag", key: policy.AutoRecovery, value: "yes", want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED},
		{name: "nan", key: policy.BrakeFleetFraction, value: "NaN", want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED},
		{name: "tightened", key: policy.HeartbeatStaleAfterSeconds, value: "30"},
		{
			name: "weakened", key: policy.HeartbeatStaleAfterSeconds, value: "121",
			want: commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED,
		},
		{
			name: "acknowledged without a reason", key: policy.HeartbeatStaleAfterSeconds, value: "121",
			ack:  policy.Ack{Weakening: true, Reason: " "},
			want: commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED,
		},
		{
			name: "reason without acknowledgement", key: policy.HeartbeatStaleAfterSeconds, value: "121",
			ack:  policy.Ack{Reason: "x"},
			want: commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED,
		},
		{name: "weakened, acknowledged", key: policy.HeartbeatStaleAfterSeconds, value: "121", ack: ack},
		{name: "back towards the default", over: weak, key: policy.HeartbeatStaleAfterSeconds, value: "300"},
		{name: "back to the default from tighter", over: tight, key: policy.HeartbeatStaleAfterSeconds, value: "120"},
		{
			name: "brake loosened", key: policy.BrakeFleetFraction, value: "0.3",
			want: commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED,
		},
		{name: "P2 weakened", key: policy.TaskStaleSweepIntervalSeconds, value: "120"},
		{name: "no direction", key: policy.AutoRecovery, value: "false"},
		{name: "certificate at a third", key: policy.CertificateTTLSeconds, value: "28800"},
		{
			name: "certificate over a third, even acknowledged", key: policy.CertificateTTLSeconds, value: "28801", ack: ack,
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{
			name: "token under three certificates", key: policy.RecoveryTokenMaxAgeSeconds, value: "86399",
			want: commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
		{name: "token over three short certificates", over: short, key: policy.RecoveryTokenMaxAgeSeconds, value: "180"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.over.Validate(tt.key, tt.value, tt.ack)
			if got := fault.ReasonOf(err); got != tt.want {
				t.Errorf("Validate(%s, %s) = %v, want %v", tt.key, tt.value, err, tt.want)
			}
		})
	}
}

func mustSet(t *testing.T, values map[string]string) policy.Set {
	t.Helper()
	s, err := policy.NewSet(values)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNewSetKeepsTheGoodAndReportsTheRest(t *testing.T) {
	s, err := policy.NewSet(map[string]string{
		"nonsense": "1", policy.SagaStallSeconds: "7", policy.SagaRetryLimit: "1000", policy.HeartbeatStaleAfterSeconds: "4",
	})
	if err == nil || !strings.Contains(err.Error(), "nonsense") || !strings.Contains(err.Error(), policy.SagaRetryLimit) {
		t.Errorf("err = %v", err)
	}
	if s.SagaStall() != 7*time.Second || s.HeartbeatStaleAfter() != 4*time.Second || s.SagaRetryLimit() != 3 ||
		s.Overridden(policy.SagaRetryLimit) {
		t.Errorf("set %v", s.Given())
	}
	if v, ok := s.Get(policy.SagaStallSeconds); v != "7" || !ok {
		t.Errorf("Get = %q, %v", v, ok)
	}
	if _, ok := s.Get("nonsense"); ok {
		t.Error("an unknown key has a value")
	}
	bad, err := policy.NewSet(map[string]string{policy.CertificateTTLSeconds: "172800"})
	if err == nil || bad.CertificateTTL() != 8*time.Hour {
		t.Errorf("a certificate that lives too long is in force: %v, %v", bad.CertificateTTL(), err)
	}
	bad, err = policy.NewSet(map[string]string{policy.RecoveryTokenMaxAgeSeconds: "60"})
	if err == nil || bad.RecoveryTokenMaxAge() != 24*time.Hour {
		t.Errorf("a token age below three certificates is in force: %v, %v", bad.RecoveryTokenMaxAge(), err)
	}
	if !policy.Defaults().Equal(bad) || policy.Defaults().Equal(s) {
		t.Error("Equal is wrong")
	}
}

// stored holds the values that a source reads in tests.
type stored struct {
	mu      sync.Mutex
	values  map[string]string
	failure error
	calls   int
}

func (s *stored) load(context.Context) (map[string]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	return s.values, s.failure
}

func (s *stored) set(values map[string]string, failure error) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values, s.failure = values, failure
	return s.calls
}

// TestATooLargeValueIsANumber: a value that no key may have is refused for its size, not as no number.
func TestATooLargeValueIsANumber(t *testing.T) {
	for _, value := range []string{"999999999999", "99999999999999999999999"} {
		_, err := policy.NewSet(map[string]string{policy.SagaStallSeconds: value})
		if err == nil || !strings.Contains(err.Error(), "outside the bounds") {
			t.Errorf("%s: %v", value, err)
		}
	}
}

func TestSourceFollowsAndKeepsTheLastGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &stored{}
		source := policy.NewSource(db.load, slog.New(slog.DiscardHandler), policy.SourceConfig{})
		if !source.Current().Equal(policy.Defaults()) {
			t.Error("a fresh source is not the defaults")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		_, changed := source.Changed()
		go func() { done <- source.Run(ctx) }()
		synctest.Wait()
		db.set(map[string]string{policy.SagaStallSeconds: "5"}, nil)
		<-changed
		if source.Current().SagaStall() != 5*time.Second {
			t.Errorf("SagaStall = %v", source.Current().SagaStall())
		}
		before := db.set(nil, errors.New("database gone"))
		<-time.After(10*time.Second + time.Millisecond)
		synctest.Wait()
		reads := db.set(map[string]string{policy.SagaStallSeconds: "-5", policy.SagaRetryLimit: "2"}, nil) - before
		if source.Current().SagaStall() != 5*time.Second || reads != 5 {
			t.Errorf("SagaStall = %v after %d failed reads", source.Current().SagaStall(), reads)
		}
		<-time.After(3 * time.Second)
		synctest.Wait()
		if s := source.Current(); s.SagaRetryLimit() != 2 || s.SagaStall() != 15*time.Minute {
			t.Errorf("a bad row takes the good ones with it: %v", s.Given())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// notified implements the hints of a connection that listens: nothing is missed, so nothing is read before a hint.
type notified struct{ hint chan struct{} }

func (h notified) C() <-chan struct{} { return h.hint }

func (h notified) Pace(ctx context.Context, _, wake <-chan struct{}, _ time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-wake:
		return true
	}
}

// TestAFailedReadIsMadeAgainWithoutAHint: the hint of a change whose read failed does not come again, so the source
// reads at its interval until it has read, and waits for hints then.
func TestAFailedReadIsMadeAgainWithoutAHint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &stored{}
		hints := notified{hint: make(chan struct{})}
		source := policy.NewSource(db.load, slog.New(slog.DiscardHandler), policy.SourceConfig{Hints: hints})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- source.Run(ctx) }()
		reads := func(values map[string]string, failure error) int {
			before := db.set(values, failure)
			<-time.After(time.Minute + time.Millisecond) // simulated
			synctest.Wait()
			return db.set(values, failure) - before
		}
		synctest.Wait()
		if n := reads(nil, nil); n != 0 {
			t.Errorf("read %d times a minute without a hint", n)
		}
		db.set(nil, errors.New("database gone"))
		hints.hint <- struct{}{}
		synctest.Wait()
		if n := reads(nil, errors.New("database gone")); n != 30 {
			t.Errorf("read %d times a minute after a read that failed", n)
		}
		if n := reads(map[string]string{policy.SagaStallSeconds: "5"}, nil); n != 1 ||
			source.Current().SagaStall() != 5*time.Second {
			t.Errorf("read %d times, SagaStall = %v", n, source.Current().SagaStall())
		}
		// A bad value was read: only a change corrects it, and that comes with a hint.
		db.set(map[string]string{policy.SagaStallSeconds: "-5"}, nil)
		hints.hint <- struct{}{}
		synctest.Wait()
		if n := reads(map[string]string{policy.SagaStallSeconds: "-5"}, nil); n != 0 {
			t.Errorf("read %d times a minute after a value that is ignored", n)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestLoadFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("node.certificate_ttl_seconds: 30\nnode:\n  recovery_token_max_age_seconds: 120\n  auto_recovery: " +
		"false\nbrake.fleet_fraction: 0.1\nsaga.stall_seconds: \"9\"\n")
	got, err := policy.LoadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		policy.CertificateTTLSeconds: "30", policy.RecoveryTokenMaxAgeSeconds: "120", policy.AutoRecovery: "false",
		policy.BrakeFleetFraction: "0.1",
		policy.SagaStallSeconds:   "9",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for name, tt := range map[string]struct {
		text string
		want commonv1.Reason
	}{
		"unknown key":   {"saga.nonsense: 1\n", commonv1.Reason_REASON_POLICY_KEY_UNKNOWN},
		"out of bounds": {"saga.retry_limit: 99\n", commonv1.Reason_REASON_POLICY_VALUE_REFUSED},
		"weakening":     {"trust.dwell_seconds: 700\n", commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED},
		"not yaml":      {"a: [", commonv1.Reason_REASON_INTERNAL},
		"a list":        {"saga.retry_limit: [1]\n", commonv1.Reason_REASON_INTERNAL},
	} {
		write(tt.text)
		if _, err := policy.LoadFile(path); fault.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	write("trust.dwell_seconds: 700\nacknowledge_weakening: slow site\n")
	if got, err := policy.LoadFile(path); err != nil || len(got) != 1 {
		t.Errorf("acknowledged: %v, %v", got, err)
	}
	if _, err := policy.LoadFile(path + ".absent"); err == nil {
		t.Error("want an error for an absent file")
	}
}

func TestBudgets(t *testing.T) {
	all := policy.Budgets()
	if len(all) != 37 {
		t.Errorf("%d rows", len(all))
	}
	for i, b := range all {
		if b.Row != i+1 || b.Name == "" || b.DetectFrom == "" || b.Recovery == "" {
			t.Errorf("row %+v", b)
		}
		if b.Detect > b.Severity.Detect() {
			t.Errorf("%s: detection %v is weaker than %s's %v", b.Name, b.Detect, b.Severity, b.Severity.Detect())
		}
		if b.RecoverWithin() > b.Severity.Recover() || (b.RecoverWithin() == 0) != (b.Recovery == policy.NoRecovery) {
			t.Errorf("%s: recovery %v", b.Name, b.RecoverWithin())
		}
	}
	wedged, ok := policy.BudgetOf("saga-step-wedged")
	if !ok || wedged.DetectWithin(policy.Defaults()) != 310*time.Second {
		t.Errorf("wedged %+v", wedged)
	}
	fast := mustSet(t, map[string]string{policy.SagaStepStallSeconds: "5"})
	if got := wedged.DetectWithin(fast); got != 15*time.Second {
		t.Errorf("scaled: %v", got)
	}
	fenced, _ := policy.BudgetOf("identity-fenced")
	if fenced.RecoverWithin() != 15*time.Minute {
		t.Errorf("fenced %+v", fenced)
	}
}

// TestNoStateWithoutAWayOut: each state has a row, and leads to its end. That the verbs are commands is held by
// TestVerbsOfStatesAreCommands of cmd/gpuaas, which has the tree of commands.
func TestNoStateWithoutAWayOut(t *testing.T) {
	rows := map[protoreflect.FullName]map[string]policy.StateRow{}
	for _, r := range policy.States() {
		if rows[r.Enum] == nil {
			rows[r.Enum] = map[string]policy.StateRow{}
		}
		if _, twice := rows[r.Enum][r.State]; twice {
			t.Errorf("%s %s: two rows", r.Enum, r.State)
		}
		rows[r.Enum][r.State] = r
	}
	enums := commonv1.File_gpuaas_common_v1_states_proto.Enums()
	walked := 0
	for i := range enums.Len() {
		enum := enums.Get(i)
		// The state that a user sees is derived from states; it is not one.
		if !strings.HasSuffix(string(enum.Name()), "State") || enum.Name() == "UserState" {
			continue
		}
		walked++
		states := rows[enum.FullName()]
		values := map[string]bool{}
		for j := range enum.Values().Len() {
			v := enum.Values().Get(j)
			if v.Number() == 0 {
				continue
			}
			name := names.ValueName(v)
			values[name] = true
			if _, ok := states[name]; !ok {
				t.Errorf("%s %s: no row", enum.Name(), name)
			}
		}
		for name, r := range states {
			checkRow(t, values, r)
			if r.Leads != "" && (r.Verb != "" || !slices.Contains(r.Exits, r.Leads) || states[r.Leads].Verb == "" ||
				states[r.Leads].Terminal) {
				t.Errorf("%s %s: it leads to %q, which is no exit with a verb, or has a verb of its own", enum.Name(), name,
					r.Leads)
			}
			if !values[name] {
				t.Errorf("%s %s: the enum has no such value", enum.Name(), name)
			}
			if !reachesTerminal(states, name, map[string]bool{}) {
				t.Errorf("%s %s: no terminal state can be reached", enum.Name(), name)
			}
		}
	}
	if walked != 10 {
		t.Errorf("walked %d enums: one is new or gone", walked)
	}
}

func checkRow(t *testing.T, values map[string]bool, r policy.StateRow) {
	t.Helper()
	at := string(r.Enum) + " " + r.State
	for _, e := range r.Exits {
		if !values[e] || e == r.State {
			t.Errorf("%s: exit %q", at, e)
		}
	}
	if r.Owner == "" {
		t.Errorf("%s: no owner", at)
	}
	if r.Terminal {
		if r.Budget != 0 || r.BudgetKey != "" || (len(r.Exits) > 0) != (r.Verb != "") {
			t.Errorf("%s: an end with a budget, or reopened without a verb", at)
		}
		return
	}
	if r.BudgetWithin(policy.Defaults()) <= 0 || len(r.Exits) == 0 || r.Verb == "" && r.Leads == "" {
		t.Errorf("%s: budget %v, exits %v, verb %q", at, r.BudgetWithin(policy.Defaults()), r.Exits, r.Verb)
	}
	if _, ok := policy.Lookup(r.BudgetKey); r.BudgetKey != "" && !ok {
		t.Errorf("%s: no key %q", at, r.BudgetKey)
	}
}

func reachesTerminal(states map[string]policy.StateRow, from string, seen map[string]bool) bool {
	if states[from].Terminal {
		return true
	}
	seen[from] = true
	for _, e := range states[from].Exits {
		if !seen[e] && reachesTerminal(states, e, seen) {
			return true
		}
	}
	return false
}
