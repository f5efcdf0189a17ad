package reconnect

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/session/memory"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/tasktypes"
)

// reach opens a connection to one of the addresses, as a balancer of connections before the replicas would.
func (l *load) reach(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", l.cfg.Addrs[rand.IntN(len(l.cfg.Addrs))])
}

// startAgent starts an agent: the product's session with its defaults, and an identity in memory. It executes probes.
func startAgent(ctx context.Context, l *load, n node, p *place) error {
	cert, err := tls.X509KeyPair(n.Chain, n.Key)
	if err != nil {
		return fmt.Errorf("read certificate: %w", err)
	}
	roots, err := pki.LoadBundle(l.fleet.Roots)
	if err != nil {
		return fmt.Errorf("read roots: %w", err)
	}
	keys, err := pki.ParseKeySet(l.fleet.TaskKeys)
	if err != nil {
		return fmt.Errorf("read task keys: %w", err)
	}
	a := &agent{place: p, node: n, keys: keys}
	facts := host(n.Name, n.ID)
	a.client, err = session.New(session.Deps{
		Logger: slog.New(slog.DiscardHandler), Clock: clock.New(0), Roots: roots,
		Endpoint: func() (string, error) { return l.fleet.APIHost, nil },
		Identity: memory.New(identity.Node{
			NodeID: n.ID, InstanceID: n.Instance, TrustDomain: l.fleet.TrustDomain,
		}, &cert).WithTaskKeys(keys),
		Dial: func(ctx context.Context, _ string) (net.Conn, error) {
			p.dial()
			return l.reach(ctx)
		},
		Hooks: session.Hooks{
			Hello: func(h *nodev1.Hello) {
				h.LedgerId, h.BootId, h.AgentVersion = n.Instance, n.ID, l.fleet.Version
				h.Host, h.Profile, h.TaskTypes = facts, l.fleet.Profile, tasktypes.Queued()
			},
			Admitted: func(context.Context, int64) { p.isBack() },
			Offer:    a.offer,
		},
	}, session.Config{})
	if err != nil {
		return err
	}
	l.wg.Go(func() { _ = a.client.Run(ctx) }) // one that ends is not back
	return nil
}

// agent is one light agent. It has no ledger: it sends the result of a probe once.
type agent struct {
	place  *place
	node   node
	keys   *pki.KeySet
	client *session.Client
}

// offer executes a probe. Every other task is left alone: nothing is placed on these nodes.
func (a *agent) offer(_ context.Context, offer *nodev1.TaskOffer) {
	task, err := envelope.Verify(a.keys, offer.GetEnvelope(), offer.GetSignature(), offer.GetKeyId())
	if err != nil || task.Type != names.Of(commonv1.TaskType_TASK_TYPE_PROBE_NOOP) {
		return
	}
	now := timestamppb.Now()
	var probe nodev1.ProbeNoop
	if proto.Unmarshal(task.Payload, &probe) != nil {
		return
	}
	output, err := proto.Marshal(&nodev1.ProbeNoopOutput{Nonce: probe.GetNonce(), AgentTime: now, BootId: a.node.ID})
	if err != nil {
		return
	}
	_ = a.client.Result(&nodev1.TaskResult{ // lost with the session: the probe is offered again
		Task:  &nodev1.TaskRef{TaskId: task.TaskID, Attempt: task.Attempt},
		State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: output, StartedAt: now, FinishedAt: now,
	})
}
