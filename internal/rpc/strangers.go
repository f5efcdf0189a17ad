package rpc

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

// What clients that know nothing of the mesh ask of any gRPC server, without a token: health and reflection. Neither
// decides anything. A call of either ends after StrangerTimeout, and MaxStrangers are served at once.

// healthFresh is how long the last look at the health answers for.
const healthFresh = time.Second

const (
	healthService   = "grpc.health.v1.Health"
	healthCheck     = "/" + healthService + "/Check"
	healthWatch     = "/" + healthService + "/Watch"
	healthList      = "/" + healthService + "/List"
	reflectionAlpha = "grpc.reflection.v1alpha.ServerReflection"
	reflectionV1    = "grpc.reflection.v1.ServerReflection"
)

// MountHealth offers grpc.health.v1 to everybody: what ready returns, for the server and for each service that is
// mounted. Watch is refused: it would hold a stream for a stranger.
func (s *Server) MountHealth(ready func(context.Context) bool) error {
	h := &health{server: s, ready: ready}
	options := append(codecs(textRules{}), connect.WithReadMaxBytes(s.cfg.MaxReadBytes))
	mux := http.NewServeMux()
	mux.Handle(healthCheck, connect.NewUnaryHandler(healthCheck, h.check, options...))
	mux.Handle(healthList, connect.NewUnaryHandler(healthList, h.list, options...))
	mux.Handle(healthWatch, connect.NewServerStreamHandler(healthWatch, h.watch, options...))
	return s.MountUnchecked("/"+healthService+"/", mux)
}

// MountReflection offers both versions of gRPC's reflection to everybody: the services that are mounted, and health.
func (s *Server) MountReflection() error {
	reflector := grpcreflect.NewReflector(grpcreflect.NamerFunc(func() []string {
		names := append(s.Services(), healthService)
		slices.Sort(names)
		return names
	}))
	option := connect.WithReadMaxBytes(s.cfg.MaxReadBytes)
	_, v1 := grpcreflect.NewHandlerV1(reflector, option)
	_, alpha := grpcreflect.NewHandlerV1Alpha(reflector, option)
	return errors.Join(s.MountUnchecked("/"+reflectionV1+"/", v1), s.MountUnchecked("/"+reflectionAlpha+"/", alpha))
}

// health serves grpc.health.v1.
type health struct {
	server *Server
	ready  func(context.Context) bool

	mu   sync.Mutex
	at   time.Time
	last healthv1.HealthCheckResponse_ServingStatus
}

func (h *health) check(
	ctx context.Context, req *connect.Request[healthv1.HealthCheckRequest],
) (*connect.Response[healthv1.HealthCheckResponse], error) {
	if err := problemOf(req.Any()); err != nil {
		return nil, fault.ToConnect(err, ids.New())
	}
	if name := req.Msg.GetService(); name != "" && name != healthService &&
		!slices.Contains(h.server.Services(), name) {
		return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such service on this port",
			fault.Remedy("name none, or one that reflection or docs/api.md lists")), ids.New())
	}
	return connect.NewResponse(&healthv1.HealthCheckResponse{Status: h.status(ctx)}), nil
}

func (h *health) list(
	ctx context.Context, _ *connect.Request[healthv1.HealthListRequest],
) (*connect.Response[healthv1.HealthListResponse], error) {
	status := h.status(ctx)
	out := &healthv1.HealthListResponse{Statuses: map[string]*healthv1.HealthCheckResponse{"": {Status: status}}}
	for _, name := range append(h.server.Services(), healthService) {
		out.Statuses[name] = &healthv1.HealthCheckResponse{Status: status}
	}
	return connect.NewResponse(out), nil
}

func (h *health) watch(
	context.Context, *connect.Request[healthv1.HealthCheckRequest], *connect.ServerStream[healthv1.HealthCheckResponse],
) error {
	return fault.ToConnect(
		fault.New(
			commonv1.Reason_REASON_UNIMPLEMENTED,
			"health is not watched here",
			fault.Remedy("ask Check every few seconds"),
		),
		ids.New(),
	)
}

// status looks once a second at most, for however many ask. A caller that hangs up does not spoil the look for the
// others.
func (h *health) status(ctx context.Context) healthv1.HealthCheckResponse_ServingStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.at) < healthFresh {
		return h.last
	}
	h.last = healthv1.HealthCheckResponse_NOT_SERVING
	if h.ready(context.WithoutCancel(ctx)) {
		h.last = healthv1.HealthCheckResponse_SERVING
	}
	h.at = time.Now()
	return h.last
}

// serveUnchecked serves a service without policies, within the bounds for strangers.
func (s *Server) serveUnchecked(service http.Handler, w http.ResponseWriter, r *http.Request) {
	select {
	case s.strangers <- struct{}{}:
		defer func() { <-s.strangers }()
	default:
		refusal := fault.New(commonv1.Reason_REASON_OVERLOADED, "too many calls without a token are open here")
		if err := connect.NewErrorWriter().Write(w, r, fault.ToConnect(refusal, ids.New())); err != nil {
			s.deps.Logger.LogAttrs(
				r.Context(),
				slog.LevelDebug,
				"refusal not written",
				slog.String("port", s.cfg.Name),
				slog.Any("error", err),
			)
		}
		return
	}
	// Who does not read the answer holds no place either.
	controller := http.NewResponseController(w)
	bounded := controller.SetWriteDeadline(
		time.Now().Add(2*s.cfg.StrangerTimeout),
	) == nil // a recorder of tests has none
	r.Body = http.MaxBytesReader(w, r.Body, int64(s.cfg.MaxReadBytes)+envelopeBytes)
	service.ServeHTTP(w, r)
	if bounded {
		_ = controller.SetWriteDeadline(
			time.Time{},
		) // the connection may carry further requests; one that is gone needs none
	}
}
