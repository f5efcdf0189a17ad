package judge_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

const (
	limited = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	badTLS  = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	refused = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	skewed  = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED
)

// Each code is evidence of what the failure matrix says, or of nothing.
func TestWhatCodesExplain(t *testing.T) {
	want := map[string]string{
		"edge_rate_limited": "edge_rate_limited", "server_tls_untrusted": "server_tls_untrusted",
		"server_name_mismatch": "server_tls_untrusted", "recovery_enrollment_blocked": "recovery_enrollment_blocked",
		"recovery_token_missing": "recovery_token_missing", "endpoint_profile_drift": "endpoint_profile_drift",
		"clock_skewed": "clock_skew", "certificate_not_yet_valid": "clock_skew", "certificate_expired": "cert_expired",
		"task_poll_failed": "", "connection_refused": "", "connection_timed_out": "", "name_resolution_failed": "",
		"session_refused": "", "enrollment_refused": "", "identity_revoked": "", "state_directory_failed": "",
		"profile_refused": "",
	}
	got := map[string]string{}
	for number := range commonv1.DiagnosticCode_name {
		code := commonv1.DiagnosticCode(number)
		if reason, _, ok := drift.ExplainedBy(code); ok {
			got[names.Of(code)] = names.OfSet(reason)
			if row, known := drift.RowOf(reason); reason != 0 && (!known || row.Severity == p0) {
				t.Errorf("%s of a host would be %s", names.Of(code), row.Severity)
			}
		}
	}
	for code, reason := range want {
		if is, ok := got[code]; !ok || is != reason {
			t.Errorf("%s explains %q, want %q", code, is, reason)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d codes explain something: %v", len(got), got)
	}
}

func (k *kit) merge(n *machine, records ...collect.HostRecord) bool {
	k.t.Helper()
	changed := false
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		changed, _, err = collect.MergeHost(ctx, tx, n.id(), records, "merge")
		return err
	}))
	return changed
}

func (k *kit) record(code commonv1.DiagnosticCode, ago time.Duration) collect.HostRecord {
	return collect.HostRecord{
		Code: code, Detail: "it is " + names.Of(code), SeenAt: k.now().Add(-ago), NextRetry: 30 * time.Second, By: "ops",
	}
}

// down loses a node for so long that it is down.
func (k *kit) down() *machine {
	k.t.Helper()
	n := k.up()
	k.lose(n)
	k.listen(3 * time.Minute)
	k.round()
	if k.last(n).GetReason() != agentDown {
		k.t.Fatalf("the node is %v", k.last(n))
	}
	return n
}

// Scenario: pre-auth-blind-spot.
func TestARecordOfTheHostSharpensTheVerdict(t *testing.T) {
	k := newKit(t)
	n := k.down()
	if !k.merge(n, k.record(refused, time.Minute)) {
		t.Error("a new record changes nothing")
	}
	k.round()
	v := k.last(n)
	if v.GetReason() != agentDown || !slices.ContainsFunc(v.GetEvidence(), func(e *recoveryv1.Evidence) bool {
		return e.GetSource() == host && strings.HasPrefix(e.GetDetail(), "connection_refused: ") &&
			strings.HasSuffix(e.GetDetail(), "(brought by ops)")
	}) {
		t.Errorf("the verdict does not say why the agent is not heard: %v", v)
	}
	k.merge(n, k.record(refused, time.Minute), k.record(badTLS, 10*time.Second))
	k.round()
	if v := k.last(n); v.GetReason() != tlsUntrusted || v.GetSeverity() != p1 || v.GetEvidence()[0].GetSource() == 0 {
		t.Errorf("verdict %v", v)
	}
	before := len(k.verdicts(n.id()))
	if k.merge(n, k.record(refused, time.Minute), k.record(badTLS, 5*time.Second)) || k.round() != 0 {
		t.Error("the same record once more changes something")
	}
	k.back(n)
	k.round()
	if v := k.last(n); v.GetReason() != unspecified || len(k.verdicts(n.id())) != before+1 {
		t.Errorf("after the agent is back: %v", v)
	}
	k.lose(n)
	k.listen(3 * time.Minute)
	k.round()
	if v := k.last(n); v.GetReason() != agentDown {
		t.Errorf("a record from before the last admission explains: %v", v)
	}
}

func TestWhatARecordOfTheHostCannotDo(t *testing.T) {
	tests := map[string]struct {
		connected bool
		change    func(k *kit, r *collect.HostRecord)
		want      commonv1.DriftReason
	}{
		"connected": {connected: true, change: func(*kit, *collect.HostRecord) {}, want: unspecified},
		"ended":     {change: func(_ *kit, r *collect.HostRecord) { r.EndedAt = r.SeenAt }, want: agentDown},
		"no time":   {change: func(_ *kit, r *collect.HostRecord) { r.SeenAt = time.Time{} }, want: agentDown},
		"a day old": {
			change: func(k *kit, r *collect.HostRecord) { r.SeenAt = k.now().Add(-25 * time.Hour) }, want: agentDown,
		},
		"before":       {change: func(k *kit, r *collect.HostRecord) { r.SeenAt = k.now().Add(-time.Hour) }, want: agentDown},
		"unknown code": {change: func(_ *kit, r *collect.HostRecord) { r.Code = 9999 }, want: agentDown},
		"revoked": {change: func(_ *kit, r *collect.HostRecord) {
			r.Code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED
		}, want: agentDown},
		"future": {
			change: func(k *kit, r *collect.HostRecord) { r.SeenAt = k.now().Add(1e6 * time.Hour) }, want: rateLimited,
		},
		"clock": {change: func(k *kit, r *collect.HostRecord) {
			r.Code, r.SeenAt = skewed, k.now().Add(-48*time.Hour)
		}, want: clockSkew},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			n := k.up()
			if !tt.connected {
				k.lose(n)
				k.listen(3 * time.Minute)
				k.round()
			}
			r := k.record(limited, 0)
			tt.change(k, &r)
			k.merge(n, r)
			k.round()
			v := k.last(n)
			if v.GetReason() != tt.want {
				t.Errorf("verdict %v", v)
			}
			for _, e := range v.GetEvidence() {
				if e.GetSource() == host && e.GetObservedAt().AsTime().After(k.now()) {
					t.Errorf("evidence from the future: %v", e)
				}
			}
			if tt.want != rateLimited {
				return
			}
			k.listen(time.Minute)
			k.pass(25 * time.Hour)
			k.beat()
			k.round()
			k.round()
			if v := k.last(n); v.GetReason() == rateLimited {
				t.Errorf("a record stands for ever: %v", v)
			}
		})
	}
}

// A failure that did not come again when it would have been tried again is over.
func TestAFailureThatIsNotRepeatedIsOver(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.lose(n)
	k.listen(30 * time.Minute)
	k.merge(n, k.record(badTLS, 20*time.Minute), k.record(limited, time.Minute))
	k.round()
	if v := k.last(n); v.GetReason() != rateLimited {
		t.Errorf("verdict %v", v)
	}
}

// Records of an agent about the time after it was last heard count once it is lost; those about the time before do not
// count any more.
func TestSessionsBringTheRecordOfTheHost(t *testing.T) {
	k := newKit(t)
	n := k.made()
	reported := func(code commonv1.DiagnosticCode, at time.Time) *commonv1.Diagnostic {
		return &commonv1.Diagnostic{
			Code: code, Detail: "told", ObservedAt: timestamppb.New(at), Count: 3, NextRetry: durationpb.New(time.Second),
			RetryCorrelationId: ids.New(),
		}
	}
	n.session.Diagnostics = []*commonv1.Diagnostic{reported(badTLS, k.now().Add(time.Hour))} // by a clock that is ahead
	k.put(n.identity, n.session, n.gate)
	if k.round() != 0 {
		t.Errorf("a node that is connected is %v", k.last(n))
	}
	if got := k.count(`SELECT count(*) FROM recovery.evidence
		WHERE source = 'host' AND fresh_until <= mesh.clock()`); got != 1 {
		t.Errorf("%d stale pieces of evidence", got)
	}
	k.pass(time.Minute)
	k.beat()
	late := reported(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED, k.now())
	n.session.Diagnostics = []*commonv1.Diagnostic{late, {Code: 9999, Detail: "of a newer agent"}}
	k.put(n.session)
	if k.round() != 0 {
		t.Errorf("a node that is connected is %v", k.last(n))
	}
	n.session.LastSeenAt = timestamppb.New(k.now().Add(-30 * time.Second))
	n.session.State, n.session.ClosedAt = closedState, timestamppb.New(k.now())
	k.put(n.session)
	k.round()
	if v := k.last(n); v.GetReason() != certExpired || v.GetCorrelationId() != late.GetRetryCorrelationId() {
		t.Errorf("after it is lost: %v", v)
	}
	k.back(n)
	k.round()
	if v := k.last(n); v.GetReason() != unspecified {
		t.Errorf("after it is back: %v", v)
	}
}

// Records that a host made while its agent was heard explain nothing once the agent is lost, whichever way its session
// ends.
func TestReportsOfTheSessionEndWithIt(t *testing.T) {
	for name, end := range map[string]func(*kit, *machine){
		"closed": func(k *kit, n *machine) { k.lose(n) },
		"lost":   func(k *kit, n *machine) { k.replica = ids.New(); k.beat() },
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			n := k.up()
			k.listen(time.Minute)
			k.merge(n, k.record(limited, 0))
			n.session.Diagnostics = []*commonv1.Diagnostic{{
				Code: badTLS, Detail: "told", ObservedAt: timestamppb.New(k.now()), NextRetry: durationpb.New(time.Second),
			}}
			k.put(n.session)
			k.listen(5 * time.Minute)
			if k.round() != 0 {
				t.Errorf("a node that is connected is %v", k.last(n))
			}
			end(k, n)
			k.listen(5 * time.Minute)
			k.round()
			if v := k.last(n); v.GetReason() != agentDown {
				t.Errorf("verdict %v", v)
			}
		})
	}
}

func TestARecordOfAnUnknownNodeIsRefused(t *testing.T) {
	k := newKit(t)
	err := pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := collect.MergeHost(ctx, tx, ids.New(), nil, "")
		return err
	})
	if !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("%v", errors.Unwrap(err))
	}
}

// checkOfHost checks what the claims of a host are taken for: evidence of a known reason, of a known part, in time,
// bounded and clean, and none that makes a node insecure.
func checkOfHost(t *testing.T, records []collect.HostRecord, at, heardAt time.Time) {
	t.Helper()
	parts := map[commonv1.DriftPart]bool{}
	for _, e := range collect.OfHost("n", records, at, heardAt) {
		if row, known := drift.RowOf(e.Reason); e.Reason != 0 && (!known || row.Severity == p0) || e.Part == 0 ||
			e.Source != host || e.ObservedAt.After(at) || e.FreshUntil.IsZero() ||
			e.FreshUntil.After(at.Add(24*time.Hour)) || len(e.Detail) > 700 || !utf8.ValidString(e.Detail) ||
			strings.ContainsAny(e.Detail, "\x00\n\x1b") || e.CorrelationID != "" && !ids.Valid(e.CorrelationID) {
			t.Errorf("%+v", e)
		}
		if parts[e.Part] {
			t.Errorf("%s twice", e.Part)
		}
		parts[e.Part] = true
	}
}

// FuzzHostRecords has records of a host, as a person brings them, made evidence.
func FuzzHostRecords(f *testing.F) {
	f.Add(int32(6), "detail", int64(0), int64(30), int64(0))
	f.Add(int32(22), "\x00\x1b[31m\n\u202e\xff", int64(1)<<60, int64(-1)<<60, int64(5))
	f.Fuzz(func(t *testing.T, code int32, text string, seen, retry, ended int64) {
		at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		r := collect.HostRecord{
			Code: commonv1.DiagnosticCode(code), Detail: text, SeenAt: time.Unix(0, seen), NextRetry: time.Duration(retry),
			CorrelationID: text, By: "ops",
		}
		if ended != 0 {
			r.EndedAt = time.Unix(0, ended)
		}
		checkOfHost(t, []collect.HostRecord{r, r, {Code: limited, SeenAt: at}}, at, time.Time{})
	})
}

// FuzzDiagnostics has the diagnostics of an event, as the agent's session brought them, made evidence.
func FuzzDiagnostics(f *testing.F) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	far := &timestamppb.Timestamp{Seconds: 1 << 60, Nanos: -1}
	for _, list := range [][]*commonv1.Diagnostic{
		nil,
		{{Code: 6, Detail: "429", ObservedAt: timestamppb.New(at), NextRetry: durationpb.New(time.Minute)}},
		{{
			Code: 9999, Detail: "\x00\x1b[31m\n\u202e", ObservedAt: far, EndedAt: far,
			NextRetry: &durationpb.Duration{Seconds: 1 << 62},
		}},
		{
			{Code: 10, ObservedAt: timestamppb.New(at.Add(time.Hour)), RetryCorrelationId: "not an id"},
			{Code: 10, ObservedAt: timestamppb.New(at.Add(-time.Hour)), EndedAt: timestamppb.New(at)},
		},
	} {
		data, err := proto.Marshal(&nodev1.DiagnosticReport{Diagnostics: list})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, int64(0))
		f.Add(data, at.UnixNano())
	}
	f.Fuzz(func(t *testing.T, data []byte, heard int64) {
		report := &nodev1.DiagnosticReport{}
		if proto.Unmarshal(data, report) != nil {
			return
		}
		var heardAt time.Time
		if heard != 0 {
			heardAt = time.Unix(0, heard)
		}
		checkOfHost(t, collect.RecordsOf(report.GetDiagnostics()), at, heardAt)
	})
}
