// Package session serves the agents' stream: it opens sessions in the order Hello, Welcome, Ready, Admitted, passes on
// the reports of agents, and ends streams that break the protocol.
//
// It takes the node's identity from the verified certificate, admission and generation from recovery, and work from
// lifecycle. It decides none of these. Each stream costs one goroutine, the handler that reads; everything sent goes
// through the session's bounded outbox.
package session

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/admission"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
)

// Work takes the agents' reports about their tasks.
type Work interface {
	Delivered(ctx context.Context, s *roster.Session, f *nodev1.TaskDelivered) error
	Started(ctx context.Context, s *roster.Session, f *nodev1.TaskStarted) error
	Progress(ctx context.Context, s *roster.Session, f *nodev1.TaskProgress) error
	Result(ctx context.Context, s *roster.Session, f *nodev1.TaskResult) error
	// Ready is called when a session may be given work.
	Ready(s *roster.Session)
}

// Authority is the part of recovery that decides about sessions, many in one call.
type Authority interface {
	OpenSessions(context.Context, *recoveryv1.OpenSessionsRequest) (*recoveryv1.OpenSessionsResponse, error)
	ConfirmSessions(context.Context, *recoveryv1.ConfirmSessionsRequest) (*recoveryv1.ConfirmSessionsResponse, error)
	ReportChallenge(context.Context, *recoveryv1.ReportChallengeRequest) (*recoveryv1.ReportChallengeResponse, error)
	RenewCertificate(context.Context, *recoveryv1.RenewCertificateRequest) (*recoveryv1.RenewCertificateResponse, error)
}

// Gate is lifecycle's gate.
type Gate interface {
	SessionsReady(context.Context, *lifecyclev1.SessionsReadyRequest) (*lifecyclev1.SessionsReadyResponse, error)
	KeysHeld(context.Context, *lifecyclev1.KeysHeldRequest) (*lifecyclev1.KeysHeldResponse, error)
}

// Metrics counts the events of the port. Reasons come from closed sets.
type Metrics interface {
	TLSReject(reason string)
	Shed()
	Stalled()
	Opened(outcome string)
	Refused(reason string)
	Frame(kind string)
	Profile(outcome string)
	Cut(cut bounds.Cut)
}

// Deps of the server.
type Deps struct {
	Logger    *slog.Logger
	Roster    *roster.Roster
	View      *authority.View
	Work      Work
	Authority Authority
	Gate      Gate
	Metrics   Metrics
	Observe   func(s *roster.Session, o *nodev1.Observation)
	Diagnose  func(s *roster.Session, d []*commonv1.Diagnostic)
	Host      func(s *roster.Session, changed *commonv1.HostFacts)
	Policy    func() *commonv1.NodePolicy
	// Profile is called when the agent of an admitted session has another profile.
	Profile func(s *roster.Session)
	// Clock is called when it changes how far the clock of an admitted session's host is from the database's.
	Clock func(s *roster.Session, offset time.Duration)
	// Rejected is called with each refused handshake. It must not block; nil: it is not called.
	Rejected func(pki.Reject)
	// Output is called with an agent's answer to a request for a workload's output, and Gone with each session whose
	// stream has ended. Neither may block.
	Output func(s *roster.Session, chunk *nodev1.OutputChunk)
	Gone   func(s *roster.Session)
}

// Config of the server.
type Config struct {
	ReplicaID   string
	TrustDomain string
	TLS         *tls.Config
	Clock       *skew.Clock
	// JoinStates verifies the join state that an agent presents; nil: no stream is proven, see budgets.
	JoinStates *joinstate.Verifier
	// TaskKeys are sent to agents; nil: no list is sent.
	TaskKeys *KeyList
	// ServiceRoots are sent to agents; nil: no list is sent.
	ServiceRoots *RootList
	Limits       Limits
}

// Server of the agents' stream.
type Server struct {
	nodev1.UnimplementedNodeServiceServer

	deps      Deps
	cfg       Config
	lim       Limits
	grpc      *grpc.Server
	validate  protovalidate.Validator
	budgets   *budgets
	profiles  *profileBook
	admission *admission.Admission
	opening   atomic.Int64 // openings that wait for recovery
	stormed   time.Time    // when more waited than is usual; of the loop of readies alone
	unseen    sync.Map     // node id to the *roster.Session that was admitted before the view had the node

	openings *batch.Batcher[*recoveryv1.OpenSession, *recoveryv1.OpenResult]
	confirms *batch.Batcher[*recoveryv1.ConfirmSession, *recoveryv1.ConfirmResult]
	readies  *batch.Batcher[*raising, *lifecyclev1.SessionReadyResult]
	reports  batch.Encoded // of readies
	keys     *batch.Batcher[*lifecyclev1.SessionKeys, bool]

	draining chan struct{}
	drainOne sync.Once
}

// New builds the server; nothing is served before Serve.
func New(deps Deps, cfg Config) (*Server, error) {
	v, err := protovalidate.New(protovalidate.WithMessages(&nodev1.ConnectRequest{}))
	if err != nil {
		return nil, fmt.Errorf("build validator: %w", err)
	}
	lim := config.Or(cfg.Limits, defaultLimits)
	cfg.Clock = cmp.Or(cfg.Clock, &skew.Clock{})
	cfg.TaskKeys, cfg.ServiceRoots = cmp.Or(cfg.TaskKeys, &KeyList{}), cmp.Or(cfg.ServiceRoots, &RootList{})
	s := &Server{
		deps: deps, cfg: cfg, lim: lim, validate: v, budgets: newBudgets(lim), profiles: newProfileBook(),
		draining: make(chan struct{}),
	}
	s.openings = batch.New(256, 2, s.openBatch).Gather(gatherFor).Yield(fillFor, s.fills)
	s.confirms = batch.New(256, 2, s.confirmBatch).Gather(gatherFor).Yield(fillFor, s.fills)
	s.readies = batch.New(256, 2, s.readyBatch).Gather(gatherFor).Yield(yieldFor, func(int) bool {
		return !s.deps.View.Fresh() || s.storms(time.Now())
	}).EvenFull().Failed(func(sessions int, err error) {
		s.deps.Logger.Warn("gates not raised", slog.Int("sessions", sessions), slog.Any("error", err))
	})
	s.keys = batch.New(256, 2, s.keysBatch)
	cfg.TaskKeys.notify(s.sendKeys)
	cfg.ServiceRoots.notify(s.sendRoots)
	s.admission = admission.New(func() time.Duration { return max(s.openings.Delay(), s.confirms.Delay()) },
		func() { s.deps.Metrics.Stalled() })
	refused := refusedHandshakes{logger: deps.Logger}
	creds := &transport{
		tls: cfg.TLS, trustDomain: cfg.TrustDomain, timeout: lim.Handshake, now: cfg.Clock.Now,
		onShed: s.shed, admission: s.admission,
		onReject: func(r pki.Reject) {
			deps.Metrics.TLSReject(string(r.Reason))
			if deps.Rejected != nil {
				deps.Rejected(r)
			}
			refused.log(r, wallclock.Now())
		},
	}
	s.grpc = grpc.NewServer(append(lim.Transport(), grpc.Creds(creds), grpc.InTapHandle(s.tap),
		grpc.StreamInterceptor(s.protect), grpc.WaitForHandlers(true))...)
	nodev1.RegisterNodeServiceServer(s.grpc, s)
	return s, nil
}

// tap is called for every stream before any resources are spent on it. It closes a connection that opens streams faster
// than any agent would.
func (s *Server) tap(ctx context.Context, _ *tap.Info) (context.Context, error) {
	info, err := connOf(ctx)
	if err != nil {
		return ctx, fault.ToGRPC(err, "")
	}
	if info.streams.frame(wallclock.Now(), s.lim.StreamsPerSecond) {
		return ctx, nil
	}
	if info.streams.frames == s.lim.StreamsPerSecond+1 {
		s.deps.Metrics.Refused(names.Of(commonv1.Reason_REASON_RATE_LIMITED))
		s.deps.Logger.InfoContext(ctx, "connection cut: it opens too many streams", slog.String("node_id", info.id.Name))
	}
	_ = info.conn.Close()
	return ctx, fault.ToGRPC(fault.New(commonv1.Reason_REASON_RATE_LIMITED, "this connection opens too many streams"), "")
}

// protect recovers a panic in a handler, which then ends that stream alone.
func (s *Server) protect(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo,
	handler grpc.StreamHandler,
) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.deps.Logger.ErrorContext(ss.Context(), "stream handler panicked", slog.Any("panic", p),
				slog.String("stack", string(debug.Stack())))
			err = status.Error(codes.Internal, "internal error")
		}
	}()
	return handler(srv, ss)
}

// Serve accepts agents on lis until Stop.
func (s *Server) Serve(lis net.Listener) error {
	if err := s.grpc.Serve(&shedder{
		Listener: lis, limit: int64(s.lim.MaxConnections),
		onShed: s.shed,
	}); err != nil {
		return fmt.Errorf("serve agents: %w", err)
	}
	return nil
}

func (s *Server) shed() {
	s.deps.Metrics.Shed()
	s.admission.Shed()
}

// Crowded returns whether agents were turned away before TLS, or had to wait for the openings of others, since it was
// called last.
func (s *Server) Crowded() bool { return s.admission.TakeHeld() }

// Tasks returns the loops of the server, which its owner must run.
func (s *Server) Tasks() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"opens": s.openings.Run, "confirms": s.confirms.Run, "readies": s.readies.Run, "keys-of-agents": s.keys.Run,
		"profile-offers": s.offerProfiles,
	}
}

// Drain asks the agents to connect to another replica and waits until they have left or ctx ends.
func (s *Server) Drain(ctx context.Context, spread time.Duration) {
	s.drainOne.Do(func() { close(s.draining) })
	s.deps.Roster.Drain(ctx, spread)
}

// Stop ends the remaining streams and connections.
func (s *Server) Stop() {
	// Streams that have ended get up to a second in which their last frames reach the wire.
	timer := time.AfterFunc(time.Second, s.grpc.Stop)
	s.grpc.GracefulStop()
	timer.Stop()
	s.grpc.Stop()
	s.deps.Roster.Wait()
}

// Connect serves one stream.
func (s *Server) Connect(stream grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	info, err := connOf(stream.Context())
	if err != nil {
		return fault.ToGRPC(err, "")
	}
	if info.id.Kind != pki.KindNode || info.id.IsCanary() {
		return fault.ToGRPC(fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this port serves nodes"), "")
	}
	defer info.conn.Leave() // unless it was admitted
	now := wallclock.Now()
	who := payer{node: info.id.Name, serial: info.serial, source: sourceOf(info.conn.RemoteAddr().String())}
	who.often = pki.Life(info.leaf) < shortLife
	if n := s.deps.View.Get(who.node); n != nil && n.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		who.often = true
	}
	if wait := s.budgets.exhausted(who, now); wait > 0 {
		s.deps.Metrics.Opened("rate_limited")
		return s.refuse(stream, rateLimited(wait))
	}
	select {
	case <-s.draining:
		return s.refuse(stream, fault.New(commonv1.Reason_REASON_SERVER_DRAINING, "this replica is leaving",
			fault.RetryAfter(time.Second)))
	default:
	}
	ident := roster.Identity{
		NodeID: info.id.Name, Serial: info.serial, NotAfter: info.leaf.NotAfter,
		Life: pki.Life(info.leaf), Remote: info.conn.RemoteAddr().String(), Conn: info.conn,
	}
	maxAge := s.deps.Policy().GetStreamMaxAge().AsDuration()
	if now.Add(s.cfg.Clock.Offset()).After(ident.NotAfter) {
		return s.refuse(stream, fault.New(commonv1.Reason_REASON_CERTIFICATE_EXPIRED,
			"the certificate of this connection has run out"))
	}
	sess := s.deps.Roster.Add(ids.New(), ident, stream, now.Add(s.lim.FirstFrame), roster.RetireTime(now, maxAge))
	defer s.ended(sess)
	h := &handler{server: s, stream: stream, sess: sess, opening: &opening{leaf: info.leaf, who: who, conn: info.conn}}
	err = h.run(stream.Context())
	outcome := "ended"
	switch {
	case h.overBudget:
		outcome = "rate_limited"
	case err != nil:
		outcome = "refused"
	}
	s.deps.Metrics.Opened(outcome)
	return err
}

// ended forgets a session whose stream has ended.
func (s *Server) ended(sess *roster.Session) {
	s.deps.Roster.Remove(sess)
	s.unseen.CompareAndDelete(sess.Identity.NodeID, sess)
	s.deps.Gone(sess)
}

// refuse sends the agent the denial as a frame, and returns it as the stream's status.
func (s *Server) refuse(stream roster.Stream, err error) error {
	d := fault.ToDenial(err, "")
	s.deps.Metrics.Refused(names.Of(d.GetReason()))
	_ = stream.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: d}})
	return fault.ToGRPC(err, "")
}

func (s *Server) heartbeatAck(sess *roster.Session, sequence int64) *nodev1.ConnectResponse {
	return &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{
		Sequence: sequence, ServerTime: timestamppb.New(s.cfg.Clock.Now()), ProfileFingerprint: s.announcedProfile(sess),
	}}}
}

func (s *Server) challengeFrame(nonce []byte) *nodev1.ConnectResponse {
	return &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Challenge{Challenge: &nodev1.Challenge{
		Nonce: nonce, AnswerWithin: durationpb.New(s.lim.Challenge),
	}}}
}

var errHungUp = errors.New("the agent hung up")
