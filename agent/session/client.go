package session

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/session/outbox"
	"github.com/gpuaas/mesh/agent/session/transport"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/stack"
)

// Client keeps one session open. It is safe for concurrent use; Run is called by one goroutine at a time.
type Client struct {
	*outbox.Reports // queues what the admitted session sends

	cfg    Config
	deps   Deps
	out    *outbox.Outbox
	retry  *backoff.Backoff // of opens without an answer; an admission resets it. Used by Run's goroutine alone
	denied *backoff.Backoff // of opens that the control plane answered with a refusal, likewise
	losses *backoff.Backoff // of sessions that ended soon after their admission; Run's goroutine alone
	route  *transport.Route
	events chan event
	ledger string // id for Hello where no hook sets one

	generation atomic.Int64 // of the admitted session; zero: none
}

// event is a CertificateIssued or a Reconnect frame that a reader passes to Run, or a request to open another session.
type event struct {
	conn      *conn
	issued    *nodev1.CertificateIssued
	reconnect *nodev1.Reconnect
	redial    bool
}

// New checks deps and returns a Client. It connects to nothing.
func New(deps Deps, cfg Config) (*Client, error) {
	if err := deps.validate(); err != nil {
		return nil, fmt.Errorf("session: %w", err)
	}
	cfg = cfg.WithDefaults()
	if cfg.Draw == nil {
		cfg.Draw = rand.Int64N
	}
	out := outbox.New(cfg.QueueLength, cfg.QueueBytes, cfg.Linger)
	return &Client{
		Reports: out.Reports, out: out,
		cfg: cfg, deps: deps, route: transport.NewRoute(deps.Lookup, deps.Dial, cfg.Draw),
		events: make(chan event, 16), ledger: ids.New(),
		retry: backoff.New(cfg.Backoff).WithDraw(cfg.Draw), denied: backoff.New(cfg.Backoff).WithDraw(cfg.Draw),
		losses: backoff.New(cfg.Backoff).WithDraw(cfg.Draw),
	}, nil
}

// Generation returns the generation of the admitted session; zero while there is none.
func (c *Client) Generation() int64 { return c.generation.Load() }

func (c *Client) jitter(bound time.Duration) time.Duration { return c.retry.Jitter(bound) }

func (c *Client) nodeID() string {
	node, _ := c.deps.Identity.Node()
	return node.NodeID
}

func (c *Client) observe(server *timestamppb.Timestamp, sent time.Time) {
	if server != nil {
		c.deps.Clock.Observe(server.AsTime(), sent)
	}
}

func (c *Client) send(ctx context.Context, e event) {
	select {
	case c.events <- e:
	case <-ctx.Done():
	}
}

// runner is the state of one Run. Only Run's goroutine touches it.
type runner struct {
	c         *Client
	active    *conn
	opening   bool
	again     bool // another session is to be opened after the one that is being opened
	flips     int  // changes to the other certificate after a refusal, since a session was admitted
	timeouts  int  // opens that timed out since a session was admitted
	refused   refusals
	rejected  []string // serials of the certificates that were refused since a session was admitted
	openTimer *time.Timer
	opened    chan openResult
	ended     chan *conn
	over      chan struct{} // closed when Run ends: replaced sessions drain no longer
	group     sync.WaitGroup
	renewal   renewal
}

type openResult struct {
	conn *conn
	err  error
}

// abandon closes the session that was admitted while Run was ending, if one was.
func (o openResult) abandon() {
	if o.conn != nil {
		o.conn.cancel(errGoodbye)
		_ = o.conn.cc.Close()
	}
}

// Run keeps a session open until ctx ends (then it sends Goodbye and returns nil), until the control plane tells the
// agent to stop (*StopError), or until none of the identity's certificates is accepted (*IdentityError). All of its
// goroutines have ended when it returns.
func (c *Client) Run(ctx context.Context) error {
	r := &runner{
		c: c, openTimer: time.NewTimer(0), opened: make(chan openResult, 1), ended: make(chan *conn, 4),
		over:    make(chan struct{}),
		renewal: newRenewal(c),
	}
	defer r.openTimer.Stop()
	defer r.renewal.timer.Stop()
	r.resumeFlip(ctx)
	err := r.loop(ctx)
	r.shutdown()
	return err
}

func (r *runner) loop(ctx context.Context) error {
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-r.openTimer.C:
			r.startOpen(ctx)
		case result := <-r.opened:
			r.opening = false
			if result.err != nil {
				err = r.failed(ctx, failure{
					err: result.err, cert: r.c.deps.Identity.Certificate(), waits: r.c.waitsAfter(result.err),
				})
			} else {
				r.promote(ctx, result.conn)
			}
			r.openedAgain()
		case k := <-r.ended:
			err = r.lost(ctx, k)
		case e := <-r.c.events:
			r.onEvent(ctx, e)
		case <-r.renewal.timer.C:
			r.renew(ctx)
		}
		if err != nil {
			return err
		}
	}
}

func (r *runner) startOpen(ctx context.Context) {
	if r.opening || ctx.Err() != nil {
		return
	}
	r.opening = true
	replaces := ""
	if r.active != nil {
		replaces = r.active.nonce
	}
	timeouts := r.timeouts
	r.group.Go(func() {
		stack.Grow()
		k, err := r.c.open(ctx, replaces, timeouts)
		r.opened <- openResult{k, err} // one open in flight, room for one
	})
}

// promote makes k the session that is offered work. The previous one drains.
func (r *runner) promote(ctx context.Context, k *conn) {
	old := r.active
	r.active, r.flips, r.timeouts = k, 0, 0
	r.refused, r.rejected = refusals{}, nil
	r.c.restartWaits()
	r.c.route.Admitted()
	r.c.generation.Store(k.generation)
	r.c.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "session admitted", slog.String("session_id", k.sessionID),
		slog.Int64("generation", k.generation), slog.Bool("hand_over", old != nil))
	if old != nil {
		r.c.losses.Reset() // the session stood until it was replaced
		close(old.retired)
		r.group.Go(func() { r.drain(old) })
	}
	r.c.out.SetOpen(true)
	r.group.Go(func() {
		k.serve()
		r.ended <- k // read by loop, and by shutdown until every session has ended
	})
	if err := r.c.deps.Identity.Confirm(k.cert.Leaf); err != nil {
		// Both tokens stay, and the next admission tries again.
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "recovery token not confirmed", slog.Any("error", err))
	}
	if hook := r.c.deps.Hooks.Admitted; hook != nil {
		hook(ctx, k.generation)
	}
	if hook := r.c.deps.Hooks.RunList; hook != nil && !k.lists {
		hook(ctx, nil)
	}
	r.renewal.arm(k.cert, 0)
	if r.renewal.flip {
		// A certificate was stored while this session opened with the previous one.
		r.useNext(ctx)
	}
}

// drain keeps a replaced session open until it has received the acknowledgements of its results, at most for Drain, and
// ends it.
func (r *runner) drain(k *conn) {
	end := time.NewTimer(r.c.cfg.Drain)
	defer end.Stop()
	const poll = 250 * time.Millisecond
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for quiet := 0; quiet < 4; {
		select {
		case <-k.ended:
			return
		case <-r.over:
			k.cancel(errGoodbye)
			return
		case <-end.C:
			k.cancel(errDrained)
			return
		case <-ticker.C:
			quiet++
			if k.unacknowledged() > 0 {
				quiet = 0
			}
		}
	}
	k.cancel(errDrained)
}

// lost handles the end of a session's stream.
func (r *runner) lost(ctx context.Context, k *conn) error {
	if k != r.active {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelDebug, "replaced session closed", slog.String("session_id", k.sessionID))
		return nil
	}
	r.active = nil
	r.c.generation.Store(0)
	r.c.out.SetOpen(false)
	r.renewal.pause()
	if hook := r.c.deps.Hooks.Lost; hook != nil {
		hook()
	}
	if time.Since(k.openedAt) >= r.c.cfg.StableAfter {
		r.c.losses.Reset()
	}
	err := cmp.Or(k.err, errStreamEnded)
	r.c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "session lost", slog.String("session_id", k.sessionID),
		slog.Any("error", err))
	if r.opening {
		return nil // its replacement is being opened already
	}
	return r.failed(ctx, failure{err: err, cert: k.cert, waits: r.c.losses})
}

func (r *runner) onEvent(ctx context.Context, e event) {
	switch {
	case e.redial:
		r.redial()
	case e.issued != nil:
		r.issued(ctx, e)
	case e.reconnect != nil && e.conn == r.active:
		spread := min(max(e.reconnect.GetSpread().AsDuration(), 0), 10*time.Minute)
		r.schedule(r.c.jitter(spread))
	}
}

func (r *runner) schedule(after time.Duration) { r.openTimer.Reset(after) }

// shutdown ends every session and waits for all goroutines that Run began. The admitted session sends Goodbye.
func (r *runner) shutdown() {
	c := r.c
	close(r.over)
	if r.active != nil {
		close(r.active.leaving)
		select {
		case <-r.active.ended:
		case <-time.After(c.cfg.Goodbye):
		}
		r.active.cancel(errGoodbye)
	}
	c.out.SetOpen(false)
	c.generation.Store(0)
	done := make(chan struct{})
	go func() { // ends with the group, which is waited for below
		r.group.Wait()
		close(done)
	}()
	for {
		select {
		case <-done:
			select {
			case result := <-r.opened: // it may have been ready together with done
				result.abandon()
			default:
			}
			return
		case result := <-r.opened:
			result.abandon()
		case k := <-r.ended:
			k.cancel(errGoodbye)
		case <-c.events:
		}
	}
}
