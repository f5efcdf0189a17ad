package reconnect

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
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
func (p *place) reach(ctx context.Context) (net.Conn, error) {
	p.dialled.Store(time.Now().UnixNano())
	p.tries.Add(1)
	var d net.Dialer
	return d.DialContext(ctx, "tcp", p.addrs[rand.IntN(len(p.addrs))])
}

// startAgent starts an agent: the product's session with its defaults, and an identity in memory. It executes probes.
func startAgent(ctx context.Context, n node, p *place) error {
	fleet := p.fleet
	cert, err := tls.X509KeyPair(n.Chain, n.Key)
	if err != nil {
		return fmt.Errorf("read certificate: %w", err)
	}
	roots, err := pki.LoadBundle(fleet.Roots)
	if err != nil {
		return fmt.Errorf("read roots: %w", err)
	}
	keys, err := pki.ParseKeySet(fleet.TaskKeys)
	if err != nil {
		return fmt.Errorf("read task keys: %w", err)
	}
	a := &agent{node: n, keys: keys}
	facts := host(n.Name, n.ID)
	a.client, err = session.New(session.Deps{
		Logger: slog.New(slog.DiscardHandler), Clock: clock.New(0), Roots: roots,
		Endpoint: func() (string, error) { return fleet.APIHost, nil },
		Identity: memory.New(identity.Node{
			NodeID: n.ID, InstanceID: n.Instance, TrustDomain: fleet.TrustDomain,
		}, &cert).WithTaskKeys(keys),
		Record: func(_ context.Context, d session.Diagnostic) (diag.Entry, error) {
			p.failedWith(d.Detail)
			return diag.Entry{}, nil
		},
		Dial: func(ctx context.Context, _ string) (net.Conn, error) { return p.reach(ctx) },
		Hooks: session.Hooks{
			Hello: func(h *nodev1.Hello) {
				h.LedgerId, h.BootId, h.AgentVersion = n.Instance, n.ID, fleet.Version
				h.Host, h.Profile, h.TaskTypes = facts, fleet.Profile, tasktypes.Queued()
			},
			Admitted: func(context.Context, int64) { p.isBack() },
			RunList:  func(context.Context, *nodev1.RunList) { p.worked.Store(time.Now().UnixNano()) },
			Offer:    a.offer,
		},
	}, session.Config{})
	if err != nil {
		return err
	}
	p.load.wg.Go(func() { _ = a.client.Run(ctx) }) // one that ends is not back
	return nil
}

// agent is one light agent. It has no ledger: it sends the result of a probe once.
type agent struct {
	node   node
	keys   *pki.KeySet
	client *session.Client
}

// offer executes a probe. Every other task is left alone: nothing is placed on these nodes.
func (a *agent) offer(offer *nodev1.TaskOffer) error {
	task, err := envelope.Verify(a.keys, offer.GetEnvelope(), offer.GetSignature(), offer.GetKeyId())
	if err != nil || task.Type != names.Of(commonv1.TaskType_TASK_TYPE_PROBE_NOOP) {
		return err
	}
	now := timestamppb.Now()
	var probe nodev1.ProbeNoop
	if err := proto.Unmarshal(task.Payload, &probe); err != nil {
		return err
	}
	output, err := proto.Marshal(&nodev1.ProbeNoopOutput{Nonce: probe.GetNonce(), AgentTime: now, BootId: a.node.ID})
	if err != nil {
		return err
	}
	return a.client.Result(&nodev1.TaskResult{ // lost with the session: the probe is offered again
		Task:  &nodev1.TaskRef{TaskId: task.TaskID, Attempt: task.Attempt},
		State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: output, StartedAt: now, FinishedAt: now,
	})
}
