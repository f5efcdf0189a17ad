package policyadmin_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type desk struct {
	t      *testing.T
	ctx    context.Context
	db     *testkit.Database
	server *policyadmin.Server
	wake   *events.Signal
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	testkit.IO(t)
	d := &desk{
		t: t, ctx: rpc.WithPerson(testkit.Context(t), rpc.Person{Subject: "ann", Roles: []string{"operator"}}),
		db: testkit.DB(t), wake: &events.Signal{},
	}
	var err error
	if d.server, err = policyadmin.New(policyadmin.Deps{
		Logger: testkit.Logger(t), Pool: d.db.Pool(pg.RoleRecovery),
		Wake: d.wake,
	}); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *desk) set(key, value string) (*recoveryv1.SetPolicyResponse, error) {
	return d.server.SetPolicy(d.ctx, &recoveryv1.SetPolicyRequest{Key: key, Value: value})
}

func (d *desk) get(key string) *recoveryv1.PolicyKey {
	d.t.Helper()
	out, err := d.server.GetPolicy(d.ctx, &recoveryv1.GetPolicyRequest{Key: key})
	if err != nil || len(out.GetKeys()) != 1 {
		d.t.Fatalf("get %s: %v, %v", key, out, err)
	}
	return out.GetKeys()[0]
}

// listed returns the changes in the events, as `key value version by`, in the order in which they were made.
func (d *desk) listed() []string {
	d.t.Helper()
	var out []string
	for _, e := range testkit.Events(d.t, d.db.Pool(pg.RoleRecovery),
		`kind = 'policy.changed' AND aggregate_type = 'policy'`) {
		k := &recoveryv1.PolicyKey{}
		if err := e.Decode(k); err != nil || k.GetKey() != e.AggregateID {
			d.t.Fatalf("event of %s: %v, %v", e.AggregateID, k, err)
		}
		out = append(out, fmt.Sprintf("%s %s %d %s", k.GetKey(), k.GetValue(), e.AggregateVersion, k.GetUpdatedBy()))
	}
	return out
}

func (d *desk) want(wanted ...string) {
	d.t.Helper()
	if diff := cmp.Diff(wanted, d.listed()); diff != "" {
		d.t.Errorf("told (-want +got):\n%s", diff)
	}
}

func TestAChangeIsStoredAndReportedInOneOrder(t *testing.T) {
	d := newDesk(t)
	if k := d.get(policy.SagaRetryLimit); k.GetOverridden() || k.GetValue() != k.GetDefaultValue() ||
		k.GetMeaning() == "" {
		t.Errorf("before: %v", k)
	}
	woken := d.wake.C()
	ctx := obs.With(d.ctx, obs.Correlation{CorrelationID: "corr-1"})
	out, err := d.server.SetPolicy(ctx,
		&recoveryv1.SetPolicyRequest{Key: policy.SagaRetryLimit, Value: " 5 ", Reason: " a bad week "})
	if err != nil {
		t.Fatal(err)
	}
	if k := out.GetKey(); k.GetValue() != "5" || !k.GetOverridden() || k.GetUpdatedBy() != "ann" ||
		k.GetReason() != "a bad week" || k.GetUpdatedAt() == nil {
		t.Errorf("answered %v", k)
	}
	if diff := cmp.Diff(out.GetKey().String(), d.get(policy.SagaRetryLimit).String()); diff != "" {
		t.Errorf("answered and read (-answered +read):\n%s", diff)
	}
	var id, correlation string
	err = d.db.Pool(pg.RoleRecovery).QueryRow(d.ctx,
		`SELECT id::text, correlation_id FROM events.event WHERE kind = 'policy.changed'`).Scan(&id, &correlation)
	if err != nil || id != out.GetPos() || correlation != "corr-1" {
		t.Errorf("event %s of %q, the answer says %s (%v)", id, correlation, out.GetPos(), err)
	}
	select {
	case <-woken:
	default:
		t.Error("the sequencer was not woken")
	}
	for _, c := range [][2]string{
		{policy.SagaRetryLimit, "4"},
		{policy.TaskStaleSweepIntervalSeconds, "30"},
		{policy.SagaRetryLimit, "4"},
	} {
		if _, err := d.set(c[0], c[1]); err != nil {
			t.Fatal(err)
		}
	}
	d.want(
		policy.SagaRetryLimit+" 5 1 ann", policy.SagaRetryLimit+" 4 2 ann", policy.TaskStaleSweepIntervalSeconds+" 30 1 ann",
		policy.SagaRetryLimit+" 4 3 ann",
	)
}

// TestAChangeWithoutAReasonKeepsTheFormerOne: the same value keeps its reason, and another one names that of the value
// before as such, once. What is audited has the reason of the request alone.
func TestAChangeWithoutAReasonKeepsTheFormerOne(t *testing.T) {
	d := newDesk(t)
	for _, c := range []struct{ value, reason, want string }{
		{"5", "", ""},
		{"5", "a bad week", "a bad week"},
		{"5", " ", "a bad week"},
		{"4", "", "none was given; for the value before: a bad week"},
		{"6", "", "none was given; for the value before: a bad week"},
		{"6", "a better one", "a better one"},
	} {
		out, err := d.server.SetPolicy(d.ctx,
			&recoveryv1.SetPolicyRequest{Key: policy.SagaRetryLimit, Value: c.value, Reason: c.reason})
		if err != nil || out.GetKey().GetReason() != c.want {
			t.Errorf("%s for %q: the reason is %q (%v), want %q", c.value, c.reason, out.GetKey().GetReason(), err, c.want)
		}
	}
}

func TestRefusalsSayWhyAndChangeNothing(t *testing.T) {
	d := newDesk(t)
	for _, tc := range []struct {
		name   string
		req    *recoveryv1.SetPolicyRequest
		reason commonv1.Reason
		says   string
	}{
		{
			"a key that is none", &recoveryv1.SetPolicyRequest{Key: "node.no_such", Value: "1"},
			commonv1.Reason_REASON_POLICY_KEY_UNKNOWN, "node.no_such",
		},
		{
			"no number", &recoveryv1.SetPolicyRequest{Key: policy.SagaRetryLimit, Value: "many"},
			commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "many",
		},
		{
			"no flag", &recoveryv1.SetPolicyRequest{Key: policy.AutoRecovery, Value: "yes"},
			commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "true or false",
		},
		{
			"below", &recoveryv1.SetPolicyRequest{Key: policy.SagaRetryLimit, Value: "0"},
			commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "bounds",
		},
		{
			"above", &recoveryv1.SetPolicyRequest{Key: policy.SagaRetryLimit, Value: "11"},
			commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "bounds",
		},
		{"above, whatever is acknowledged", &recoveryv1.SetPolicyRequest{
			Key: policy.HeartbeatStaleAfterSeconds, Value: "901", AcknowledgeWeakening: true, Reason: "please",
		}, commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "bounds"},
		{"wrong together", &recoveryv1.SetPolicyRequest{
			Key: policy.CertificateTTLSeconds, Value: "30000", AcknowledgeWeakening: true, Reason: "please",
		}, commonv1.Reason_REASON_POLICY_VALUE_REFUSED, "third"},
		{
			"weaker", &recoveryv1.SetPolicyRequest{Key: policy.HeartbeatStaleAfterSeconds, Value: "121"},
			commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED, "121",
		},
		{"weaker, without a reason", &recoveryv1.SetPolicyRequest{
			Key: policy.HeartbeatStaleAfterSeconds, Value: "121", AcknowledgeWeakening: true, Reason: "  ",
		}, commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED, "121"},
		{"weaker, without the word", &recoveryv1.SetPolicyRequest{
			Key: policy.HeartbeatStaleAfterSeconds, Value: "121", Reason: "slow links",
		}, commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED, "121"},
	} {
		_, err := d.server.SetPolicy(d.ctx, tc.req)
		f, ok := fault.As(err)
		if !ok || f.Reason != tc.reason || f.Remedy == "" || !strings.Contains(f.Public+f.Remedy, tc.says) {
			t.Errorf("%s: %v, want %v that says %q", tc.name, err, tc.reason, tc.says)
		}
	}
	if _, err := d.server.GetPolicy(d.ctx, &recoveryv1.GetPolicyRequest{Key: "node.no_such"}); !fault.Has(err,
		commonv1.Reason_REASON_POLICY_KEY_UNKNOWN) {
		t.Errorf("read of no key: %v", err)
	}
	d.want()
	all, err := d.server.GetPolicy(d.ctx, &recoveryv1.GetPolicyRequest{})
	if err != nil || len(all.GetKeys()) != len(policy.Keys()) {
		t.Fatalf("all keys: %v, %v", all, err)
	}
	if i := slices.IndexFunc(all.GetKeys(), (*recoveryv1.PolicyKey).GetOverridden); i >= 0 {
		t.Errorf("a refusal changed %v", all.GetKeys()[i])
	}
}

func TestAWeakeningIsTakenWithItsReasonAndTheWayBackNeedsNone(t *testing.T) {
	d := newDesk(t)
	const key = policy.HeartbeatStaleAfterSeconds
	_, err := d.server.SetPolicy(d.ctx,
		&recoveryv1.SetPolicyRequest{Key: key, Value: "300", AcknowledgeWeakening: true, Reason: "slow links"})
	if err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"200", "120", "60"} {
		if _, err := d.set(key, value); err != nil {
			t.Errorf("back to %s: %v", value, err)
		}
	}
	d.want(key+" 300 1 ann", key+" 200 2 ann", key+" 120 3 ann", key+" 60 4 ann")
}

// TestTwoChangesAreNeverDecidedSideBySide: each of the two is good over the defaults, and both together are not.
func TestTwoChangesAreNeverDecidedSideBySide(t *testing.T) {
	for range 2 {
		d := newDesk(t)
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for i, c := range [][2]string{{policy.CertificateTTLSeconds, "28000"}, {policy.RecoveryTokenMaxAgeSeconds, "86399"}} {
			wg.Go(func() { _, errs[i] = d.set(c[0], c[1]) })
		}
		wg.Wait()
		// 86399 requires a certificate lifetime of at most 28799: the value is refused with the default lifetime, and
		// accepted after the other change.
		if errs[0] != nil || errs[1] != nil && !fault.Has(errs[1], commonv1.Reason_REASON_POLICY_VALUE_REFUSED) {
			t.Fatal(errs)
		}
		if _, err := d.set(policy.CertificateTTLSeconds, "28799"); err != nil {
			t.Fatal(err)
		}
		wg = sync.WaitGroup{}
		for i, c := range [][2]string{{policy.CertificateTTLSeconds, "28700"}, {policy.CertificateTTLSeconds, "28600"}} {
			wg.Go(func() { _, errs[i] = d.set(c[0], c[1]) })
		}
		wg.Wait()
		listed := d.listed()
		versions := map[string]bool{}
		for _, line := range listed {
			f := strings.Fields(line)
			if versions[f[0]+f[2]] {
				t.Errorf("one version twice: %q", listed)
			}
			versions[f[0]+f[2]] = true
		}
		if last := strings.Fields(listed[len(listed)-1]); last[1] != d.get(last[0]).GetValue() {
			t.Errorf("the last change told is %q, and stored is %v", last, d.get(last[0]))
		}
	}
}

func TestApplySetsAllAndReportsEachOrNone(t *testing.T) {
	d := newDesk(t)
	pool := d.db.Pool(pg.RoleRecovery)
	// The values are valid only if they are validated together: the certificate lifetime requires the longer age.
	file := map[string]string{
		policy.CertificateTTLSeconds: "40000", policy.RecoveryTokenMaxAgeSeconds: "120000",
		policy.SagaRetryLimit: "2",
	}
	if err := policyadmin.Apply(d.ctx, pool, file, "dev", "a file"); err != nil {
		t.Fatal(err)
	}
	first := []string{
		policy.CertificateTTLSeconds + " 40000 1 dev", policy.RecoveryTokenMaxAgeSeconds + " 120000 1 dev",
		policy.SagaRetryLimit + " 2 1 dev",
	}
	d.want(first...)
	if k := d.get(policy.CertificateTTLSeconds); k.GetReason() != "a file" || k.GetValue() != "40000" {
		t.Errorf("stored %v", k)
	}
	// The next start with the same file changes one value alone.
	file[policy.SagaRetryLimit] = "4"
	if err := policyadmin.Apply(d.ctx, pool, file, "dev", "a file"); err != nil {
		t.Fatal(err)
	}
	d.want(append(first, policy.SagaRetryLimit+" 4 2 dev")...)
	for name, bad := range map[string]map[string]string{
		"an unknown key": {policy.SagaRetryLimit: "5", "node.no_such": "1"},
		"out of bounds":  {policy.SagaRetryLimit: "5", policy.HeartbeatStaleAfterSeconds: "100000"},
		"wrong together": {policy.SagaRetryLimit: "5", policy.RecoveryTokenMaxAgeSeconds: "90000"},
	} {
		err := policyadmin.Apply(d.ctx, pool, bad, "dev", "a file")
		if _, ok := fault.As(err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := policyadmin.Apply(d.ctx, pool, map[string]string{policy.SagaRetryLimit: "5"}, "dev", " "); !fault.Has(err,
		commonv1.Reason_REASON_REASON_REQUIRED) {
		t.Errorf("without a reason: %v", err)
	}
	d.want(append(first, policy.SagaRetryLimit+" 4 2 dev")...)
}

// Scenario: a composed mesh is restored from a backup and starts with a policy file. In rollback mode a file that would
// change a value is refused, as a person's change is, and one whose values are all stored already is not.
func TestApplyChangesNothingInRollbackMode(t *testing.T) {
	d := newDesk(t)
	pool := d.db.Pool(pg.RoleRecovery)
	stored := map[string]string{policy.SagaRetryLimit: "2"}
	if err := policyadmin.Apply(d.ctx, pool, stored, "dev", "a file"); err != nil {
		t.Fatal(err)
	}
	testkit.SetRollback(d.db, true)
	other := map[string]string{policy.SagaRetryLimit: "4", policy.CertificateTTLSeconds: "28000"}
	if err := policyadmin.Apply(d.ctx, pool, other, "dev", "a file"); !fault.Has(err,
		commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		t.Errorf("other values: %v", err)
	}
	if _, err := d.set(policy.SagaRetryLimit, "4"); !fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		t.Errorf("a person's change: %v", err)
	}
	if err := policyadmin.Apply(d.ctx, pool, stored, "dev", "a file"); err != nil {
		t.Errorf("the stored values: %v", err)
	}
	d.want(policy.SagaRetryLimit + " 2 1 dev")
	testkit.SetRollback(d.db, false)
	if err := policyadmin.Apply(d.ctx, pool, other, "dev", "a file"); err != nil {
		t.Fatal(err)
	}
	d.want(policy.SagaRetryLimit+" 2 1 dev", policy.CertificateTTLSeconds+" 28000 1 dev",
		policy.SagaRetryLimit+" 4 2 dev")
}

// Scenario: a person lengthened the recovery token's age, and the policy file lengthens the certificate after it. The
// database is restored from a backup that lacks the longer age, so that the file does not fit what is stored; in
// another mesh a value is stored that this build refuses, and the file has it too. Both meshes start in rollback mode;
// after the acceptance each file is refused by its value.
func TestApplyValidatesNothingInRollbackMode(t *testing.T) {
	for name, tc := range map[string]struct{ stored, file map[string]string }{
		"the file does not fit the backup": {
			map[string]string{policy.SagaRetryLimit: "2"},
			map[string]string{policy.SagaRetryLimit: "2", policy.CertificateTTLSeconds: "40000"},
		},
		"the backup has a value that is refused": {
			map[string]string{policy.SagaRetryLimit: "100"}, map[string]string{policy.SagaRetryLimit: "100"},
		},
	} {
		d := newDesk(t)
		pool := d.db.Pool(pg.RoleRecovery)
		for key, value := range tc.stored {
			if err := policystore.Put(d.ctx, pool, key, value, "ann", ""); err != nil {
				t.Fatal(err)
			}
		}
		testkit.SetRollback(d.db, true)
		err := policyadmin.Apply(d.ctx, pool, tc.file, "dev", "a file")
		if len(tc.file) == len(tc.stored) && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(tc.file) > len(tc.stored) && !fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
			t.Errorf("%s: %v", name, err)
		}
		testkit.SetRollback(d.db, false)
		err = policyadmin.Apply(d.ctx, pool, tc.file, "dev", "a file")
		if !fault.Has(err, commonv1.Reason_REASON_POLICY_VALUE_REFUSED) {
			t.Errorf("%s, after the acceptance: %v", name, err)
		}
		d.want()
	}
}
