package nodeapitest

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/port"
)

// Backend implements in memory those parts of recovery and lifecycle that nodeapi calls. A node is known, and active,
// from its first Hello on. Set its hooks before it serves.
type Backend struct {
	recoveryv1connect.UnimplementedSessionServiceHandler

	Keys *joinstate.Keys
	// Deny refuses an open; Challenge asks for a signature instead of a welcome; each may be nil.
	Deny      func(*recoveryv1.OpenSession) *commonv1.Denial
	Challenge func(*recoveryv1.OpenSession) bool
	// Gate refuses to raise a gate; nil: never.
	Gate func(*lifecyclev1.SessionReady) *commonv1.Denial
	// Runs lists the workspaces that may run on the node of an accepted session; nil: no list is sent, as by an earlier
	// version.
	Runs func(*lifecyclev1.SessionReady) []*nodev1.WorkspaceEpoch
	// Stop lists the tasks that the agent of an accepted session must stop; nil: none.
	Stop func(*lifecyclev1.SessionReady) []*nodev1.TaskRef
	// Report is called before reports are acknowledged, and fails the call by returning an error; nil: all are
	// acknowledged.
	Report func(*lifecyclev1.ReportTasksRequest) error
	// Refuse refuses the report of one result; nil: none.
	Refuse func(*nodev1.TaskResult) *lifecyclev1.TaskRefusal
	// Renew returns renewals; nil: they fail.
	Renew func(*recoveryv1.RenewCertificateRequest) (*recoveryv1.RenewCertificateResponse, error)
	// Correlation is that of the recovery action that brought the certificate of each session; empty: none did.
	Correlation string

	services []*port.Server

	mu         sync.Mutex
	nodes      map[string]*recoveryv1.NodeAuthority
	replaced   map[string]string // session → the nonce that its Hello named
	sequence   int64
	watchers   map[*watcher]struct{}
	profiles   *recoveryv1.AuthorityProfiles // nil: none are sent
	silent     bool
	issuers    *recoveryv1.AuthorityIssuers
	rpcs       map[string]int
	challenges []*recoveryv1.ReportChallengeRequest
	opened     []*recoveryv1.OpenSession
	readies    []*lifecyclev1.SessionReady
	reports    []*lifecyclev1.NodeReport
	held       map[string][]string // session → keys of tasks
	work       map[string][]*lifecyclev1.LeasedTask
	hints      map[chan *lifecyclev1.WatchWorkResponse]struct{}
}

type watcher struct {
	frames []*recoveryv1.WatchAuthorityResponse
	wake   chan struct{}
}

// NewBackend makes a plane without nodes.
func NewBackend() (*Backend, error) {
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, fmt.Errorf("make join state key: %w", err)
	}
	keys, err := joinstate.NewKeys(private)
	if err != nil {
		return nil, fmt.Errorf("make join state keys: %w", err)
	}
	return &Backend{
		Keys: keys, nodes: map[string]*recoveryv1.NodeAuthority{}, replaced: map[string]string{},
		watchers: map[*watcher]struct{}{}, rpcs: map[string]int{},
		held: map[string][]string{},
		work: map[string][]*lifecyclev1.LeasedTask{}, hints: map[chan *lifecyclev1.WatchWorkResponse]struct{}{},
	}, nil
}

// Listen opens the internal ports of both services and returns their addresses.
//
//nolint:nonamedreturns // two addresses
func (p *Backend) Listen(ctx context.Context, logger *slog.Logger, services *Authority) (recovery, lifecycle string,
	err error,
) {
	roots, err := services.Bundle()
	if err != nil {
		return "", "", err
	}
	public, err := p.Keys.Public()
	if err != nil {
		return "", "", err
	}
	open := func(name string, mount func(*port.Server) error) (string, error) {
		store, err := services.Service(name)
		if err != nil {
			return "", err
		}
		srv, err := port.New(ctx, port.Deps{Logger: logger, Persons: assertion.NewVerifier(public, nil)},
			port.Config{
				Name: name, Addr: "127.0.0.1:0", MaxReadBytes: 8 << 20,
				TLS: pki.ServerConfig{
					Store: store, TrustDomain: TrustDomain,
					Clients: []pki.Trust{{Kind: pki.KindService, Bundle: roots}},
				},
			})
		if err != nil {
			return "", fmt.Errorf("open port of %s: %w", name, err)
		}
		p.services = append(p.services, srv)
		return srv.Addr().String(), mount(srv)
	}
	recovery, err = open("recovery", func(s *port.Server) error {
		return s.Mount(recoveryv1connect.NewSessionServiceHandler(p, s.HandlerOptions()...))
	})
	if err != nil {
		return "", "", err
	}
	lifecycle, err = open("lifecycle", func(s *port.Server) error {
		path, h := lifecyclev1connect.NewGateServiceHandler(gates{backend: p}, s.HandlerOptions()...)
		err := s.Mount(path, h)
		path, h = lifecyclev1connect.NewTaskServiceHandler(tasks{backend: p}, s.HandlerOptions()...)
		return errors.Join(err, s.Mount(path, h))
	})
	return recovery, lifecycle, err
}

// Run serves until ctx ends.
func (p *Backend) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make([]error, len(p.services))
	for i, s := range p.services {
		wg.Go(func() { errs[i] = s.Run(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (p *Backend) count(name string) {
	p.rpcs[name]++
}

// Calls returns how often each method was called.
func (p *Backend) Calls() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.rpcs)
}

// node returns the record of a node, and creates it at the first call for it. The caller holds p.mu.
func (p *Backend) node(nodeID, instanceID string) *recoveryv1.NodeAuthority {
	n := p.nodes[nodeID]
	if n == nil {
		n = &recoveryv1.NodeAuthority{
			NodeId: nodeID, NodeInstanceId: instanceID, State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
			FenceEpoch: 1,
		}
		p.nodes[nodeID] = n
	}
	return n
}

// OpenSessions returns for each Hello a welcome and the next generation, unless a hook refuses or challenges it.
func (p *Backend) OpenSessions(_ context.Context,
	req *recoveryv1.OpenSessionsRequest,
) (*recoveryv1.OpenSessionsResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("OpenSessions")
	res := &recoveryv1.OpenSessionsResponse{ServerTime: timestamppb.Now(), ProfileFingerprint: "profile"}
	for _, s := range req.GetSessions() {
		p.opened = append(p.opened, s)
		n := p.node(s.GetNodeId(), s.GetNodeInstanceId())
		out := &recoveryv1.OpenResult{SessionId: s.GetSessionId(), FenceEpoch: n.GetFenceEpoch()}
		res.Results = append(res.Results, out)
		if p.Deny != nil {
			if out.Denial = p.Deny(s); out.GetDenial() != nil {
				out.Verdict = recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED
				continue
			}
		}
		if p.Challenge != nil && p.Challenge(s) {
			out.Verdict = recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE
			continue
		}
		n.Issued++
		p.replaced[s.GetSessionId()] = s.GetReplacesNonce()
		join, err := p.Keys.Sign(joinstate.State{
			NodeID: s.GetNodeId(), NodeInstanceID: s.GetNodeInstanceId(),
			Generation: n.GetIssued(), Serial: s.GetSerial(),
		})
		if err != nil {
			return nil, err
		}
		out.Verdict, out.Generation, out.JoinState = recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME, n.GetIssued(), join
	}
	return res, nil
}

// ConfirmSessions counts Ready.
func (p *Backend) ConfirmSessions(_ context.Context,
	req *recoveryv1.ConfirmSessionsRequest,
) (*recoveryv1.ConfirmSessionsResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("ConfirmSessions")
	res := &recoveryv1.ConfirmSessionsResponse{ServerTime: timestamppb.Now()}
	for _, s := range req.GetSessions() {
		n := p.node(s.GetNodeId(), s.GetNodeInstanceId())
		out := &recoveryv1.ConfirmResult{SessionId: s.GetSessionId(), Admitted: s.GetGeneration() == n.GetIssued()}
		res.Results = append(res.Results, out)
		if !out.GetAdmitted() {
			out.Denial = &commonv1.Denial{Reason: commonv1.Reason_REASON_SESSION_SUPERSEDED, Action: commonv1.Action_ACTION_WAIT}
			continue
		}
		out.SupersededSessionId, out.CorrelationId = n.GetConfirmedSessionId(), p.Correlation
		next := proto.CloneOf(n)
		next.Confirmed, next.ConfirmedSessionId, next.CurrentSerial = s.GetGeneration(), s.GetSessionId(), s.GetSerial()
		next.ReplacedNonce = p.replaced[s.GetSessionId()]
		delete(p.replaced, s.GetSessionId())
		p.change(next)
	}
	return res, nil
}

// change gives a node the next number in the order of decisions and notifies the watchers. The caller holds p.mu.
func (p *Backend) change(n *recoveryv1.NodeAuthority) {
	p.sequence++
	n.Sequence = p.sequence
	p.nodes[n.GetNodeId()] = n
	for w := range p.watchers {
		w.put(&recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Delta{Delta: proto.CloneOf(n)}})
	}
}

// Change applies decide to the record of a node and publishes the result.
func (p *Backend) Change(nodeID string, decide func(*recoveryv1.NodeAuthority)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := proto.CloneOf(p.node(nodeID, ""))
	decide(n)
	p.change(n)
}

// SendIssuers has replicas sent the roots of authorities, now and when they subscribe.
func (p *Backend) SendIssuers(roots ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.issuers = &recoveryv1.AuthorityIssuers{Certificates: roots}
	for w := range p.watchers {
		w.put(issuersFrame(p.issuers))
	}
}

func issuersFrame(frame *recoveryv1.AuthorityIssuers) *recoveryv1.WatchAuthorityResponse {
	return &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Issuers{Issuers: frame}}
}

// Silence stops the answers to pings (on), or resumes them. Without answers a replica's view goes stale.
func (p *Backend) Silence(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = on
}

// Challenges returns the reported outcomes of challenges.
func (p *Backend) Challenges() []*recoveryv1.ReportChallengeRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.challenges)
}

// Opened returns the opens that were asked for.
func (p *Backend) Opened() []*recoveryv1.OpenSession {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.opened)
}

// Readies returns the sessions that raised a gate.
func (p *Backend) Readies() []*lifecyclev1.SessionReady {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.readies)
}

// Held returns the keys of tasks that the agent of a session reported in its middle.
func (p *Backend) Held(sessionID string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.held[sessionID])
}

// Reports returns the reports of tasks.
func (p *Backend) Reports() []*lifecyclev1.NodeReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.reports)
}

// Forget drops the recorded calls, which a bench with many agents does not need.
func (p *Backend) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opened, p.readies, p.reports = nil, nil, nil
}

// Queue queues tasks to be leased to a node. With hint, replicas are sent a hint of them.
func (p *Backend) Queue(nodeID string, hint bool, tasks ...*lifecyclev1.LeasedTask) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.work[nodeID] = append(p.work[nodeID], tasks...)
	if hint {
		p.hintLocked(&lifecyclev1.WatchWorkResponse{NodeIds: []string{nodeID}})
	}
}

// Cancel asks to stop a task.
func (p *Backend) Cancel(c *lifecyclev1.TaskCancelHint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hintLocked(&lifecyclev1.WatchWorkResponse{Cancels: []*lifecyclev1.TaskCancelHint{c}})
}

func (p *Backend) hintLocked(m *lifecyclev1.WatchWorkResponse) {
	for ch := range p.hints {
		select {
		case ch <- m:
		default:
		}
	}
}

// Task makes an offer for a node. Its envelope is not signed: nodeapi carries it and does not read it.
func Task(nodeID string, bytes int) *lifecyclev1.LeasedTask {
	ref := &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}
	return &lifecyclev1.LeasedTask{
		NodeId: nodeID,
		Offer:  &nodev1.TaskOffer{Envelope: make([]byte, bytes), CorrelationId: ref.GetTaskId()}, Task: ref,
	}
}
