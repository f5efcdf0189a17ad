// Package authority keeps a replica's view of recovery's decisions about nodes: which are fenced, which serials count,
// which generation is confirmed.
//
// The view is trusted under a lease of 1.5 s from the moment a ping was sent, by the monotonic clock. The lease is
// shorter than the time it takes to notice that a view has gone stale. While the lease has lapsed no task may be
// offered and no result acknowledged. Deltas that came before a pong are applied before the lease is renewed, so the
// sessions of a node that was fenced meanwhile are closed before anything is sent to it again.
package authority

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/services/nodeapi/reconnect"
)

// Stream is the client's end of WatchAuthority.
type Stream interface {
	Send(*recoveryv1.WatchAuthorityRequest) error
	Receive() (*recoveryv1.WatchAuthorityResponse, error)
	CloseRequest() error
	CloseResponse() error
}

// Config of the view. Zero fields take the defaults.
type Config struct {
	ReplicaID string
	PingEvery time.Duration // default 500 ms
	Lease     time.Duration // default 1.5 s, from the send of the ping
	// RetiredFor is how long the view keeps a retired node, longer than any certificate lives; default 49 h. A node that
	// the view does not know is offered no work either.
	RetiredFor time.Duration
}

// View is one replica's view. Safe for concurrent use.
type View struct {
	cfg    Config
	logger *slog.Logger
	open   func(ctx context.Context) (Stream, error)

	// onChange is called in the order of the decisions, before the lease is renewed by a later pong.
	onChange func(*recoveryv1.NodeAuthority)
	// onProfiles is called with the valid versions of profiles, if recovery sends them.
	onProfiles atomic.Pointer[func(*recoveryv1.AuthorityProfiles)]
	// onIssuers is called as onChange; nil: the frames are passed over.
	onIssuers func(*recoveryv1.AuthorityIssuers)

	start   time.Time
	leaseTo atomic.Int64 // nanoseconds after start, monotonic

	mu       sync.RWMutex
	nodes    map[string]*recoveryv1.NodeAuthority
	retired  map[string]time.Time // when the view first had the node as retired
	forgotAt time.Time            // when forgetLocked ran last
	sequence int64
	fresh    chan struct{} // closed and replaced when the lease is renewed after a lapse
	lapsed   bool
}

var defaults = Config{PingEvery: 500 * time.Millisecond, Lease: 1500 * time.Millisecond, RetiredFor: 49 * time.Hour}

// New makes a view. onChange must not block.
func New(logger *slog.Logger, cfg Config, open func(ctx context.Context) (Stream, error),
	onChange func(*recoveryv1.NodeAuthority),
) *View {
	return &View{
		cfg: config.Or(cfg, defaults), logger: logger, open: open, onChange: onChange,
		start: time.Now(), nodes: map[string]*recoveryv1.NodeAuthority{}, retired: map[string]time.Time{},
		fresh: make(chan struct{}), lapsed: true,
	}
}

// OnProfiles registers f, which is called with the valid versions of profiles: once the view has its nodes, and after
// each change; with none if recovery is of a build that sends none. f must not block.
func (v *View) OnProfiles(f func(*recoveryv1.AuthorityProfiles)) { v.onProfiles.Store(&f) }

// OnIssuers has fn called with each frame of issuers. It must be called before Run, and fn must not block.
func (v *View) OnIssuers(fn func(*recoveryv1.AuthorityIssuers)) { v.onIssuers = fn }

// Fresh reports whether the view's lease stands, so that decisions may rest on the view.
func (v *View) Fresh() bool {
	return int64(time.Since(v.start)) < v.leaseTo.Load()
}

// WaitFresh waits until the view is fresh.
func (v *View) WaitFresh(ctx context.Context) error {
	for {
		v.mu.Lock()
		ok := v.Fresh()
		if !ok {
			v.lapsed = true
		}
		ch := v.fresh
		v.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Get returns recovery's last decision about a node; nil if the view has none.
func (v *View) Get(nodeID string) *recoveryv1.NodeAuthority {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.nodes[nodeID]
}

// MayDispatch reports whether a session may be offered work: the view is fresh, the node is active, and this is its
// confirmed session.
func (v *View) MayDispatch(nodeID, sessionID string, generation int64) bool {
	if !v.Fresh() {
		return false
	}
	n := v.Get(nodeID)
	return n != nil && n.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE &&
		n.GetConfirmed() == generation && n.GetConfirmedSessionId() == sessionID
}

// Run keeps the view until ctx ends, reconnecting with jitter.
func (v *View) Run(ctx context.Context) error {
	return reconnect.Keep(ctx, v.runOnce, func(failures int, err error) {
		v.logger.WarnContext(ctx, "authority view lost", slog.Int("failures", failures), slog.Any("error", err))
	})
}

func (v *View) runOnce(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := v.open(ctx)
	if err != nil {
		return fmt.Errorf("open authority watch: %w", err)
	}
	sub := &recoveryv1.WatchAuthorityRequest{Frame: &recoveryv1.WatchAuthorityRequest_Subscribe{
		Subscribe: &recoveryv1.AuthoritySubscribe{ReplicaId: v.cfg.ReplicaID},
	}}
	if err := stream.Send(sub); err != nil {
		return errors.Join(fmt.Errorf("subscribe to authority: %w", err), stream.CloseResponse())
	}
	pings := &pings{sent: map[int64]time.Time{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		v.ping(ctx, stream, pings, cancel)
		// The sending goroutine also ends the request: HTTP/2 does not look at ctx while it waits for the rest of a body, and
		// Receive would hang.
		_ = stream.CloseRequest()
	})
	defer func() {
		cancel(nil)
		wg.Wait()
		_ = stream.CloseResponse()
	}()
	snapshot := map[string]*recoveryv1.NodeAuthority{}
	whole, versions := false, false
	for {
		frame, err := stream.Receive()
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			return fmt.Errorf("receive authority: %w", err)
		}
		switch f := frame.GetFrame().(type) {
		case *recoveryv1.WatchAuthorityResponse_Snapshot:
			for _, n := range f.Snapshot.GetNodes() {
				snapshot[n.GetNodeId()] = n
			}
		case *recoveryv1.WatchAuthorityResponse_SnapshotEnd:
			v.replace(snapshot, f.SnapshotEnd.GetSequence())
			snapshot, whole = nil, true
		case *recoveryv1.WatchAuthorityResponse_Delta:
			v.apply(f.Delta)
		case *recoveryv1.WatchAuthorityResponse_Profiles:
			versions = true
			v.profiles(f.Profiles)
		case *recoveryv1.WatchAuthorityResponse_Issuers:
			if v.onIssuers != nil {
				v.onIssuers(f.Issuers)
			}
		case *recoveryv1.WatchAuthorityResponse_Pong:
			at, ok := pings.take(f.Pong.GetPingId())
			if ok && whole && !versions {
				// Recovery is of a build that knows no profiles, and of no node which one it has.
				versions = true
				v.profiles(&recoveryv1.AuthorityProfiles{})
			}
			if ok && whole {
				v.renew(at)
			}
		}
	}
}

func (v *View) profiles(sent *recoveryv1.AuthorityProfiles) {
	if notify := v.onProfiles.Load(); notify != nil {
		(*notify)(sent)
	}
}

type pings struct {
	mu   sync.Mutex
	next int64
	sent map[int64]time.Time
}

func (p *pings) add(now time.Time) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next++
	p.sent[p.next] = now
	return p.next
}

func (p *pings) take(id int64) (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, ok := p.sent[id]
	maps.DeleteFunc(p.sent, func(old int64, _ time.Time) bool { return old <= id })
	return at, ok
}

func (p *pings) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.sent)
}

// unanswered is how many pings may wait before the stream is given up: a connection that swallows frames must not hold
// the view for long.
const unanswered = 8

func (v *View) ping(ctx context.Context, stream Stream, p *pings, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(v.cfg.PingEvery)
	defer tick.Stop()
	for {
		if p.waiting() >= unanswered {
			cancel(errors.New("authority pings are not answered"))
			return
		}
		id := p.add(time.Now())
		err := stream.Send(
			&recoveryv1.WatchAuthorityRequest{
				Frame: &recoveryv1.WatchAuthorityRequest_Ping{Ping: &recoveryv1.AuthorityPing{PingId: id}},
			},
		)
		if err != nil {
			cancel(fmt.Errorf("ping authority: %w", err))
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// replace takes a whole snapshot. A node that it does not name is unknown afterwards, and no session of an unknown node
// may be offered work.
func (v *View) replace(nodes map[string]*recoveryv1.NodeAuthority, sequence int64) {
	v.mu.Lock()
	for id, n := range nodes {
		// A snapshot does not replace a later decision that was already received.
		if old := v.nodes[id]; old.GetSequence() > n.GetSequence() {
			nodes[id] = old
		}
	}
	v.nodes = nodes
	v.sequence = max(v.sequence, sequence)
	now := time.Now()
	maps.DeleteFunc(v.retired, func(id string, _ time.Time) bool { return nodes[id] == nil })
	for _, n := range nodes {
		v.retireLocked(n, now)
	}
	v.forgetLocked(now)
	all := slices.Collect(maps.Values(nodes))
	v.mu.Unlock()
	for _, n := range all {
		v.onChange(n)
	}
}

func (v *View) apply(n *recoveryv1.NodeAuthority) {
	v.mu.Lock()
	if old := v.nodes[n.GetNodeId()]; old != nil && old.GetSequence() >= n.GetSequence() {
		v.mu.Unlock()
		return
	}
	now := time.Now()
	v.nodes[n.GetNodeId()] = n
	v.sequence = max(v.sequence, n.GetSequence())
	v.retireLocked(n, now)
	v.forgetLocked(now)
	v.mu.Unlock()
	v.onChange(n)
}

// retireLocked notes when a node was first seen as retired, which is final.
func (v *View) retireLocked(n *recoveryv1.NodeAuthority, now time.Time) {
	if n.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		return
	}
	if _, ok := v.retired[n.GetNodeId()]; !ok {
		v.retired[n.GetNodeId()] = now
	}
}

// forgetLocked drops nodes that were retired longer than RetiredFor ago, at most once a minute. Without it a replica
// would keep every instance that was ever launched.
func (v *View) forgetLocked(now time.Time) {
	if now.Sub(v.forgotAt) < time.Minute {
		return
	}
	v.forgotAt = now
	for id, at := range v.retired {
		if now.Sub(at) > v.cfg.RetiredFor {
			delete(v.retired, id)
			delete(v.nodes, id)
		}
	}
}

func (v *View) renew(sentAt time.Time) {
	until := int64(sentAt.Sub(v.start) + v.cfg.Lease)
	for {
		old := v.leaseTo.Load()
		if until <= old {
			return
		}
		if v.leaseTo.CompareAndSwap(old, until) {
			break
		}
	}
	v.mu.Lock()
	if v.lapsed {
		v.lapsed = false
		close(v.fresh)
		v.fresh = make(chan struct{})
	}
	v.mu.Unlock()
}

// Health returns an error if the view is not fresh.
func (v *View) Health() error {
	if !v.Fresh() {
		return errors.New("recovery's authority view is stale")
	}
	return nil
}
