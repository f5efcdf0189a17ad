package streams

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/tasktypes"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// fleet is many agents in one process: each has a certificate, a connection and a stream of its own, and beats.
type fleet struct {
	nodes *nodeapitest.Authority
	roots *pki.Bundle

	mu     sync.Mutex
	agents []*agent
	beats  atomic.Int64 // acknowledged
	lost   atomic.Int64
	wg     sync.WaitGroup
}

type agent struct {
	cc     *grpc.ClientConn
	stream grpc.BidiStreamingClient[nodev1.ConnectRequest, nodev1.ConnectResponse]
	cancel context.CancelFunc
	timer  *time.Timer
	beaten atomic.Bool
}

// trust holds the authority of the agents' certificates, and the roots that they trust.
type trust struct{ Nodes, Services []byte }

func newFleet(t trust) (*fleet, error) {
	f := &fleet{}
	var err error
	if f.nodes, err = nodeapitest.DecodeAuthority(t.Nodes); err != nil {
		return nil, err
	}
	services, err := nodeapitest.DecodeAuthority(t.Services)
	if err != nil {
		return nil, err
	}
	f.roots, err = services.Bundle()
	return f, err
}

// connect brings n agents to addr, a few at a time. sessions determines whether they open one or only beat.
func (f *fleet) connect(ctx context.Context, addr string, n int, sessions bool, every time.Duration) error {
	const lanes = 48
	var group errgroup.Group
	group.SetLimit(lanes)
	for range n {
		group.Go(func() error { return f.one(ctx, addr, sessions, every) })
	}
	return group.Wait()
}

func (f *fleet) one(ctx context.Context, addr string, sessions bool, every time.Duration) error {
	id := ids.New()
	cert, err := f.nodes.Node(id)
	if err != nil {
		return fmt.Errorf("issue certificate: %w", err)
	}
	conf, err := pki.ClientTLS(pki.ClientConfig{Roots: f.roots, Server: pki.ServiceID(nodeapitest.TrustDomain, "nodeapi")})
	if err != nil {
		return fmt.Errorf("build TLS: %w", err)
	}
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	a := &agent{}
	a.cc, err = grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)),
		grpc.WithReadBufferSize(0), grpc.WithWriteBufferSize(4<<10),
		grpc.WithInitialWindowSize(session.Window), grpc.WithInitialConnWindowSize(session.Window), // as agents
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 15 * time.Second, Timeout: 10 * time.Second}))
	if err != nil {
		return fmt.Errorf("prepare connection: %w", err)
	}
	var life context.Context
	life, a.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if a.stream, err = nodev1.NewNodeServiceClient(a.cc).Connect(life); err != nil {
		return fmt.Errorf("open stream: %w", err)
	}
	if sessions {
		if err := a.open(id); err != nil {
			return err
		}
	}
	f.mu.Lock()
	f.agents = append(f.agents, a)
	f.mu.Unlock()
	f.wg.Go(func() { f.read(a) })
	f.beat(a, 1, every)
	return nil
}

// open goes from Hello to Admitted with facts as large as a real host's.
func (a *agent) open(id string) error {
	host := &commonv1.HostFacts{
		Hostname: "node-" + id, Kernel: "6.1.0-28-amd64", Os: "linux", Arch: "amd64", Cpus: 64, MemoryBytes: 512 << 30,
		MachineId: id, Addresses: []string{"10.0.0.1", "fd00::1"},
		Disks: []*commonv1.Disk{{Path: "/var/lib/gpuaas", FsType: "ext4", SizeBytes: 1 << 40, FreeBytes: 1 << 39}},
	}
	for i := range 8 {
		// eight devices
		host.Gpus = append(host.Gpus, &commonv1.Gpu{
			DeviceId: ids.New(), Index: int32(i), Model: "NVIDIA H100 80GB HBM3",
			MemoryBytes: 80 << 30, DriverVersion: "550.90.07",
		})
	}
	hello := &nodev1.Hello{
		NodeId: id, NodeInstanceId: ids.New(), BootId: ids.New(), LedgerId: ids.New(), AgentVersion: "v1.0.0",
		ProtocolVersion: 1, Host: host,
		TaskTypes: tasktypes.Queued(),
		Profile: &commonv1.ProfileFacts{
			Fingerprint: "f", ApiHost: "api.mesh.test", RecoveryHost: "recovery.mesh.test",
			Unit: "gpuaas-node-agent.service",
		},
	}
	if err := a.stream.Send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Hello{Hello: hello}}); err != nil {
		return fmt.Errorf("send Hello: %w", err)
	}
	for {
		frame, err := a.stream.Recv()
		if err != nil {
			return fmt.Errorf("open session: %w", err)
		}
		switch {
		case frame.GetWelcome() != nil:
			ready := &nodev1.ConnectRequest{
				Frame: &nodev1.ConnectRequest_Ready{Ready: &nodev1.Ready{Generation: frame.GetWelcome().GetGeneration()}},
			}
			if err := a.stream.Send(ready); err != nil {
				return fmt.Errorf("send Ready: %w", err)
			}
		case frame.GetAdmitted() != nil:
			return nil
		case frame.GetDenied() != nil:
			return fmt.Errorf("session denied: %s", frame.GetDenied().GetReason())
		}
	}
}

// beat sends the next heartbeat after a part of the interval that spreads the fleet.
func (f *fleet) beat(a *agent, sequence int64, every time.Duration) {
	after := every - every/8 + rand.N(every/4+1)
	if sequence == 1 {
		after = rand.N(every + 1)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	a.timer = time.AfterFunc(after, func() {
		if a.stream.Send(
			&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{Sequence: sequence}}},
		) == nil {
			f.beat(a, sequence+1, every)
		}
	})
}

func (f *fleet) read(a *agent) {
	for {
		frame, err := a.stream.Recv()
		if err != nil {
			if a.stream.Context().Err() == nil {
				f.lost.Add(1)
			}
			return
		}
		if frame.GetHeartbeatAck() != nil && a.beaten.CompareAndSwap(false, true) {
			f.beats.Add(1)
		}
	}
}

// status returns how many agents have had a heartbeat acknowledged, and fails if any lost its stream.
func (f *fleet) status() (int64, error) {
	if n := f.lost.Load(); n > 0 {
		return 0, fmt.Errorf("%d agents lost their stream", n)
	}
	return f.beats.Load(), nil
}

// leave ends all agents.
func (f *fleet) leave() error {
	f.mu.Lock()
	agents := f.agents
	f.agents = nil
	f.mu.Unlock()
	var errs []error
	for _, a := range agents {
		f.mu.Lock()
		a.timer.Stop()
		f.mu.Unlock()
		a.cancel()
		errs = append(errs, a.cc.Close())
	}
	f.wg.Wait()
	f.beats.Store(0)
	return errors.Join(errs...)
}
