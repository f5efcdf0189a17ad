package nodeapi_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestASessionHasTheCorrelationIDOfItsRecovery: the session that recovery tells comes after a recovery action has the
// action's correlation id in all its events.
func TestASessionHasTheCorrelationIDOfItsRecovery(t *testing.T) {
	correlation := ids.New()
	k := newKit(t, func(b *nodeapitest.Backend) { b.Correlation = correlation })
	a := k.session(k.replica())
	f := beat(1)
	f.GetHeartbeat().ChangedFacts = &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Full: true, Path: "/state"}}
	a.send(f)
	testkit.Eventually(t, testkit.Patience, func() error {
		list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel),
			`kind = 'session.changed' AND aggregate_id = $1 AND correlation_id = $2`, a.session, correlation)
		if err == nil && len(list) != 2 {
			err = fmt.Errorf("%d events have the correlation id, want that of the admission and that of the fact", len(list))
		}
		return err
	})
}

// TestChangedFactsAndDiagnosticsBecomeEvents checks that an admitted agent's reports about its host are passed on:
// facts as they change, and its last diagnostics with every later event of the session.
func TestChangedFactsAndDiagnosticsBecomeEvents(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	k.raised(a)
	seen := func(what string, is func(testkit.Event) bool) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel),
				`kind = 'session.changed' AND aggregate_id = $1`, a.session)
			if err == nil && !slices.ContainsFunc(list, is) {
				err = errors.New(what + " is in no event")
			}
			return err
		})
	}
	full := func(e testkit.Event) bool { return e.Text("host", "state_disk", "full") == "true" }
	over := func(e testkit.Event) bool { return e.Text("host", "state_disk", "path") == "/state" && !full(e) }
	diskFull := func(e testkit.Event) bool {
		return e.Text("diagnostics", "0", "code") == "DIAGNOSTIC_CODE_STATE_DISK_FULL"
	}
	facts := func(full bool) *nodev1.ConnectRequest {
		f := beat(1)
		f.GetHeartbeat().ChangedFacts = &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Full: full, Path: "/state"}}
		return f
	}
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: &nodev1.DiagnosticReport{
		Diagnostics: []*commonv1.Diagnostic{{
			Code:   commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL,
			Detail: "no room",
		}},
	}}})
	seen("the diagnostic", diskFull)
	a.send(facts(true))
	seen("the changed fact with the diagnostic", func(e testkit.Event) bool { return full(e) && diskFull(e) })
	a.send(facts(false))
	seen("the fact that changed back", over)
}

// TestRecordsThatAreCutAreCounted checks that entries of a host's record which are too long, or of a time that cannot
// be, are counted by cause, and that sound ones are not.
func TestRecordsThatAreCutAreCounted(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.session(r)
	code := commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: &nodev1.DiagnosticReport{
		Diagnostics: []*commonv1.Diagnostic{
			{Code: code, Detail: strings.Repeat("x", 600)},
			{Code: code, Detail: "sound", ObservedAt: timestamppb.Now()},
			{Code: code, ObservedAt: timestamppb.New(time.Now().Add(time.Hour))},
			{Code: code, ObservedAt: &timestamppb.Timestamp{Seconds: 1 << 60}},
		},
	}}})
	a.send(beat(7))
	a.next("an answer", func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck().GetSequence() == 7 })
	for cause, want := range map[string]float64{"size": 1, "time": 2} {
		if got := k.counter(r, "agent_diagnostics_cut_total", `cause="`+cause+`"`); got != want {
			t.Errorf("%g entries were cut for their %s, want %g", got, cause, want)
		}
	}
}

// TestFactsThatAreCutAreCounted checks that a host which claims more GPUs than a host has, in its Hello or later, is
// counted, and that no more of them are reported.
func TestFactsThatAreCutAreCounted(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.session(r)
	frame := beat(7)
	host := &commonv1.HostFacts{Kernel: strings.Repeat("k", 200)}
	for i := range 500 {
		host.Gpus = append(host.Gpus, &commonv1.Gpu{Index: int32(i), DeviceId: "GPU-" + strconv.Itoa(i)})
		host.Addresses = append(host.Addresses, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String())
	}
	frame.GetHeartbeat().ChangedFacts = host
	a.send(frame)
	a.next("an answer", func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck().GetSequence() == 7 })
	for fact, want := range map[string]float64{"gpus": 436, "addresses": 436, "texts": 1} {
		if got := k.counter(r, "agent_facts_cut_total", `fact="`+fact+`"`); got != want {
			t.Errorf("%g %s were cut, want %g", got, fact, want)
		}
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel),
			`kind = 'session.changed' AND aggregate_id = $1`, a.session)
		if err == nil && !slices.ContainsFunc(list, func(e testkit.Event) bool {
			return e.Text("host", "gpus", "63", "device_id") == "GPU-63" && e.Text("host", "gpus", "64", "device_id") == ""
		}) {
			err = errors.New("no event has the first 64 GPUs alone")
		}
		return err
	})
}
