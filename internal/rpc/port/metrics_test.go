package port_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc/calls"
)

// refusals returns the counter of refusals, by `procedure reason`.
func refusals(t *testing.T, f *fixture) map[string]float64 {
	t.Helper()
	families, err := f.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, family := range families {
		if family.GetName() != "rpc_server_refusals_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			if len(labels) != 2 {
				t.Errorf("labels %v", labels)
			}
			out[labels["procedure"]+" "+labels["reason"]] = metric.GetCounter().GetValue()
		}
	}
	return out
}

// A code is too coarse for alerts: a spent quota and a taken name may share one.
func TestRefusalsAreCountedByReason(t *testing.T) {
	var refusal error
	f := start(t, &backend{
		retire: func(context.Context, *recoveryv1.RetireInstanceRequest) (*recoveryv1.RetireInstanceResponse, error) {
			if refusal != nil {
				return nil, refusal
			}
			return &recoveryv1.RetireInstanceResponse{}, nil
		},
		view: func(_ context.Context, stream *authorityStream) error {
			if err := stream.Send(&recoveryv1.WatchAuthorityResponse{}); err != nil {
				return err
			}
			return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "")
		},
	}, nil)
	const beyond = commonv1.Reason(987654) // of a later build
	for _, refusal = range []error{
		nil,
		fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, ""),
		fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, "another sentence"),
		fault.New(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN, ""),
		fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, ""),
		errors.New("a driver's error"),
		&fault.Error{Reason: beyond}, &fault.Error{Reason: beyond + 1},
	} {
		_, err := f.instances(t, "lifecycle").RetireInstance(t.Context(), retireRequest())
		if (err == nil) != (refusal == nil) {
			t.Errorf("answered %v to %v", err, refusal)
		}
	}
	_, err := f.instances(t, "lifecycle").RetireInstance(t.Context(), &recoveryv1.RetireInstanceRequest{})
	want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	_, err = f.instances(t, "readmodel").RetireInstance(t.Context(), retireRequest())
	want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	large := retireRequest()
	large.Reason = strings.Repeat("x", 2<<20)
	_, err = recoveryv1connect.NewInstanceServiceClient(f.Client(t, "recovery", f.Service(t, "lifecycle")), f.server.URL(),
		// The client would refuse it first.
		calls.Options(calls.Config{MaxSendBytes: 4 << 20})...).RetireInstance(t.Context(), large)
	want(t, err, commonv1.Reason_REASON_FRAME_TOO_LARGE)

	stream, err := recoveryv1connect.NewSessionServiceClient(f.Client(t, "recovery", f.Service(t, "nodeapi")),
		f.server.URL(), calls.Options(calls.Config{})...).WatchAuthority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&recoveryv1.WatchAuthorityRequest{}); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = stream.Receive()
	}
	want(t, err, commonv1.Reason_REASON_NODE_NOT_ADMITTED)

	retire, watch := recoveryv1connect.InstanceServiceRetireInstanceProcedure,
		recoveryv1connect.SessionServiceWatchAuthorityProcedure
	counted := map[string]float64{
		retire + " quota_exceeded": 2, retire + " workspace_name_taken": 1, retire + " tenant_unknown": 1,
		retire + " internal": 1, retire + " unspecified": 2, retire + " invalid_argument": 1,
		retire + " permission_denied": 1, retire + " frame_too_large": 1,
		watch + " node_not_admitted": 1,
	}
	if got := refusals(t, f); !maps.Equal(got, counted) {
		t.Errorf("counted %v, want %v", got, counted)
	}
}
