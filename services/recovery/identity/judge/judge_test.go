package judge_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

func TestOpen(t *testing.T) {
	active := judge.Standing{
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, InstanceID: "i", Issued: 9, Confirmed: 7,
		CurrentSerial: "aa",
	}
	current := judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_CURRENT, Used: true}
	signed := func(p int64) judge.Presented {
		return judge.Presented{Form: judge.FormSigned, Generation: p, Serial: "aa"}
	}
	with := func(state commonv1.NodeIdentityState) judge.Standing {
		s := active
		s.State = state
		return s
	}
	unopened := judge.Standing{State: active.State, InstanceID: "i"}
	welcome := judge.Verdict{Ruling: judge.RulingWelcome}
	copied := judge.Verdict{Ruling: judge.RulingChallenge, Reason: commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED}
	lost := judge.Verdict{Ruling: judge.RulingChallenge, Reason: commonv1.Reason_REASON_JOIN_STATE_LOST}
	refuse := func(r commonv1.Reason) judge.Verdict { return judge.Verdict{Reason: r} }
	rollback := judge.Verdict{Ruling: judge.RulingWelcome, Reason: commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK}
	tests := []struct {
		name     string
		standing judge.Standing
		hello    judge.Hello
		want     judge.Verdict
	}{
		{
			name: "confirmed", standing: active, hello: judge.Hello{Presented: signed(7), Certificate: current},
			want: welcome,
		},
		{name: "between", standing: active, hello: judge.Hello{Presented: signed(8), Certificate: current}, want: welcome},
		{name: "issued", standing: active, hello: judge.Hello{Presented: signed(9), Certificate: current}, want: welcome},
		{
			name: "on the next certificate", standing: active,
			hello: judge.Hello{
				Presented:   signed(7),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_NEXT},
			}, want: welcome,
		},
		{name: "first open", standing: unopened, hello: judge.Hello{Certificate: current}, want: welcome},
		{
			name: "first open with the state of an earlier enrolment", standing: unopened,
			hello: judge.Hello{
				Presented:   judge.Presented{Form: judge.FormForeign, Generation: 4},
				Certificate: current,
			}, want: welcome,
		},
		{name: "absent later", standing: active, hello: judge.Hello{Certificate: current}, want: lost},
		{
			name: "unreadable", standing: active,
			hello: judge.Hello{Presented: judge.Presented{Form: judge.FormUnreadable}, Certificate: current},
			want:  lost,
		},
		{name: "behind", standing: active, hello: judge.Hello{Presented: signed(6), Certificate: current}, want: copied},
		{
			name: "behind, on a certificate replaced since", standing: active,
			hello: judge.Hello{
				Presented:   signed(6),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED, Used: true},
			},
			want: copied,
		},
		{
			name: "ahead", standing: active, hello: judge.Hello{Presented: signed(12), Certificate: current},
			want: judge.Verdict{Ruling: rollback.Ruling, Reason: rollback.Reason, Adopt: 12},
		},
		{
			name: "of a later era", standing: active,
			hello: judge.Hello{
				Presented:   judge.Presented{Form: judge.FormSigned, Generation: 8, Era: 1},
				Certificate: current,
			},
			want: judge.Verdict{Ruling: rollback.Ruling, Reason: rollback.Reason, Adopt: 8},
		},
		{
			name: "ahead on a certificate the database lost", standing: active,
			hello: judge.Hello{Presented: signed(12), Serial: "bb"},
			want:  judge.Verdict{Ruling: rollback.Ruling, Reason: rollback.Reason, Adopt: 12, AdoptSerial: true},
		},
		{
			name: "signed for a certificate the database lost", standing: active,
			hello: judge.Hello{Presented: signed(9), Serial: "aa"},
			want:  judge.Verdict{Ruling: rollback.Ruling, Reason: rollback.Reason, AdoptSerial: true},
		},
		{
			name: "unknown certificate, by one who holds the current", standing: active,
			hello: judge.Hello{Presented: signed(9), Serial: "bb"},
			want:  refuse(commonv1.Reason_REASON_SERIAL_SUPERSEDED),
		},
		{
			name: "unknown certificate", standing: active,
			hello: judge.Hello{
				Presented: judge.Presented{Form: judge.FormSigned, Generation: 9, Serial: "old"},
				Serial:    "bb",
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "unknown certificate, nothing shown", standing: unopened, hello: judge.Hello{Serial: "bb"},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "revoked certificate, however far ahead", standing: active,
			hello: judge.Hello{
				Presented:   signed(99),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_REVOKED},
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "issued and never used", standing: active,
			hello: judge.Hello{
				Presented:   signed(7),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED},
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_SUPERSEDED),
		},
		{
			name: "replaced before use in this history, used in the lost one", standing: active,
			hello: judge.Hello{
				Presented:   signed(12),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED},
			},
			want: judge.Verdict{Ruling: rollback.Ruling, Reason: rollback.Reason, Adopt: 12, AdoptSerial: true},
		},
		{
			name: "replaced before use, after a session was opened on it", standing: active,
			hello: judge.Hello{
				Presented: judge.Presented{Form: judge.FormSigned, Generation: 8, Serial: "bb"}, Serial: "bb",
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED},
			},
			want: judge.Verdict{Ruling: judge.RulingWelcome, AdoptSerial: true},
		},
		{
			name: "replaced after use, by one who holds it", standing: active,
			hello: judge.Hello{
				Presented: judge.Presented{Form: judge.FormSigned, Generation: 8, Serial: "bb"}, Serial: "bb",
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED, Used: true},
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "replaced, by one who holds the current", standing: active,
			hello: judge.Hello{
				Presented:   signed(8),
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED, Used: true},
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_SUPERSEDED),
		},
		{
			name: "replaced", standing: active,
			hello: judge.Hello{
				Presented:   judge.Presented{Form: judge.FormSigned, Generation: 8, Serial: "old"},
				Certificate: judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED, Used: true},
			},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "another instance", standing: active,
			hello: judge.Hello{InstanceID: "j", Presented: signed(8), Certificate: current},
			want:  refuse(commonv1.Reason_REASON_IDENTITY_MISMATCH),
		},
		{
			name: "on a certificate of no row, with a join state that this replica cannot verify", standing: active,
			hello: judge.Hello{Presented: judge.Presented{Form: judge.FormUnknownKey}},
			want:  refuse(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN),
		},
		{
			name: "on a certificate of no row, without a join state", standing: active, hello: judge.Hello{},
			want: refuse(commonv1.Reason_REASON_SERIAL_UNKNOWN),
		},
		{
			name: "pending", standing: with(1), hello: judge.Hello{Certificate: current},
			want: refuse(commonv1.Reason_REASON_IDENTITY_UNKNOWN),
		},
		{
			name: "held", standing: with(3), hello: judge.Hello{Presented: signed(6), Certificate: current},
			want: refuse(commonv1.Reason_REASON_IDENTITY_HELD),
		},
		{
			name: "quarantined", standing: with(4), hello: judge.Hello{Certificate: current},
			want: refuse(commonv1.Reason_REASON_IDENTITY_QUARANTINED),
		},
		{
			name: "fenced", standing: with(5), hello: judge.Hello{Certificate: current},
			want: refuse(commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED),
		},
		{
			name: "retired", standing: with(6), hello: judge.Hello{Certificate: current},
			want: refuse(commonv1.Reason_REASON_IDENTITY_RETIRED),
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.hello.InstanceID == "" {
				tt.hello.InstanceID = "i"
			}
			if diff := cmp.Diff(tt.want, judge.Open(tt.standing, tt.hello)); diff != "" {
				t.Errorf("verdict differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConfirm(t *testing.T) {
	active := judge.Standing{
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, InstanceID: "i", Issued: 9,
		Confirmed: 7,
	}
	current := judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_CURRENT, Used: true}
	good := judge.Ready{InstanceID: "i", Generation: 9, Session: "s", Opened: 9, Certificate: current}
	change := func(f func(*judge.Ready)) judge.Ready {
		r := good
		f(&r)
		return r
	}
	tests := []struct {
		name  string
		ready judge.Ready
		want  judge.ReadyVerdict
	}{
		{name: "last issued", ready: good, want: judge.ReadyVerdict{Admitted: true}},
		{
			name:  "the confirmed one asks again",
			ready: change(func(r *judge.Ready) { r.Session, r.Generation, r.Opened = "c", 7, 7 }),
			want:  judge.ReadyVerdict{Admitted: true, Again: true},
		},
		{
			name:  "overtaken",
			ready: change(func(r *judge.Ready) { r.Generation, r.Opened = 8, 8 }),
			want:  judge.ReadyVerdict{Reason: commonv1.Reason_REASON_SESSION_SUPERSEDED},
		},
		{
			name:  "never opened",
			ready: change(func(r *judge.Ready) { r.Opened = 0 }),
			want:  judge.ReadyVerdict{Reason: commonv1.Reason_REASON_SESSION_UNKNOWN},
		},
		{
			name:  "claims another generation",
			ready: change(func(r *judge.Ready) { r.Opened = 8 }),
			want:  judge.ReadyVerdict{Reason: commonv1.Reason_REASON_SESSION_UNKNOWN},
		},
		{
			name:  "another instance",
			ready: change(func(r *judge.Ready) { r.InstanceID = "j" }),
			want:  judge.ReadyVerdict{Reason: commonv1.Reason_REASON_IDENTITY_MISMATCH},
		},
		{
			name: "replaced before use",
			ready: change(func(r *judge.Ready) {
				r.Certificate = judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_SUPERSEDED}
			}),
			want: judge.ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_SUPERSEDED},
		},
		{
			name: "revoked",
			ready: change(func(r *judge.Ready) {
				r.Certificate = judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_REVOKED}
			}),
			want: judge.ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_UNKNOWN},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, judge.Confirm(active, "c", tt.ready)); diff != "" {
				t.Errorf("verdict differs (-want +got):\n%s", diff)
			}
		})
	}
}
