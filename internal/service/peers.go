package service

import (
	"context"
	"fmt"
	"net/http"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
)

// InternalServer makes the port that other services call, to be mounted on and run by the service.
func (b *Base) InternalServer(ctx context.Context, persons *assertion.Verifier) (*port.Server, error) {
	srv, err := port.New(ctx,
		port.Deps{Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Persons: persons, Translate: pg.Fault},
		port.Config{
			Name: "internal", Addr: b.Config.Listen,
			TLS: pki.ServerConfig{
				Store: b.Store, TrustDomain: b.Config.TrustDomain,
				Clients: []pki.Trust{{Kind: pki.KindService, Bundle: b.Services}},
			},
			MaxReadBytes: 8 << 20, // batches of many nodes' reports
		})
	if err != nil {
		return nil, fmt.Errorf("open internal port: %w", err)
	}
	if err := srv.Mount(commonv1connect.NewHealthServiceHandler(health{b}, srv.HandlerOptions()...)); err != nil {
		return nil, fmt.Errorf("mount health: %w", err)
	}
	b.Add(app.Task{Name: "internal", Phase: app.PhaseDrain, Run: srv.Run})
	return srv, nil
}

// health implements HealthService.
type health struct{ base *Base }

// GetHealth returns what this replica's own checks found last.
func (h health) GetHealth(context.Context, *commonv1.GetHealthRequest) (*commonv1.GetHealthResponse, error) {
	version, _ := obs.Build()
	return &commonv1.GetHealthResponse{
		Version: version, Service: h.base.Name, ReplicaId: h.base.ReplicaID, Draining: h.base.Health.Draining(),
		Parts: h.base.Health.Parts(),
	}, nil
}

// Client is a client of another service.
type Client struct {
	HTTP    *http.Client
	BaseURL string
	Options []connect.ClientOption
}

// Peer makes the client of another service, at host:port. asserter is for readmodel alone.
func (b *Base) Peer(name, addr string, asserter *assertion.Signer) (Client, error) {
	at, err := b.peers(name, asserter)
	if err != nil {
		return Client{}, err
	}
	return at(addr), nil
}

// Peers makes the clients of single replicas of another service, each for the given host:port. They share their
// connections.
func (b *Base) Peers(name string) (func(addr string) Client, error) { return b.peers(name, nil) }

func (b *Base) peers(name string, asserter *assertion.Signer) (func(addr string) Client, error) {
	cfg := pki.ClientConfig{Store: b.Store, Roots: b.Services, Server: pki.ServiceID(b.Config.TrustDomain, name)}
	hc, err := calls.HTTPClient(cfg, calls.HTTPConfig{})
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", name, err)
	}
	b.clients = append(b.clients, hc)
	opts := calls.Options(calls.Config{
		Peer: name, MaxReadBytes: 16 << 20, MaxSendBytes: 8 << 20, Asserter: asserter,
	})
	return func(addr string) Client { return Client{HTTP: hc, BaseURL: "https://" + addr, Options: opts} }, nil
}
