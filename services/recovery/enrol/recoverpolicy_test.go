package enrol_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheAgeOfARecoveryToken is judged by the database's clock from the first session on its certificate, without the
// time in which we issued nothing.
func TestTheAgeOfARecoveryToken(t *testing.T) {
	const most = 24 * time.Hour
	expired := commonv1.Reason_REASON_TOKEN_EXPIRED
	tests := []struct {
		name string
		when time.Duration
		stop func(k *kit)
		want commonv1.Reason
	}{
		{name: "before its end", when: most - time.Minute},
		{name: "past its end", when: most + time.Second, want: expired},
		{
			name: "an outage of ours", when: most + time.Hour - time.Minute,
			stop: func(k *kit) { k.stopped(-2*time.Hour, -time.Hour) },
		},
		{
			name: "an outage of ours that was too short", when: most + time.Hour + time.Minute,
			stop: func(k *kit) { k.stopped(-2*time.Hour, -time.Hour) }, want: expired,
		},
		{
			name: "two stops at once count once", when: most + 90*time.Minute,
			stop: func(k *kit) { k.stopped(-3*time.Hour, -2*time.Hour); k.stopped(-3*time.Hour, -2*time.Hour+time.Second) },
			want: expired,
		},
		{
			name: "a stop before it counts", when: most + time.Second,
			stop: func(k *kit) { k.stopped(-48*time.Hour, -36*time.Hour) }, want: expired,
		},
		{
			name: "a stop that began before it counts", when: most + time.Hour - time.Minute,
			stop: func(k *kit) { k.stopped(-48*time.Hour, -most+time.Second) }, // an hour of it is the token's
		},
		{
			name: "a stop that lasts", when: most + time.Hour,
			stop: func(k *kit) {
				k.exec(`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at)
					VALUES (gen_random_uuid(), 'outage', mesh.clock() - interval '2 hours')`)
			},
		},
		{
			name: "an extension", when: 3 * most,
			stop: func(k *kit) {
				k.exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
					VALUES (gen_random_uuid(), 'default', mesh.clock() + interval '1 minute', 'r', 'ada')`)
			},
		},
		{
			name: "an extension of another profile", when: 3 * most, want: expired,
			stop: func(k *kit) {
				k.exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
					VALUES (gen_random_uuid(), 'other', mesh.clock() + interval '1 minute', 'r', 'ada')`)
			},
		},
		{
			name: "an extension that another one ended", when: 3 * most, want: expired,
			stop: func(k *kit) {
				k.exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by, decided_at)
					VALUES (gen_random_uuid(), 'default', mesh.clock() + interval '1 day', 'r', 'ada', mesh.clock() - interval '1 h'),
						(gen_random_uuid(), 'default', mesh.clock() - interval '1 minute', 'r', 'ada', mesh.clock())`)
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			m := k.enrolled("node-1")
			testkit.SetClockOffset(k.db, tt.when)
			if tt.stop != nil {
				tt.stop(k)
			}
			before := k.rows()
			_, err := m.recover(k.csr())
			if tt.want == commonv1.Reason_REASON_UNSPECIFIED {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			k.refused(err, tt.want)
			if fault.ActionOf(err) != commonv1.Action_ACTION_REBUNDLE {
				t.Errorf("action %v", fault.ActionOf(err))
			}
			if k.rows() != before {
				t.Error("something changed")
			}
		})
	}
}

// TestATokenThatWasOnlyOfferedAgesFromItsIssue.
func TestATokenThatWasOnlyOfferedAgesFromItsIssue(t *testing.T) {
	k := newKit(t)
	m := k.machine()
	m.took(m.mustEnroll(k.bootstrap("node-1").Token, k.csr()))
	testkit.SetClockOffset(k.db, 23*time.Hour)
	m.admit()
	testkit.SetClockOffset(k.db, 46*time.Hour)
	m.mustRecover(k.csr())
	testkit.SetClockOffset(k.db, 71*time.Hour) // the next one was offered and never counted
	_, err := m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
}

// TestTheRecoveriesOfAnHour are bounded by the policy; a node is told when it may again.
func TestTheRecoveriesOfAnHour(t *testing.T) {
	k := newKit(t)
	k.setPolicy(map[string]string{policy.RecoveryAttemptsPerHour: "2"})
	m, other := k.enrolled("node-1"), k.enrolled("node-2")
	m.mustRecover(k.csr())
	testkit.SetClockOffset(k.db, 20*time.Minute)
	m.mustRecover(k.csr())
	csr := k.csr()
	_, err := m.recover(csr)
	k.refused(err, commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED)
	if wait := fault.RetryAfterOf(err); wait < 39*time.Minute || wait > 41*time.Minute {
		t.Fatalf("wait %s", wait)
	}
	other.mustRecover(k.csr()) // of another node nothing is counted
	k.setPolicy(map[string]string{policy.RecoveryAttemptsPerHour: "3"})
	m.mustRecover(csr)
	k.setPolicy(map[string]string{policy.RecoveryAttemptsPerHour: "2"})
	testkit.SetClockOffset(k.db, 81*time.Minute)
	m.mustRecover(k.csr())
}

// TestAutoRecoveryOff leaves recovery to operators.
func TestAutoRecoveryOff(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	k.setPolicy(map[string]string{policy.AutoRecovery: "false"})
	before := k.rows()
	_, err := m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_AUTO_RECOVERY_OFF)
	if k.rows() != before {
		t.Error("something changed")
	}
	k.setPolicy(map[string]string{policy.AutoRecovery: "true"})
	m.mustRecover(k.csr())
}

// TestAttemptsAreReported checks that attempts are reported after their proof alone, with one event a minute for each
// node and outcome.
func TestAttemptsAreReported(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	attempts := func() int {
		return k.count(`SELECT count(*) FROM events.event
			WHERE kind = 'enrollment.attempted' AND correlation_id = 'attempt-0001'`)
	}
	if n := attempts(); n != 1 { // the enrolment
		t.Fatalf("%d reports", n)
	}
	stranger := k.machine()
	_, err := k.enroller.Enroll(k.ctx, "192.0.2.1", stranger.request(m.token, k.csr()))
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
	if n := attempts(); n != 1 {
		t.Fatalf("%d reports after an attempt without proof", n)
	}
	testkit.SetClockOffset(k.db, 25*time.Hour)
	for range 5 {
		_, err := m.recover(k.csr())
		k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
	}
	if n := attempts(); n != 2 {
		t.Fatalf("%d reports after five refusals", n)
	}
	testkit.SetClockOffset(k.db, 25*time.Hour+61*time.Second)
	_, err = m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
	if n := attempts(); n != 3 {
		t.Fatalf("%d reports after a minute", n)
	}
	if n := k.count(`SELECT count(*) FROM events.event WHERE payload::text LIKE '%' || $1 || '%' OR
		position(convert_to($1, 'UTF8') IN COALESCE(body, ''::bytea)) > 0`, m.token[200:]); n != 0 {
		t.Fatalf("the token is in %d events", n)
	}
}
