package session_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/agenttest"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
)

// pipe is a listener without a network, so that a bubble's clock can move.
type pipe struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipe() *pipe { return &pipe{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipe) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipe) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipe) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

func (p *pipe) dial(ctx context.Context, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fakeServer is a control plane with the table of join states and serials, as small as it can be. It raises an alarm
// where the real one would.
type fakeServer struct {
	nodev1.UnimplementedNodeServiceServer
	t       *testing.T
	nodes   *agenttest.Authority
	service *agenttest.Authority
	pipe    *pipe
	server  *grpc.Server
	nodeID  string
	ttl     time.Duration
	// backdate is how far before its issue a certificate begins.
	backdate time.Duration

	mu                 sync.Mutex
	issued, confirmed  int64
	current, next      string // serials
	byKey              map[string][]byte
	alarms             []string
	opens              []open
	sessions           []*visit
	beats              int
	frames             []string
	results            map[string]int
	closed             int
	script             func(v *visit) error // nil: normal
	dropIssued         int                  // replies to renewals that are lost
	denyRenewal        *commonv1.Denial
	firstKeyIsForeign  bool   // the first key that a renewal names certifies another node
	foreignKey         string // that key
	supersedeNextCerts bool
	interval           time.Duration
	taskPubkeys        string // that the reply to an enrolment has
	refuse             error  // with which handshakes are ended
	closer             func() // of the server that takes this one's place
}

type open struct {
	at       time.Time
	hello    *nodev1.Hello
	serial   string
	admitted bool
}

// visit is one stream.
type visit struct {
	*fakeServer
	n      int
	stream grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]
	sendMu sync.Mutex
	hello  *nodev1.Hello
	leaf   *x509.Certificate
	serial string
	nonce  string
}

func newFakeServer(t *testing.T) *fakeServer {
	t.Helper()
	p := &fakeServer{
		t: t, pipe: newPipe(), nodeID: ids.New(), ttl: 8 * time.Hour, byKey: map[string][]byte{},
		results: map[string]int{}, interval: 10 * time.Second,
	}
	var err error
	if p.nodes, err = agenttest.NewAuthority("nodes", time.Now()); err != nil {
		t.Fatal(err)
	}
	if p.service, err = agenttest.NewAuthority("services", time.Now()); err != nil {
		t.Fatal(err)
	}
	p.serve("nodeapi")
	return p
}

func (p *fakeServer) serve(name string) {
	pair, err := p.service.Pair(pki.ServiceID(agenttest.TrustDomain, name), time.Now().Add(-47*time.Hour),
		time.Now().Add(900*time.Hour))
	if err != nil {
		p.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(p.nodes.Cert)
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*pair}, ClientAuth: tls.RequireAndVerifyClientCert,
		ClientCAs:              pool,
		SessionTicketsDisabled: true,
		VerifyConnection: func(tls.ConnectionState) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.refuse
		},
	}
	p.server = grpc.NewServer(grpc.Creds(credentials.NewTLS(config)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}))
	nodev1.RegisterNodeServiceServer(p.server, p)
	listener, server := p.pipe, p.server
	go func() { _ = server.Serve(listener) }()
}

// cert issues a certificate that the server treats as current.
func (p *fakeServer) cert() *tls.Certificate {
	p.t.Helper()
	pair, err := p.nodes.Pair(pki.NodeID(agenttest.TrustDomain, p.nodeID), time.Now().Add(-p.backdate),
		time.Now().Add(p.ttl))
	if err != nil {
		p.t.Fatal(err)
	}
	p.current = pki.SerialString(pair.Leaf.SerialNumber)
	return pair
}

func (p *fakeServer) Connect(stream grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	from, _ := peer.FromContext(stream.Context())
	info, _ := from.AuthInfo.(credentials.TLSInfo)
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	v := &visit{
		fakeServer: p, stream: stream, hello: first.GetHello(), leaf: info.State.PeerCertificates[0],
		nonce: ids.New(),
	}
	v.serial = pki.SerialString(v.leaf.SerialNumber)
	p.mu.Lock()
	v.n = len(p.opens)
	p.opens = append(p.opens, open{at: time.Now(), hello: v.hello, serial: v.serial})
	script := p.script
	p.mu.Unlock()
	if v.hello.GetNodeId() != p.nodeID {
		p.alarm("hello of another node")
	}
	defer func() {
		p.mu.Lock()
		p.closed++
		p.mu.Unlock()
	}()
	if script != nil {
		return script(v)
	}
	return v.normal()
}

func (p *fakeServer) alarm(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alarms = append(p.alarms, what)
}

func (v *visit) send(frame *nodev1.ConnectResponse) error {
	v.sendMu.Lock()
	defer v.sendMu.Unlock()
	return v.stream.Send(frame)
}

func (v *visit) deny(err error) error {
	return v.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: fault.ToDenial(err, "")}})
}

func (v *visit) normal() error {
	generation, err := v.issue()
	if err != nil {
		return v.deny(err)
	}
	if err := v.welcome(generation); err != nil {
		return err
	}
	if err := v.ready(generation); err != nil {
		return err
	}
	if err := v.admit(generation); err != nil {
		return err
	}
	return v.run()
}

// issue decides as OpenSession's table of join states and serials does.
func (v *visit) issue() (int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.serial != v.current && v.serial != v.next {
		return 0, fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED, "")
	}
	presented := int64(len(v.hello.GetJoinState())) // the fake's join state is as long as its generation
	if (presented < v.confirmed) || presented > v.issued {
		v.alarms = append(v.alarms, "generation out of range")
		return 0, fault.New(commonv1.Reason_REASON_IDENTITY_HELD, "")
	}
	v.issued++
	return v.issued, nil
}

func (v *visit) welcome(generation int64) error {
	return v.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Welcome{Welcome: &nodev1.Welcome{
		Generation: generation, JoinState: make([]byte, generation), Nonce: v.nonce, SessionId: ids.New(),
		ServerTime: timestamppb.Now(),
		Policy:     &commonv1.NodePolicy{HeartbeatInterval: durationpb.New(v.interval)},
	}}})
}

func (v *visit) ready(generation int64) error {
	frame, err := v.stream.Recv()
	if err == nil && frame.GetHeartbeat() != nil { // of a host whose clock is off
		frame, err = v.stream.Recv()
	}
	if err != nil {
		return err
	}
	if frame.GetReady().GetGeneration() != generation {
		v.alarm("not Ready after Welcome")
		return errors.New("no ready")
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if generation != v.issued {
		return errors.New("an older generation")
	}
	v.confirmed = generation
	if v.serial == v.next {
		v.current, v.next = v.next, ""
	}
	return nil
}

func (v *visit) admit(generation int64) error {
	v.mu.Lock()
	v.opens[v.n].admitted = true
	v.sessions = append(v.sessions, v)
	v.mu.Unlock()
	return v.send(
		&nodev1.ConnectResponse{
			Frame: &nodev1.ConnectResponse_Admitted{
				Admitted: &nodev1.Admitted{Generation: generation, ServerTime: timestamppb.Now()},
			},
		},
	)
}

func (v *visit) run() error {
	for {
		frame, err := v.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := v.on(frame); err != nil {
			return err
		}
	}
}

func (v *visit) note(what string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.frames = append(v.frames, what)
}

func (v *visit) on(frame *nodev1.ConnectRequest) error {
	switch f := frame.GetFrame().(type) {
	case *nodev1.ConnectRequest_ProfileAnswer:
		v.note("profile answer " + f.ProfileAnswer.GetFingerprint())
	case *nodev1.ConnectRequest_Heartbeat:
		v.mu.Lock()
		v.beats++
		v.mu.Unlock()
		return v.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{
			Sequence: f.Heartbeat.GetSequence(), ServerTime: timestamppb.Now(), ProfileFingerprint: "f",
		}}})
	case *nodev1.ConnectRequest_TaskResult:
		v.note("result " + f.TaskResult.GetTask().GetTaskId())
		v.mu.Lock()
		v.results[f.TaskResult.GetTask().GetTaskId()]++
		v.mu.Unlock()
		return v.send(
			&nodev1.ConnectResponse{
				Frame: &nodev1.ConnectResponse_TaskResultAck{
					TaskResultAck: &nodev1.TaskResultAck{Tasks: []*nodev1.TaskRef{f.TaskResult.GetTask()}},
				},
			},
		)
	case *nodev1.ConnectRequest_RenewRequest:
		return v.onRenew(f.RenewRequest)
	case *nodev1.ConnectRequest_CertificateStored:
		v.note("stored")
	case *nodev1.ConnectRequest_Goodbye:
		v.note("goodbye")
	case *nodev1.ConnectRequest_TaskDelivered:
		v.note("delivered")
	case *nodev1.ConnectRequest_TaskStarted:
		v.note("started")
	}
	return nil
}

func (v *visit) onRenew(request *nodev1.RenewRequest) error {
	v.mu.Lock()
	answer := &nodev1.CertificateIssued{RequestId: request.GetRequestId()}
	csr, err := x509.ParseCertificateRequest(request.GetCsr())
	if err != nil {
		v.mu.Unlock()
		return err
	}
	key := string(csr.RawSubjectPublicKeyInfo)
	if v.firstKeyIsForeign && v.foreignKey == "" {
		v.foreignKey = key
	}
	if v.foreignKey == key {
		answer.Denied = fault.ToDenial(fault.New(commonv1.Reason_REASON_KEY_REUSE, ""), "")
	} else if v.denyRenewal != nil {
		answer.Denied = v.denyRenewal
	} else {
		chain := v.byKey[key]
		if chain == nil {
			if chain, err = v.nodes.SignCSR(request.GetCsr(), v.nodeID, time.Now().Add(-v.backdate),
				time.Now().Add(v.ttl)); err != nil {
				v.mu.Unlock()
				return err
			}
			v.byKey[key] = chain
			certs, _ := pki.DecodeCertificates(chain)
			v.next = pki.SerialString(certs[0].SerialNumber)
			if v.supersedeNextCerts {
				v.next = "none"
			}
		}
		answer.CertificateChainPem = chain
	}
	drop := v.dropIssued > 0
	if drop {
		v.dropIssued--
	}
	v.mu.Unlock()
	v.note("renew")
	if drop {
		return nil
	}
	return v.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_CertificateIssued{CertificateIssued: answer}})
}

func (v *visit) challenge() error {
	nonce := []byte("0123456789abcdef0123456789abcdef")
	if err := v.send(
		&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Challenge{Challenge: &nodev1.Challenge{Nonce: nonce}}},
	); err != nil {
		return err
	}
	frame, err := v.stream.Recv()
	if err != nil {
		return err
	}
	if err := joinstate.VerifyChallenge(v.leaf.PublicKey, nonce, v.nodeID,
		frame.GetChallengeAnswer().GetSignature()); err != nil {
		v.alarm(err.Error())
		return err
	}
	v.note("challenge answered")
	return nil
}
