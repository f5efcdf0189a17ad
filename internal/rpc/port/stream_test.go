package port_test

import (
	"context"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
)

// waiting is a backend whose streams wait as services' do: one for its context, one for the next message.
func waiting(opened chan<- struct{}) *backend {
	return &backend{
		work: func(ctx context.Context, _ *lifecyclev1.WatchWorkRequest, stream *workStream) error {
			if err := stream.Send(&lifecyclev1.WatchWorkResponse{}); err != nil {
				return err
			}
			opened <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		},
		view: func(_ context.Context, stream *authorityStream) error {
			for first := true; ; first = false {
				if _, err := stream.Receive(); err != nil {
					return err
				}
				if err := stream.Send(&recoveryv1.WatchAuthorityResponse{}); err != nil {
					return err
				}
				if first {
					opened <- struct{}{}
				}
			}
		},
	}
}

// openStreams opens one stream of each kind and returns how each of them ended.
func openStreams(t *testing.T, f *fixture, store *pki.Store, opened <-chan struct{}) <-chan error {
	t.Helper()
	ended := make(chan error, 2)
	// A connection each: a server that asks for a new connection after the first, as its certificate ends within a minute,
	// refuses a second stream of the same.
	work, err := lifecyclev1connect.NewTaskServiceClient(f.Client(t, "recovery", store), f.server.URL(),
		calls.Options(calls.Config{})...).
		WatchWork(t.Context(), &lifecyclev1.WatchWorkRequest{ReplicaId: ids.New()})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for work.Receive() {
		}
		ended <- work.Err()
	}()
	view, err := recoveryv1connect.NewSessionServiceClient(f.Client(t, "recovery", store), f.server.URL(),
		calls.Options(calls.Config{})...).
		WatchAuthority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := view.Send(&recoveryv1.WatchAuthorityRequest{
		Frame: &recoveryv1.WatchAuthorityRequest_Ping{Ping: &recoveryv1.AuthorityPing{PingId: 1}},
	}); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			if _, err := view.Receive(); err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 2 {
		select {
		case <-opened:
		case err := <-ended:
			t.Fatalf("a stream ended at once: %v", err)
		}
	}
	return ended
}

func TestStreamsEndWhenTheServerDrains(t *testing.T) {
	opened := make(chan struct{}, 2)
	f := prepare(t, waiting(opened), nil)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.server.Run(ctx) }()
	ended := openStreams(t, f, f.Service(t, "nodeapi"), opened)
	began := time.Now()
	stop()
	for range 2 {
		want(t, <-ended, commonv1.Reason_REASON_SERVER_DRAINING)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("the drain took %s", took)
	}
}

// An open connection outlives the certificate that opened it: its streams must not.
func TestStreamsEndWhenTheCertificateExpires(t *testing.T) {
	opened := make(chan struct{}, 2)
	f := start(t, waiting(opened), nil)
	// Certificates count whole seconds: the streams have fourteen at least to open in.
	store, err := f.Services.Issue("nodeapi", 15*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	ended := openStreams(t, f, store, opened)
	for range 2 {
		want(t, <-ended, commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	}
	// The open connection is of no use for another request either, and a new one is refused by the handshake.
	_, err = recoveryv1connect.NewInstanceServiceClient(f.Client(t, "recovery", store), f.server.URL(),
		calls.Options(calls.Config{})...).
		RetireInstance(t.Context(), retireRequest())
	if err == nil {
		t.Error("an expired certificate was let in")
	}
}

func TestClientsTakeUpANewCertificateWithoutARestart(t *testing.T) {
	serials := make(chan string, 2)
	f := start(t, &backend{retire: func(
		ctx context.Context, _ *recoveryv1.RetireInstanceRequest,
	) (*recoveryv1.RetireInstanceResponse, error) {
		peer, _ := rpc.PeerFrom(ctx)
		serials <- peer.Serial
		return &recoveryv1.RetireInstanceResponse{}, nil
	}}, nil)
	// Less than a minute is left, so the server asks for a new connection after every request.
	store, err := f.Services.Issue("lifecycle", 55*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	client := recoveryv1connect.NewInstanceServiceClient(f.Client(t, "recovery", store), f.server.URL(),
		calls.Options(calls.Config{})...)
	if _, err := client.RetireInstance(t.Context(), retireRequest()); err != nil {
		t.Fatal(err)
	}
	next := f.Service(t, "lifecycle").Certificate()
	if err := store.Set(next.PrivateKey, next.Certificate); err != nil {
		t.Fatal(err)
	}
	first := <-serials
	deadline := time.Now().Add(50 * time.Second)
	for {
		if _, err := client.RetireInstance(t.Context(), retireRequest()); err != nil {
			t.Fatal(err)
		}
		if <-serials != first {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the old certificate is still shown")
		}
	}
}

func TestClientsRefuseAnotherServer(t *testing.T) {
	f := start(t, &backend{}, nil)
	other := rpctest.NewAuthorities(t)
	tests := []struct {
		name string
		cfg  pki.ClientConfig
	}{
		{"of another name", pki.ClientConfig{
			Store: f.Service(t, "lifecycle"), Roots: f.ServiceRoots, Server: pki.ServiceID(rpctest.TrustDomain, "nodeapi"),
		}},
		{"of another authority", pki.ClientConfig{
			Store: f.Service(t, "lifecycle"), Roots: other.ServiceRoots, Server: pki.ServiceID(rpctest.TrustDomain, "recovery"),
		}},
		{"of the node authority", pki.ClientConfig{
			Store: f.Service(t, "lifecycle"), Roots: f.NodeRoots, Server: pki.ServiceID(rpctest.TrustDomain, "recovery"),
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			client, err := calls.HTTPClient(tt.cfg, calls.HTTPConfig{})
			if err != nil {
				t.Fatal(err)
			}
			defer client.CloseIdleConnections()
			_, err = recoveryv1connect.NewInstanceServiceClient(client, f.server.URL(),
				calls.Options(calls.Config{})...).
				RetireInstance(t.Context(), retireRequest())
			want(t, err, commonv1.Reason_REASON_UNAVAILABLE)
		})
	}
}

func TestRefusedHandshakesAreCounted(t *testing.T) {
	f := start(t, &backend{}, nil)
	if !rpctest.HandshakeRefused(t, rpctest.Target{URL: f.server.URL(), Service: "recovery", Authorities: f.Authorities},
		f.Node(t, rpctest.NodeID)) {
		t.Fatal("a node was let in")
	}
	got := <-f.rejects
	if got.Reason != pki.RejectUnknownAuthority ||
		got.Claimed.SAN != pki.NodeID(rpctest.TrustDomain, rpctest.NodeID).String() {
		t.Errorf("reject = %+v", got)
	}
	families, err := f.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, family := range families {
		found = found || family.GetName() == "tls_rejects_total"
	}
	if !found {
		t.Error("no counter")
	}
	if !strings.Contains(f.log.String(), "claimed_unverified") {
		t.Error("no line in the log")
	}
}
