package authority

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// Config bounds the poller; zero fields take the defaults.
type Config struct {
	Poll    time.Duration // between polls without a ping, a subscription or a change; 1 s
	Timeout time.Duration // of one poll; 1 s, since a lease is 1.5 s
	Batch   int           // rows of one read; 2000
	Queue   int           // frames that may wait for one watcher beyond its snapshot; 4096
	// RetiredFor is how long a retired node stays in snapshots: longer than any certificate lives; 49 h.
	RetiredFor time.Duration
	// IssuersEvery is the least time between two reads of the roots that replicas of nodeapi are sent; 1 s.
	IssuersEvery time.Duration
}

var defaults = Config{
	Poll: time.Second, Timeout: time.Second, Batch: 2000, Queue: 4096, RetiredFor: 49 * time.Hour,
	IssuersEvery: time.Second,
}

// Deps are the dependencies of a Poller.
type Deps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	Pool       *pgxpool.Pool
	Changed    *events.Signal // notified after commits of this process
	Numbered   *events.Signal // notified when events were numbered; it may be nil
	// Profiles returns the profiles of nodes, the same message until they have changed. Nil: none are sent.
	Profiles func() *recoveryv1.AuthorityProfiles
}

// Poller reads decisions and serves them to any number of watchers.
type Poller struct {
	deps  Deps
	cfg   Config
	polls prometheus.Histogram

	kick      chan struct{} // a ping or a subscription waits
	receivers sync.WaitGroup

	mu       sync.Mutex
	nodes    map[string]*recoveryv1.NodeAuthority
	last     int64
	loaded   bool
	retired  map[string]time.Time // when the node was first read as retired; it is dropped after RetiredFor
	watchers map[*watcher]struct{}
	waiting  []ping // arrived since the last poll began
	joining  []*watcher
	forgotAt time.Time
	failure  error
	profiles *recoveryv1.AuthorityProfiles // that watchers were sent last
	issuers  issuers
}

type ping struct {
	watcher *watcher
	id      int64
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps, cfg Config) (*Poller, error) {
	if deps.Logger == nil || deps.Pool == nil {
		return nil, errors.New("authority poller needs a logger and a pool")
	}
	p := &Poller{
		deps: deps, cfg: config.Or(cfg, defaults), kick: make(chan struct{}, 1),
		nodes: map[string]*recoveryv1.NodeAuthority{}, retired: map[string]time.Time{}, watchers: map[*watcher]struct{}{},
		polls: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "recovery_authority_poll_duration_seconds", Help: "Time of one poll of node decisions.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
		}),
	}
	if deps.Registerer != nil {
		if err := deps.Registerer.Register(p.polls); err != nil {
			return nil, fmt.Errorf("register authority metrics: %w", err)
		}
	}
	return p, nil
}

// Run polls until ctx ends, and then waits for the receiving goroutines of its watchers.
func (p *Poller) Run(ctx context.Context) error {
	defer p.receivers.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		changed := p.deps.Changed.C()
		err := p.runOnce(ctx)
		if ctx.Err() != nil {
			return nil // asked to stop
		}
		p.note(ctx, err)
		pause := p.cfg.Poll
		if err != nil {
			// Pings wait meanwhile. The lease of a replica that sent one lapses, as it must while decisions cannot be read.
			pause, changed = 50*time.Millisecond, nil
		}
		timer.Reset(pause)
		var kick <-chan struct{}
		if err == nil {
			kick = p.kick
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-changed:
		case <-kick:
		}
	}
}

func (p *Poller) note(ctx context.Context, err error) {
	p.mu.Lock()
	before := p.failure
	p.failure = err
	p.mu.Unlock()
	switch {
	case err != nil && before == nil:
		p.deps.Logger.WarnContext(ctx, "reading node decisions failed", slog.Any(obs.KeyError, err))
	case err == nil && before != nil:
		p.deps.Logger.InfoContext(ctx, "node decisions are read again")
	}
}

// runOnce makes one poll. It answers the pings and subscriptions that came before it began.
func (p *Poller) runOnce(ctx context.Context) error {
	began := time.Now()
	p.mu.Lock()
	pings, joining, after := p.waiting, p.joining, p.last
	p.waiting, p.joining = nil, nil
	p.mu.Unlock()
	var deltas []*recoveryv1.NodeAuthority
	var upTo int64
	var roots *readRoots // nil: they are as they were
	var err error
	if p.rootsDue() {
		// The roots are read in the transaction of the decisions, so that they cost none of their own.
		limited, cancel := context.WithTimeout(ctx, 2*p.timeout()) // for a connection, and two reads
		err = pg.InTx(limited, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			if deltas, upTo, err = p.read(ctx, tx, after); err == nil {
				roots, err = p.readRoots(ctx, tx)
			}
			return err
		})
		cancel()
	} else {
		deltas, upTo, err = p.read(ctx, p.deps.Pool, after)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		// They are answered by the next poll, which begins after them too.
		p.waiting, p.joining = append(pings, p.waiting...), append(joining, p.joining...)
		return err
	}
	p.polls.Observe(time.Since(began).Seconds())
	p.loaded = true
	p.last = max(p.last, upTo)
	for _, n := range deltas {
		p.nodes[n.GetNodeId()] = n
		p.last = max(p.last, n.GetSequence())
		if n.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
			if _, ok := p.retired[n.GetNodeId()]; !ok {
				p.retired[n.GetNodeId()] = began
			}
		}
	}
	p.forgetLocked(began)
	p.sendIssuersLocked(roots)
	for w := range p.watchers {
		for _, n := range deltas {
			p.offerLocked(w, &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Delta{Delta: n}})
		}
	}
	p.profilesLocked()
	for _, w := range joining {
		if w.ctx.Err() == nil {
			p.admitLocked(w)
		}
	}
	for _, ask := range pings {
		ask.watcher.pings--
		p.offerLocked(ask.watcher, &recoveryv1.WatchAuthorityResponse{
			Frame: &recoveryv1.WatchAuthorityResponse_Pong{Pong: &recoveryv1.AuthorityPong{PingId: ask.id, Sequence: p.last}},
		})
	}
	return nil
}

// forgetLocked drops nodes that were retired longer than RetiredFor ago. Until then a replica that was disconnected
// must learn of the retirement, since it may still have a stream of the node.
func (p *Poller) forgetLocked(now time.Time) {
	if len(p.retired) == 0 || now.Sub(p.forgotAt) < time.Minute {
		return
	}
	p.forgotAt = now
	for id, at := range p.retired {
		if now.Sub(at) > p.cfg.RetiredFor {
			delete(p.retired, id)
			delete(p.nodes, id)
		}
	}
}

// decision has the columns of a row of recovery.identity that replicas of nodeapi need.
type decision struct {
	NodeID             string `db:"node_id" expr:"@.node_id::text"`
	NodeInstanceID     string `db:"node_instance_id" expr:"COALESCE(@.node_instance_id::text, '')"`
	State              string `db:"state"`
	FenceEpoch         int64  `db:"fence_epoch"`
	CurrentSerial      string `db:"current_serial"`
	NextSerial         string `db:"next_serial"`
	Issued             int64  `db:"issued"`
	Confirmed          int64  `db:"confirmed"`
	ConfirmedSessionID string `db:"confirmed_session_id" expr:"COALESCE(@.confirmed_session_id::text, '')"`
	Sequence           int64  `db:"authority_seq"`
	ReplacedNonce      string `db:"replaced_nonce"`
	Launched           bool   `db:"launched" expr:"@.instance_id IS NOT NULL"`
	Profile            string `db:"profile"`
}

// decisionsAfter reads the decisions after a number. Where all decisions are read ($3), nodes that were retired longer
// than $4 seconds ago are left out; a later change of a node is read at any age.
var decisionsAfter = pg.Define(pg.RoleRecovery, "authority.decisions_after", `
	SELECT `+pg.Columns[decision]("i")+` FROM recovery.identity i
	WHERE i.authority_seq > $1
		AND (i.state <> 'retired' OR NOT $3 OR i.state_at > mesh.clock() - make_interval(secs => $4))
	ORDER BY i.authority_seq LIMIT $2`)

// lastDecision reads the highest number of a decision.
var lastDecision = pg.Define(pg.RoleRecovery, "authority.last_decision",
	`SELECT COALESCE(max(i.authority_seq), 0) FROM recovery.identity i`)

// read returns the decisions after a number, in order, and a number up to which none is missing but those that are left
// out. The numbers are in the order of commits, so no decision with a lower number than one that was read can appear
// later.
func (p *Poller) read(ctx context.Context, q pg.Querier, after int64) ([]*recoveryv1.NodeAuthority, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	var all []*recoveryv1.NodeAuthority
	whole, upTo := after == 0, after
	if whole {
		// What is left out is not read by the next poll either.
		var err error
		if upTo, err = pg.Value[int64](ctx, q, lastDecision); err != nil {
			return nil, 0, fmt.Errorf("read the last decision: %w", err)
		}
	}
	for {
		part, err := pg.All[decision](ctx, q, decisionsAfter, after, p.cfg.Batch, whole, p.cfg.RetiredFor.Seconds())
		if err != nil {
			return nil, 0, fmt.Errorf("read decisions: %w", err)
		}
		for _, d := range part {
			all = append(all, d.proto(ctx))
		}
		if len(part) < p.cfg.Batch {
			return all, upTo, nil
		}
		after = part[len(part)-1].Sequence
	}
}

// timeout returns the timeout of the next poll. The first poll reads all rows and has a longer one.
func (p *Poller) timeout() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.loaded {
		return 30 * time.Second
	}
	return p.cfg.Timeout
}

// proto returns the decision as replicas of nodeapi read it. A state that this build does not know is reported by
// package aside and left unspecified: no session of that node counts, and its agent is told to wait. Other nodes are
// not affected.
func (d decision) proto(ctx context.Context) *recoveryv1.NodeAuthority {
	state, err := names.Parse[commonv1.NodeIdentityState](d.State)
	if err != nil {
		aside.Note(ctx, "authority", d.NodeID, err)
	}
	return &recoveryv1.NodeAuthority{
		NodeId: d.NodeID, NodeInstanceId: d.NodeInstanceID, State: state, FenceEpoch: d.FenceEpoch,
		CurrentSerial: d.CurrentSerial, NextSerial: d.NextSerial, Issued: d.Issued, Confirmed: d.Confirmed,
		ConfirmedSessionId: d.ConfirmedSessionID, Sequence: d.Sequence,
		ReplacedNonce: d.ReplacedNonce,
		Launched:      d.Launched,
		Profile:       d.Profile,
	}
}

// Health returns an error if the view cannot be served. It is for readiness.
func (p *Poller) Health(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.failure != nil:
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "node decisions cannot be read", fault.Cause(p.failure))
	case !p.loaded:
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "node decisions have not been read yet")
	default:
		return nil
	}
}
