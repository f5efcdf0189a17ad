package trust

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/trust/absence"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

// Deps are the dependencies of a Preflight.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Signer ca.Signer
	// Rotating is the authority whose issuer rotations exchange; nil: it is not exchanged here.
	Rotating ca.Rotating
	// Services are the roots of the services' issuer, by which the ingress is verified.
	Services    *pki.Bundle
	TrustDomain string
	Replica     string // the holder of the lease
	// Address returns the address of the node API that agents are told: host:port or an https URL.
	Address func() string
	// AgentRoots returns the roots by which agents verify that address. Nil, or a nil result: Services.
	AgentRoots func() *pki.Bundle
	// Stopped is called in the transaction that begins, and in that which ends, a time in which no certificate is issued.
	// It may be nil.
	Stopped func(ctx context.Context, tx pgx.Tx, s Stop) error
	// Unanswered is called like Stopped for a time in which the authority does not answer or does not sign, and again
	// while that lasts.
	Unanswered func(ctx context.Context, tx pgx.Tx, s absence.Stop) error
	// Wake is notified after commits that appended events; it may be nil.
	Wake *events.Signal
	// Numbered is notified when events were numbered; it may be nil.
	Numbered *events.Signal
	// Changed is notified after commits that changed nodes, or what the ingress is sent; it may be nil.
	Changed *events.Signal
	Audit   *audit.Log // records refusals; nil: none are recorded
}

// Config bounds the checks; zero fields take the defaults.
type Config struct {
	Every     time.Duration // between two checks while nothing changes; 15 s
	Poll      time.Duration // between two reads of the lease and of what the ingress publishes, after an event; 2 s
	Rest      time.Duration // between two such reads while there are no events and no rotation; 5 s
	AskEvery  time.Duration // between two reads of what the authority publishes; 5 s
	Again     time.Duration // before a check that may change the state; 1 s
	Handshake time.Duration // of one; 3 s
	Ask       time.Duration // of the calls of the authority; 3 s
	Lease     time.Duration // longer than a check may take after a rest; 15 s
	// Overlap is the least time for which both issuers of a rotation are valid: a certificate that the former one signed
	// just before may not be stored yet. It is longer than an enrolment's lease; 1 min.
	Overlap time.Duration
}

var defaults = Config{
	Every: 15 * time.Second, Poll: 2 * time.Second, Rest: 5 * time.Second, AskEvery: 5 * time.Second,
	Again: time.Second, Handshake: 3 * time.Second, Ask: 3 * time.Second, Lease: 15 * time.Second, Overlap: time.Minute,
}

// Preflight is one replica's part in the checks. All replicas run one; the holder of the lease checks.
type Preflight struct {
	deps Deps
	cfg  Config
	seen atomic.Pointer[preflightRow] // as of the last look

	// Of Run alone.
	begun     bool // its first round is over
	canary    canary.Certificate
	streaks   streaks
	absence   absence.Count
	signature string
	checkedAt time.Time // zero: this holder has not checked
	authority *authority
	askedAt   time.Time
	pause     time.Duration
	rotations events.Reading // of an open rotation, when there was none; zero: there is one

	nextCanary canary.Certificate // of the next issuer of a rotation
	ready      int                // rounds in a row in which each replica accepted it
	waiting    string             // what the rotation waited for in the round before
	has        string             // fingerprint of the next issuer that this replica was noted to have
}

// New checks the dependencies; it touches neither the database nor the authority.
func New(deps Deps, cfg Config) (*Preflight, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Signer == nil || deps.Services == nil || deps.Address == nil ||
		deps.Replica == "" {
		return nil, errors.New("preflight needs a logger, a pool, an authority, roots, an address and a replica")
	}
	if err := pki.CanaryID(deps.TrustDomain).Validate(); err != nil {
		return nil, fmt.Errorf("preflight: %w", err)
	}
	return &Preflight{deps: deps, cfg: config.Or(cfg, defaults)}, nil
}

// Run checks until ctx ends.
func (p *Preflight) Run(ctx context.Context) error {
	defer p.leave(ctx)
	return app.EveryPaced(ctx, p.deps.Logger, "ca-preflight", func() func(context.Context) bool {
		wake := p.deps.Numbered.C()
		return func(ctx context.Context) bool {
			if p.pause != p.cfg.Poll || p.deps.Rotating != nil && p.rotations.Due(0) {
				return app.Sleep(ctx, p.pause)
			}
			return p.deps.Numbered.PaceWithin(ctx, nil, wake, p.cfg.Poll, p.cfg.Rest)
		}
	}, func(ctx context.Context) error {
		p.pause = p.cfg.Poll
		round, err := p.RunOnce(ctx)
		if err != nil || !round.Held {
			p.ready = 0
			return errors.Join(err, p.NoteIssuer(ctx))
		}
		_, err = p.Rotate(ctx)
		return err
	})
}

// leave gives the lease up, so that another replica need not wait for its end.
func (p *Preflight) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if _, err := pg.Exec(ctx, p.deps.Pool, leaveLease, p.deps.Replica); err != nil {
		p.deps.Logger.DebugContext(ctx, "the lease of the preflight is not given up", obs.Err(err))
	}
}

// Round is what one round did.
type Round struct {
	Held    bool // this replica has the lease
	Checked bool // it made a check
	Changed bool // it wrote another state
}

// RunOnce takes or keeps the lease and, if a check is due, makes it and writes what follows from it and from the checks
// before. In its first round it takes the lease from another holder: a replica that has just started may have an
// authority with other material, and need not wait for the end of a holder that was killed.
func (p *Preflight) RunOnce(ctx context.Context) (Round, error) {
	var out Round
	row, list, now, err := p.takeLeaseAndRead(ctx, &out)
	if err != nil || !out.Held {
		// Those of a holder without a gap count alone.
		p.streaks, p.absence, p.checkedAt = streaks{}, absence.Count{}, time.Time{}
		return out, err
	}
	due := p.checkedAt.IsZero() || time.Since(p.checkedAt) >= p.cfg.Every || p.streaks.undecided(row)
	if due || time.Since(p.askedAt) >= p.cfg.AskEvery {
		bounded, cancel := context.WithTimeout(ctx, p.cfg.Ask)
		p.authority, err = ask(bounded, p.deps.Signer)
		p.askedAt = time.Now()
		cancel()
	}
	was := p.signature
	p.signature = signature(p.authority, list)
	if !due && p.signature == was {
		return out, nil
	}
	c := &check{
		at: now, authority: p.authority, err: err, targets: targetsOf(p.agentAddress(), list, p.authority),
	}
	p.tryAll(ctx, c)
	p.checkedAt, out.Checked = time.Now(), true
	p.streaks.add(c)
	out.Changed, err = p.conclude(ctx, c)
	err = errors.Join(err, p.noteAbsence(ctx, c))
	if p.streaks.undecided(*p.seen.Load()) {
		p.pause = p.cfg.Again
	}
	return out, err
}

// takeLeaseAndRead takes or keeps the lease, and reads what the database has: the row, the replicas with what they
// trust, the time.
func (p *Preflight) takeLeaseAndRead(ctx context.Context, out *Round) (preflightRow, []replicas.Trusting, time.Time,
	error,
) {
	var row preflightRow
	var list []replicas.Trusting
	var now time.Time
	var rotations events.Reading
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		rotations = p.rotations
		var since *float64
		if !p.checkedAt.IsZero() {
			since = new(time.Since(p.checkedAt).Seconds())
		}
		var err error
		if out.Held, err = pg.Value[bool](ctx, tx, takeLease, p.deps.Replica, p.cfg.Lease.Seconds(), since,
			!p.begun); err != nil {
			return fmt.Errorf("take the lease of the preflight: %w", err)
		}
		if row, err = readPreflight(ctx, tx); err != nil || !out.Held {
			return err
		}
		if now, err = pg.Value[time.Time](ctx, tx, readClock); err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		if list, err = replicas.ReadTrust(ctx, tx); err != nil || !p.rotations.Due(0) {
			return err
		}
		reading := p.deps.Numbered.Reading() // an open rotation is left to Rotate, which costs a transaction of its own
		if _, err = pg.One[rotationRow](ctx, tx, readOpenRotation); pg.IsNoRows(err) {
			rotations, err = reading, nil
		}
		return err
	})
	if err == nil {
		p.rotations = rotations
		p.seen.Store(&row)
		p.begun = true
	}
	return row, list, now, err
}

// tryAll makes the handshakes of a check. After a refusal the certificate is a fresh one.
func (p *Preflight) tryAll(ctx context.Context, c *check) {
	if c.authority == nil {
		p.canary = canary.Certificate{} // once it answers it must sign
		return
	}
	if len(p.streaks.refused) > 0 || !p.canary.Usable(c.authority.fingerprint(), time.Now()) {
		fresh, err := p.sign(ctx, c.at)
		if err != nil {
			c.err, p.canary = err, canary.Certificate{}
			return
		}
		p.canary = fresh
		p.absence.Signed(c.at)
	}
	p.shake(ctx, c, p.canary)
}

func (p *Preflight) sign(ctx context.Context, now time.Time) (canary.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Ask)
	defer cancel()
	return canary.New(ctx, p.deps.Signer.Sign, p.deps.TrustDomain, now)
}

func (p *Preflight) shake(ctx context.Context, c *check, with canary.Certificate) {
	ahead := c.at.Sub(wallclock.Now())
	shakeHands(ctx, c.targets, pki.ClientConfig{
		Store: with.Store, Roots: p.deps.Services, Server: pki.ServiceID(p.deps.TrustDomain, "nodeapi"),
		NextProtos: []string{"h2"}, Time: func() time.Time { return wallclock.Now().Add(ahead) },
	}, p.agentRoots(), p.cfg.Handshake)
}

// conclude writes the state that follows from the checks, if it differs from the row's. A replica that has lost the
// lease meanwhile writes nothing.
func (p *Preflight) conclude(ctx context.Context, c *check) (bool, error) {
	if next := p.next(*p.seen.Load(), c); next == nil {
		return false, nil
	}
	var changed, held bool
	var row preflightRow
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		changed = false
		var err error
		if row, err = pg.One[preflightRow](ctx, tx, lockRow); err != nil {
			return fmt.Errorf("lock preflight: %w", err)
		}
		if held, err = pg.Value[bool](ctx, tx, hasLease, p.deps.Replica); err != nil || !held {
			return err
		}
		next := p.next(row, c)
		if next == nil {
			return nil
		}
		changed = true
		if err := p.enter(ctx, tx, row, next); err != nil {
			return err
		}
		row = *next
		return row.save(ctx, tx)
	})
	if err != nil {
		return false, fmt.Errorf("conclude preflight: %w", err)
	}
	p.seen.Store(&row)
	if changed {
		p.deps.Wake.Notify()
		p.log(ctx, &row)
	}
	return changed, nil
}

// next returns the row after a check, or nil if the row stays as it is.
func (p *Preflight) next(row preflightRow, c *check) *preflightRow {
	state, refusing := p.streaks.concluded(row, c)
	next := row
	next.State, next.RefusedBy = names.Of(state), refusing
	switch {
	case state != mismatch:
		next.Side, next.Summary, next.NextAction, next.IncidentID = "", "", "", ""
		if state == agree && c.authority != nil && len(c.with(canary.Trusted)) > 0 && len(c.with(canary.Refused)) == 0 {
			next.Issuer = c.authority.fingerprint()
			next.TrustedIssuer = next.Issuer
		}
	case row.State != stateMismatch || !slices.Equal(row.RefusedBy, refusing):
		if c.authority != nil {
			next.Issuer = c.authority.fingerprint()
		}
		which := side(row, c)
		next.Side, next.NextAction = names.OfSet(which), nextAction(which)
		next.Summary = summary(which, row, c, refusing)
	}
	if next.State == row.State && next.Side == row.Side && next.Issuer == row.Issuer &&
		next.TrustedIssuer == row.TrustedIssuer && slices.Equal(next.RefusedBy, row.RefusedBy) {
		return nil
	}
	next.CheckedAt = &c.at
	if next.State != row.State || row.Since == nil {
		next.Since = &c.at
	}
	return &next
}

// enter writes what begins and ends with a mismatch.
func (p *Preflight) enter(ctx context.Context, tx pgx.Tx, row preflightRow, next *preflightRow) error {
	var err error
	switch is, was := next.State == stateMismatch, row.State == stateMismatch; {
	case is:
		if next.IncidentID, err = raise(ctx, tx, next); err != nil {
			return err
		}
		if !was {
			if err := p.stopped(ctx, tx, Stop{From: *next.Since, Reason: next.Summary}); err != nil {
				return err
			}
		}
		return beginRepair(ctx, tx, next, closedBy)
	case was:
		if err := closeIncident(ctx, tx); err != nil {
			return err
		}
		stop := Stop{Until: *next.Since, Reason: row.Summary}
		if row.Since != nil {
			stop.From = *row.Since
		}
		if err := p.stopped(ctx, tx, stop); err != nil {
			return err
		}
		return actions.Over(ctx, tx, "", actions.CARepair, row.IncidentID,
			"the ingress trusts what the authority signs")
	}
	return nil
}

func (p *Preflight) stopped(ctx context.Context, tx pgx.Tx, s Stop) error {
	if p.deps.Stopped == nil {
		return nil
	}
	return p.deps.Stopped(ctx, tx, s)
}

func (p *Preflight) log(ctx context.Context, row *preflightRow) {
	if row.State == stateMismatch {
		p.deps.Logger.ErrorContext(ctx, "the ingress refuses the certificates that the authority issues: none is issued",
			slog.String("failing_side", row.Side), slog.String("summary", row.Summary),
			slog.String("next_action", row.NextAction))
		return
	}
	p.deps.Logger.InfoContext(ctx, "the preflight of the authority has another state", slog.String("state", row.State),
		slog.String("issuer", row.Issuer))
}

// Health returns a fault while the last look found a mismatch, as the status of the mesh shows it.
func (p *Preflight) Health(context.Context) error {
	row := p.seen.Load()
	if row == nil {
		return nil
	}
	return row.refusal()
}
