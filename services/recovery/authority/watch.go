package authority

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	// snapshotPart is how many nodes one frame of a snapshot carries: well below the size of a message.
	snapshotPart = 500
	// pingsWaiting is how many pings of one watcher may wait for a poll; it sends two a second.
	pingsWaiting = 64
)

// Stream is the server's side of WatchAuthority.
type Stream interface {
	Receive() (*recoveryv1.WatchAuthorityRequest, error)
	Send(*recoveryv1.WatchAuthorityResponse) error
}

// watcher is one stream. Its frames are guarded by the poller's lock; wake signals that there are some.
type watcher struct {
	ctx     context.Context //nolint:containedctx // the life of the stream that this value is
	end     context.CancelCauseFunc
	replica string
	wake    chan struct{}
	frames  []*recoveryv1.WatchAuthorityResponse
	pings   int
	admits  bool // the snapshot has been queued: deltas may follow
}

// Watch serves one stream until it ends.
func (p *Poller) Watch(ctx context.Context, stream Stream) error {
	first, err := stream.Receive()
	if err != nil {
		return endOf(err)
	}
	if first.GetSubscribe() == nil {
		return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "the first frame subscribes")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &watcher{ctx: ctx, end: cancel, replica: first.GetSubscribe().GetReplicaId(), wake: make(chan struct{}, 1)}
	p.join(w)
	defer p.leave(w)
	// This goroutine sends and the other one receives. The other one's read ends when this method returns and the
	// transport closes the stream.
	received := make(chan error, 1)
	p.receivers.Go(func() { received <- p.receive(w, stream) })
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-received:
			return err
		}
		for _, frame := range p.taken(w) {
			if err := stream.Send(frame); err != nil {
				return endOf(err)
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
	}
}

func endOf(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// receive reads pings until the stream ends.
func (p *Poller) receive(w *watcher, stream Stream) error {
	for {
		frame, err := stream.Receive()
		if err != nil {
			return endOf(err)
		}
		if frame.GetPing() == nil {
			return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "only pings follow the subscription")
		}
		if err := p.ask(w, frame.GetPing().GetPingId()); err != nil {
			return err
		}
	}
}

// ask queues a ping for the next poll to begin.
func (p *Poller) ask(w *watcher, id int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.pings >= pingsWaiting {
		return fault.New(commonv1.Reason_REASON_RATE_LIMITED, "too many pings are waiting")
	}
	w.pings++
	p.waiting = append(p.waiting, ping{watcher: w, id: id})
	p.wakePoller()
	return nil
}

func (p *Poller) wakePoller() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

func (p *Poller) join(w *watcher) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watchers[w] = struct{}{}
	p.joining = append(p.joining, w)
	p.wakePoller()
}

func (p *Poller) leave(w *watcher) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.watchers, w)
	w.frames = nil
}

// admitLocked queues the snapshot.
func (p *Poller) admitLocked(w *watcher) {
	for part := range slices.Chunk(slices.Collect(maps.Values(p.nodes)), snapshotPart) {
		w.frames = append(w.frames, &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Snapshot{
			Snapshot: &recoveryv1.AuthoritySnapshotPart{Nodes: part},
		}})
	}
	w.admits = true
	p.offerLocked(w, &recoveryv1.WatchAuthorityResponse{
		Frame: &recoveryv1.WatchAuthorityResponse_SnapshotEnd{
			SnapshotEnd: &recoveryv1.AuthoritySnapshotEnd{Sequence: p.last},
		},
	})
	p.offerProfilesLocked(w)
	p.offerLocked(w, issuersFrame(p.issuers.frame)) // before a pong: a fresh view has them
	p.deps.Logger.DebugContext(w.ctx, "authority watcher joined", slog.String("replica_id", w.replica),
		slog.Int("nodes", len(p.nodes)))
}

// offerLocked queues a frame. A watcher whose queue is full is dropped, since its replica does not read.
func (p *Poller) offerLocked(w *watcher, frame *recoveryv1.WatchAuthorityResponse) {
	if _, here := p.watchers[w]; !here || !w.admits {
		return
	}
	if len(w.frames) >= p.cfg.Queue {
		delete(p.watchers, w)
		w.frames = nil
		w.end(fault.New(commonv1.Reason_REASON_SLOW_CONSUMER, ""))
		p.deps.Logger.WarnContext(w.ctx, "authority watcher dropped", slog.String("replica_id", w.replica))
		return
	}
	w.frames = append(w.frames, frame)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// taken removes and returns the queued frames.
func (p *Poller) taken(w *watcher) []*recoveryv1.WatchAuthorityResponse {
	p.mu.Lock()
	defer p.mu.Unlock()
	frames := w.frames
	w.frames = nil
	return frames
}
