package fault_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

const driverText = `ERROR: duplicate key value violates unique constraint "workspace_pkey" (SQLSTATE 23505)`

func TestTableIsComplete(t *testing.T) {
	for _, reason := range names.All[commonv1.Reason]() {
		row := fault.RowOf(reason)
		if !fault.Known(reason) {
			t.Errorf("%s has no row", names.Of(reason))
			continue
		}
		if row.Code < connect.CodeCanceled || row.Code > connect.CodeUnauthenticated {
			t.Errorf("%s: code %d", names.Of(reason), row.Code)
		}
		if row.Action == commonv1.Action_ACTION_UNSPECIFIED {
			t.Errorf("%s: no action", names.Of(reason))
		}
		for field, text := range map[string]string{
			"public": row.Public, "remedy": row.Remedy, "impact": row.Impact,
			"owner": row.Owner,
		} {
			if text == "" || strings.ContainsAny(text, "\n\r") || strings.HasSuffix(text, ".") {
				t.Errorf("%s: %s = %q", names.Of(reason), field, text)
			}
		}
		if row.Action == commonv1.Action_ACTION_STOP && row.RetryAfter != 0 {
			t.Errorf("%s: stop with a wait", names.Of(reason))
		}
	}
}

func TestUnknownReasonMeansWait(t *testing.T) {
	future := fault.FromDenial(&commonv1.Denial{Reason: 9999, Action: commonv1.Action_ACTION_STOP, Message: "new"})
	if got := fault.ActionOf(future); got != commonv1.Action_ACTION_WAIT {
		t.Errorf("ActionOf(unknown reason) = %v, want wait", got)
	}
	if got := fault.ActionOf(errors.New("x")); got != commonv1.Action_ACTION_WAIT {
		t.Errorf("ActionOf(plain) = %v, want wait", got)
	}
	if got := fault.ActionOf(fault.FromDenial(&commonv1.Denial{})); got != commonv1.Action_ACTION_WAIT {
		t.Errorf("ActionOf(unspecified) = %v, want wait", got)
	}
	odd := fault.FromDenial(&commonv1.Denial{Reason: commonv1.Reason_REASON_EPOCH_SUPERSEDED, Action: 77})
	if got := fault.ActionOf(odd); got != commonv1.Action_ACTION_STOP {
		t.Errorf("ActionOf(unknown action) = %v, want the table's", got)
	}
}

func TestActionsOfTheContract(t *testing.T) {
	tests := []struct {
		reason commonv1.Reason
		want   commonv1.Action
	}{
		{commonv1.Reason_REASON_EPOCH_SUPERSEDED, commonv1.Action_ACTION_STOP},
		{commonv1.Reason_REASON_MINT_CONSUMED, commonv1.Action_ACTION_WAIT},
		{commonv1.Reason_REASON_SESSION_SUPERSEDED, commonv1.Action_ACTION_WAIT},
		{commonv1.Reason_REASON_SERIAL_SUPERSEDED, commonv1.Action_ACTION_RENEW},
		{commonv1.Reason_REASON_JOIN_STATE_LOST, commonv1.Action_ACTION_RECOVER},
		{commonv1.Reason_REASON_TOKEN_EXPIRED, commonv1.Action_ACTION_REBUNDLE},
	}
	for _, tt := range tests {
		if got := fault.ActionOf(fault.New(tt.reason, "")); got != tt.want {
			t.Errorf("%s: action %v, want %v", names.Of(tt.reason), got, tt.want)
		}
	}
	if d := fault.RowOf(commonv1.Reason_REASON_SESSION_SUPERSEDED).RetryAfter; d <= 0 || d > 2*time.Second {
		t.Errorf("session_superseded waits %v, want at most 2s", d)
	}
}

// TestABundleIsNamedByItsCommand: where only a bundle helps, the next action names the command that issues one.
func TestABundleIsNamedByItsCommand(t *testing.T) {
	found := 0
	for _, list := range [][]fault.Explanation{fault.Catalogue(), fault.DriftCatalogue(), fault.DiagnosticCatalogue()} {
		for _, e := range list {
			if e.Action != commonv1.Action_ACTION_REBUNDLE {
				continue
			}
			found++
			if !strings.Contains(e.NextAction, "`gpuaas nodes bundle NODE`") {
				t.Errorf("%s: no command issues the bundle in %q", e.Code, e.NextAction)
			}
		}
	}
	if found < 8 {
		t.Errorf("only %d reasons are left by a bundle", found)
	}
}

func TestErrorChain(t *testing.T) {
	cause := errors.New(driverText)
	err := fmt.Errorf("create workspace: %w", fault.New(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN, "the name is taken",
		fault.Cause(cause), fault.Conflicting("ws1"), fault.Unmet("name free"), fault.RetryAfter(time.Second),
		fault.Remedy("rename")))
	if !errors.Is(err, cause) || !fault.Has(err, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN) ||
		fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
		t.Error("chain is not walked")
	}
	if !errors.Is(err, fault.New(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN, "")) {
		t.Error("Is by reason fails")
	}
	if got := fault.ReasonOf(err); got != commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN {
		t.Errorf("ReasonOf = %v", got)
	}
	want := `create workspace: workspace_name_taken: the name is taken (unmet: name free): ` + driverText
	if err.Error() != want {
		t.Errorf("Error() = %q, want %q", err, want)
	}
	if fault.From(nil) != nil || fault.ReasonOf(nil) != commonv1.Reason_REASON_UNSPECIFIED {
		t.Error("nil is not nil")
	}
	if fault.ActionOf(nil) != commonv1.Action_ACTION_UNSPECIFIED {
		t.Error("nil has an action")
	}
}

func TestFrom(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want commonv1.Reason
	}{
		{"plain", errors.New(driverText), commonv1.Reason_REASON_INTERNAL},
		{"deadline", fmt.Errorf("query: %w", context.DeadlineExceeded), commonv1.Reason_REASON_DEADLINE_EXCEEDED},
		{"cancelled", fmt.Errorf("query: %w", context.Canceled), commonv1.Reason_REASON_UNAVAILABLE},
		{
			"own validation", connect.NewError(connect.CodeInvalidArgument, errors.New("name: too short")),
			commonv1.Reason_REASON_INVALID_ARGUMENT,
		},
		{
			"own limit", connect.NewError(connect.CodeResourceExhausted, errors.New("message size 9 larger than 8")),
			commonv1.Reason_REASON_FRAME_TOO_LARGE,
		},
		{"own unknown", connect.NewError(connect.CodeUnknown, errors.New(driverText)), commonv1.Reason_REASON_INTERNAL},
		{
			"fault over context", fault.New(commonv1.Reason_REASON_CONFLICT, "", fault.Cause(context.Canceled)),
			commonv1.Reason_REASON_CONFLICT,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := fault.From(tt.err)
			if e.Reason != tt.want {
				t.Errorf("reason %v, want %v", e.Reason, tt.want)
			}
			if strings.Contains(e.Public, "SQLSTATE") {
				t.Errorf("the driver's text leaks: %q", e.Public)
			}
			if !errors.Is(e, tt.err) {
				t.Error("the cause is lost")
			}
		})
	}
}

func full() *fault.Error {
	return fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, "too many GPUs", fault.Cause(errors.New(driverText)),
		fault.Unmet("gpus <= 4", "storage <= 1TiB"), fault.Conflicting("t1"), fault.RetryAfter(1500*time.Millisecond),
		fault.Remedy("ask for fewer"))
}

func TestDenialRoundTrip(t *testing.T) {
	d := fault.ToDenial(full(), "corr")
	want := &commonv1.Denial{
		Reason: commonv1.Reason_REASON_QUOTA_EXCEEDED, Action: commonv1.Action_ACTION_STOP, Message: "too many GPUs",
		Remedy: "ask for fewer", Unmet: []string{"gpus <= 4", "storage <= 1TiB"}, ConflictingId: "t1", CorrelationId: "corr",
		RetryAfter: durationpb.New(1500 * time.Millisecond),
	}
	if diff := cmp.Diff(want, d, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, fault.ToDenial(fault.FromDenial(d), ""), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if fault.FromDenial(nil) != nil || fault.ToDenial(nil, "") != nil {
		t.Error("nil is not nil")
	}
}

func TestPeerTextIsBounded(t *testing.T) {
	e := fault.FromDenial(&commonv1.Denial{
		Reason: commonv1.Reason_REASON_CONFLICT, Message: strings.Repeat("é", 5000) + "\x1b[2J",
		Unmet: make([]string, 500), RetryAfter: durationpb.New(1000 * time.Hour), Remedy: "a\x1b]52;c;x\x07b\nc",
	})
	if len(e.Public) > 1024 || len(e.Unmet) > 64 || e.RetryAfter > time.Hour ||
		strings.ContainsAny(e.Remedy, "\x1b\x07\n") {
		t.Errorf("unbounded: %d %d %v %q", len(e.Public), len(e.Unmet), e.RetryAfter, e.Remedy)
	}
	if n := fault.FromDenial(&commonv1.Denial{RetryAfter: durationpb.New(-time.Hour)}); n.RetryAfter != 0 {
		t.Errorf("negative wait %v", n.RetryAfter)
	}
}

func TestGRPCRoundTrip(t *testing.T) {
	err := fault.ToGRPC(fmt.Errorf("x: %w", full()), "corr")
	if st, _ := status.FromError(err); st.Code() != codes.FailedPrecondition || st.Message() != "too many GPUs" {
		t.Errorf("status %v", err)
	}
	back, ok := fault.As(fault.FromGRPC(err))
	if !ok || back.Reason != commonv1.Reason_REASON_QUOTA_EXCEEDED || back.CorrelationID != "corr" ||
		back.ConflictingID != "t1" || len(back.Unmet) != 2 {
		t.Errorf("back = %+v", back)
	}
	plain := fault.ToGRPC(errors.New(driverText), "corr")
	if strings.Contains(plain.Error(), "SQLSTATE") || status.Code(plain) != codes.Internal {
		t.Errorf("leak: %v", plain)
	}
	for code, want := range map[codes.Code]commonv1.Reason{
		codes.Unavailable: commonv1.Reason_REASON_UNAVAILABLE, codes.ResourceExhausted: commonv1.Reason_REASON_RATE_LIMITED,
		codes.PermissionDenied: commonv1.Reason_REASON_UNAVAILABLE, codes.DataLoss: commonv1.Reason_REASON_INTERNAL,
		codes.DeadlineExceeded: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
		codes.Unimplemented:    commonv1.Reason_REASON_UNIMPLEMENTED,
	} {
		got := fault.FromGRPC(status.Error(code, "x509: certificate signed by unknown authority"))
		if fault.ReasonOf(got) != want || fault.ActionOf(got) != commonv1.Action_ACTION_WAIT {
			t.Errorf("%v: %v", code, got)
		}
		if e, _ := fault.As(got); strings.Contains(e.Public, "x509") {
			t.Errorf("%v: the peer's text is public: %q", code, e.Public)
		}
	}
	if fault.ToGRPC(nil, "") != nil || fault.FromGRPC(nil) != nil || fault.ToConnect(nil, "") != nil ||
		fault.FromConnect(nil) != nil {
		t.Error("nil is not nil")
	}
	if got := fault.FromGRPC(full()); !errors.Is(got, full()) {
		t.Errorf("a fault of ours was changed: %v", got)
	}
}

// TestConnectRoundTrip uses a real connection, so that it covers what connect itself does to errors.
func TestConnectRoundTrip(t *testing.T) {
	testkit.IO(t)
	tests := []struct {
		name       string
		serve      error
		want       commonv1.Reason
		wantPublic string
	}{
		{"fault", full(), commonv1.Reason_REASON_QUOTA_EXCEEDED, "too many GPUs"},
		{"plain", errors.New(driverText), commonv1.Reason_REASON_INTERNAL, "internal error"},
		{
			"deadline", context.DeadlineExceeded, commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			fault.RowOf(commonv1.Reason_REASON_DEADLINE_EXCEEDED).Public,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			handler := connect.NewUnaryHandler("/t.S/M",
				func(context.Context, *connect.Request[emptypb.Empty]) (*connect.Response[emptypb.Empty], error) {
					return nil, fault.ToConnect(tt.serve, "corr")
				})
			srv := httptest.NewServer(handler)
			defer srv.Close()
			client := connect.NewClient[emptypb.Empty, emptypb.Empty](srv.Client(), srv.URL+"/t.S/M")
			_, err := client.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{}))
			got, ok := fault.As(fault.FromConnect(err))
			if !ok || got.Reason != tt.want || got.Public != tt.wantPublic || got.CorrelationID != "corr" {
				t.Errorf("got %+v from %v", got, err)
			}
			if strings.Contains(err.Error(), "SQLSTATE") {
				t.Errorf("leak: %v", err)
			}
			// Even if a caller forwards a peer's wire error unchanged, its text is not sent as ours.
			if leaked := fault.ToConnect(err, ""); leaked.Code() != connect.CodeInternal ||
				leaked.Message() != "internal error" {
				t.Errorf("a peer's wire error was forwarded: %v", leaked)
			}
		})
	}
}

func TestFromConnectOfAnEdge(t *testing.T) {
	testkit.IO(t)
	for code, want := range map[int]commonv1.Reason{
		http.StatusTooManyRequests: commonv1.Reason_REASON_UNAVAILABLE,
		http.StatusForbidden:       commonv1.Reason_REASON_UNAVAILABLE,
		http.StatusBadGateway:      commonv1.Reason_REASON_UNAVAILABLE,
		http.StatusNotFound:        commonv1.Reason_REASON_UNIMPLEMENTED,
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, "<html>secret proxy page</html>")
		}))
		client := connect.NewClient[emptypb.Empty, emptypb.Empty](srv.Client(), srv.URL+"/t.S/M")
		_, err := client.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{}))
		srv.Close()
		got := fault.FromConnect(err)
		if fault.ReasonOf(got) != want || fault.ActionOf(got) != commonv1.Action_ACTION_WAIT {
			t.Errorf("HTTP %d: %v", code, got)
		}
	}
	dead := connect.NewClient[emptypb.Empty, emptypb.Empty](http.DefaultClient, "http://127.0.0.1:1/t.S/M")
	_, err := dead.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{}))
	if got, _ := fault.As(fault.FromConnect(err)); got == nil || got.Reason != commonv1.Reason_REASON_UNAVAILABLE ||
		strings.Contains(got.Public, "127.0.0.1") {
		t.Errorf("dead server: %v", fault.FromConnect(err))
	}
	if got := fault.FromConnect(io.ErrUnexpectedEOF); fault.ReasonOf(got) != commonv1.Reason_REASON_UNAVAILABLE {
		t.Errorf("transport error: %v", got)
	}
}

func TestCatalogueExplainsEveryReason(t *testing.T) {
	all := fault.Catalogue()
	if len(all) != len(names.All[commonv1.Reason]()) {
		t.Errorf("%d rows", len(all))
	}
	seen := map[string]string{}
	for _, e := range all {
		if other := seen[e.Meaning]; other != "" {
			t.Errorf("%s and %s mean the same: %q", e.Code, other, e.Meaning)
		}
		seen[e.Meaning] = e.Code
	}
	if got := fault.Explain(4711); got.Action != commonv1.Action_ACTION_WAIT || got.NextAction == "" {
		t.Errorf("unknown reason: %+v", got)
	}
}

// TestEveryCodeIsExplainedOnce: each value of each enum that people are shown as a reason has a whole explanation, and
// a code that two of them share has one.
func TestEveryCodeIsExplainedOnce(t *testing.T) {
	var codes []string
	for _, list := range [][]fault.Explanation{
		fault.Catalogue(), fault.DriftCatalogue(), fault.DiagnosticCatalogue(), fault.FindingCatalogue(),
		fault.IncidentCatalogue(), fault.StateCatalogue(),
	} {
		for _, e := range list {
			codes = append(codes, e.Code)
			if e.Meaning == "" || e.Impact == "" || e.Owner == "" || e.NextAction == "" || e.Action == 0 {
				t.Errorf("%s is not wholly explained: %+v", e.Code, e)
			}
		}
	}
	for _, code := range codes {
		if found := fault.Explanations(code); len(found) != 1 {
			t.Errorf("%s has %d explanations", code, len(found))
		}
	}
}
