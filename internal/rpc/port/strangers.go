package port

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc/codec"
	"github.com/gpuaas/mesh/internal/rpc/descriptors"
)

// Health and reflection are the services that clients without knowledge of the mesh call on any gRPC server, without a
// token. Neither changes anything. A call of either ends after StrangerTimeout. Each has MaxStrangers places: those of
// health are taken once the request has arrived, those of reflection by streams, of which one address has a quarter.

const (
	// healthFresh is how long the last probe of the health is served, and healthStale how long it is served while a new
	// probe runs.
	healthFresh = time.Second
	healthStale = 15 * time.Second
	// healthBody is how long a health request may take to arrive, and healthBytes how many bytes it may have.
	healthBody  = 2 * time.Second
	healthBytes = 4 << 10
	// reflectionShare bounds one address to the share 1/reflectionShare of the places of reflection.
	reflectionShare = 4
)

const (
	healthService   = "grpc.health.v1.Health"
	healthCheck     = "/" + healthService + "/Check"
	healthWatch     = "/" + healthService + "/Watch"
	healthList      = "/" + healthService + "/List"
	reflectionAlpha = "grpc.reflection.v1alpha.ServerReflection"
	reflectionV1    = "grpc.reflection.v1.ServerReflection"
)

// MountHealth offers grpc.health.v1 to every caller: the result of ready, for the server and for each service that is
// mounted. Watch is refused: it would keep a stream open for a stranger.
func (s *Server) MountHealth(ready func(context.Context) bool) error {
	h := &health{server: s, ready: ready}
	options := append(codec.Options(codec.TextRules{}), connect.WithReadMaxBytes(s.cfg.MaxReadBytes))
	mux := http.NewServeMux()
	mux.Handle(healthCheck, connect.NewUnaryHandler(healthCheck, h.check, options...))
	mux.Handle(healthList, connect.NewUnaryHandler(healthList, h.list, options...))
	mux.Handle(healthWatch, connect.NewServerStreamHandler(healthWatch, h.watch, options...))
	return s.MountUnchecked("/"+healthService+"/", mux)
}

// MountReflection offers both versions of gRPC's reflection to every caller: the services that are mounted at the first
// call, and health, with the types that these need. Other services that this process has descriptors of are not
// described.
func (s *Server) MountReflection() error {
	offered := func() []string {
		names := append(s.Services(), healthService)
		slices.Sort(names)
		return names
	}
	files := &describedFiles{load: sync.OnceValues(func() (*protoregistry.Files,
		error,
	) {
		return descriptors.Of(offered())
	})}
	reflector := grpcreflect.NewReflector(grpcreflect.NamerFunc(offered), grpcreflect.WithDescriptorResolver(files))
	option := connect.WithReadMaxBytes(s.cfg.MaxReadBytes)
	_, v1 := grpcreflect.NewHandlerV1(reflector, option)
	_, alpha := grpcreflect.NewHandlerV1Alpha(reflector, option)
	return errors.Join(s.MountUnchecked("/"+reflectionV1+"/", v1), s.MountUnchecked("/"+reflectionAlpha+"/", alpha))
}

// describedFiles looks descriptors up among those of the services that are offered.
type describedFiles struct {
	load func() (*protoregistry.Files, error)
}

func (d *describedFiles) FindFileByPath(path string) (protoreflect.FileDescriptor, error) {
	files, err := d.load()
	if err != nil {
		return nil, err
	}
	return files.FindFileByPath(path)
}

func (d *describedFiles) FindDescriptorByName(name protoreflect.FullName) (protoreflect.Descriptor, error) {
	files, err := d.load()
	if err != nil {
		return nil, err
	}
	return files.FindDescriptorByName(name)
}

// health serves grpc.health.v1.
type health struct {
	server *Server
	ready  func(context.Context) bool

	mu      sync.Mutex
	at      time.Time
	last    healthv1.HealthCheckResponse_ServingStatus
	probing chan struct{} // closed at the end of the probe that is under way; nil: there is none
}

func (h *health) check(
	ctx context.Context, req *connect.Request[healthv1.HealthCheckRequest],
) (*connect.Response[healthv1.HealthCheckResponse], error) {
	if err := codec.Problem(req.Any()); err != nil {
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

// status returns the health from a probe that runs once a second at most, for any number of callers. A caller during a
// probe gets the result of the one before, or waits for the new one if that is too old. A caller that hangs up does not
// end the probe for the others.
func (h *health) status(ctx context.Context) healthv1.HealthCheckResponse_ServingStatus {
	h.mu.Lock()
	age, underWay, last := time.Since(h.at), h.probing, h.last
	switch {
	case age < healthFresh, underWay != nil && age < healthStale:
		h.mu.Unlock()
		return last
	case underWay == nil:
		h.probing = make(chan struct{})
		h.mu.Unlock()
		return h.probe(ctx)
	}
	h.mu.Unlock()
	select {
	case <-underWay:
	case <-ctx.Done():
		return healthv1.HealthCheckResponse_NOT_SERVING
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// probe checks whether the process is ready, and wakes the callers that wait.
func (h *health) probe(ctx context.Context) healthv1.HealthCheckResponse_ServingStatus {
	status := healthv1.HealthCheckResponse_NOT_SERVING
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.last, h.at = status, time.Now()
		close(h.probing)
		h.probing = nil
	}()
	if h.ready(context.WithoutCancel(ctx)) {
		status = healthv1.HealthCheckResponse_SERVING
	}
	return status
}

// serveUnchecked serves a service without policies, within the bounds for strangers.
func (s *Server) serveUnchecked(name string, service http.Handler, w http.ResponseWriter, r *http.Request) {
	places, from := s.reflecting, originOf(r.RemoteAddr)
	if name == healthService {
		// A place of health is taken for the answer alone, never while a stranger sends.
		places, from = s.checking, ""
		if err := s.readQuestion(w, r); err != nil {
			s.refuseStranger(w, r, err)
			return
		}
	}
	release, ok := places.take(from)
	if !ok {
		s.refuseStranger(w, r, fault.New(commonv1.Reason_REASON_OVERLOADED, "too many calls without a token are open here"))
		return
	}
	defer release()
	// A caller that does not read the answer keeps no place either.
	controller := http.NewResponseController(w)
	bounded := controller.SetWriteDeadline(
		time.Now().Add(2*s.cfg.StrangerTimeout),
	) == nil // the recorder of a test supports none
	if name != healthService { // whose body has been read
		r.Body = http.MaxBytesReader(w, r.Body, int64(s.cfg.MaxReadBytes)+envelopeBytes)
	}
	service.ServeHTTP(w, r)
	if bounded {
		_ = controller.SetWriteDeadline(
			time.Time{},
		) // the connection may carry further requests; one that is gone needs none
	}
}

// readQuestion reads the body of a call of health, which names a service and no more.
func (s *Server) readQuestion(w http.ResponseWriter, r *http.Request) error {
	limit := int64(min(healthBytes, s.cfg.MaxReadBytes)) + envelopeBytes
	body, err := s.readBody(w, r, limit, min(healthBody, s.cfg.BodyTimeout, s.cfg.StrangerTimeout))
	if err != nil {
		return err
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return nil
}

// refuseStranger writes a refusal. Little of the rest of the body is read (see readingRest).
func (s *Server) refuseStranger(w http.ResponseWriter, r *http.Request, refusal error) {
	writer := connect.NewErrorWriter()
	w.Header().Set("Connection", "close")
	if !writer.IsSupported(r) {
		http.Error(w, fault.From(refusal).Public, http.StatusBadRequest)
		return
	}
	if err := writer.Write(w, r, fault.ToConnect(refusal, ids.New())); err != nil {
		s.deps.Logger.LogAttrs(r.Context(), slog.LevelDebug, "refusal not written", slog.String("port", s.cfg.Name),
			slog.Any("error", err))
	}
}

// strangerPlaces bounds the calls that are open at once: of all, and of each origin.
type strangerPlaces struct {
	all, each int

	mu    sync.Mutex
	taken int
	of    map[string]int
}

// newStrangerPlaces makes a number of places, all, of which one origin may hold the number each; zero: all of them.
func newStrangerPlaces(all, each int) *strangerPlaces {
	return &strangerPlaces{all: all, each: each, of: map[string]int{}}
}

// take takes a place for an origin and returns the function that releases it, or false if there is none.
func (p *strangerPlaces) take(origin string) (func(), bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken >= p.all || (p.each > 0 && p.of[origin] >= p.each) {
		return nil, false
	}
	p.taken++
	p.of[origin]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.taken--
		if p.of[origin]--; p.of[origin] == 0 {
			delete(p.of, origin)
		}
	}, true
}

// originOf returns the address of a peer without its port; of IPv6 its network: one host may have all addresses of it.
func originOf(remote string) string {
	const network = 64
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return remote
	}
	address := at.Addr().Unmap().WithZone("")
	if address.Is6() {
		if prefix, err := address.Prefix(network); err == nil {
			return prefix.String()
		}
	}
	return address.String()
}
