package keyset

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// PollEvery is how often a replica checks whether its files have changed, and reads the tables while a rotation is
	// under way or no connection listens for changes.
	PollEvery = 2 * time.Second
	// QuietPoll is how often a loop reads tables for whose changes a connection listens; the Set itself then reads its
	// tables when a report is due.
	QuietPoll = time.Minute
	// reportEvery is how often a replica reports that it is alive, if the keys that it holds do not change.
	reportEvery = 15 * time.Second
	// liveFor is how long a report counts: one may be lost. For replicas of an earlier build a report counts for 30 s: a
	// report that fails is repeated at the next poll, before these are over.
	liveFor = 45 * time.Second
	// leastAge is the least age at which a key may sign: a replica that was starting when the key was made has reported by
	// then.
	leastAge = 2 * PollEvery
	// retireEvery is how often a replica checks whether a former key is still needed.
	retireEvery = 15 * time.Second
)

// Part describes how a replica takes part in one kind.
type Part struct {
	Kind Kind
	// Files are the private keys of a replica that signs.
	Files Files
	// Pinned is the file of public keys that a replica trusts which only verifies; its form is that of pki.ParseKeySet.
	Pinned string
	// Signs is set if the service signs with the kind, and so drives its states.
	Signs bool
	// Relays is set if the service verifies nothing with the kind itself, and passes the rows on to its verifiers: it
	// needs no file.
	Relays bool
	// Outstanding returns a description of what still needs a former key, "" if nothing does. It may be nil, if nothing
	// ever does.
	Outstanding func(ctx context.Context, q pg.Querier, key Key) (string, error)
	// Distributed returns a description of the verifiers other than replicas that must have a key before it may sign, and
	// do not have it yet; "" if there are none. It may be nil.
	Distributed func(ctx context.Context, q pg.Querier, key Key) (string, error)
	// Changed is called with each new view, the first within Open.
	Changed func(View) error
}

// distributes is the prefix of the entry in the report of a replica that signs and calls Distributed before a key may
// sign.
const distributes = "distribute:"

// consumes is the prefix of a report's entry for a consumer of events that the replica runs, and saysConsumers is the
// entry of a replica whose report has all consumers that it runs: one of an earlier build has none.
const (
	consumes      = "consume:"
	saysConsumers = "consumes"
)

// LiveFor is how long after its last report a replica counts as alive.
const LiveFor = liveFor

func (p *Part) text(keyID string) string {
	verb := "verify"
	if p.Signs {
		verb = "sign"
	}
	if keyID != "" {
		keyID = ":" + keyID
	}
	return verb + ":" + string(p.Kind) + keyID
}

// View holds the keys with which a replica signs and verifies.
type View struct {
	Signing  ed25519.PrivateKey            // nil for a replica that only verifies
	Privates map[string]ed25519.PrivateKey // by key id, those that are not retired
	Verify   *pki.KeySet
	Rows     []Key // of the kind
	// Confirmed fails with fault signing_key_unconfirmed if for too long this replica could not read that Signing still
	// signs: the key may be retired meanwhile. It is called before each signature.
	Confirmed func() error
}

func (v *View) same(other *View) bool {
	if other == nil || !slices.EqualFunc(v.Rows, other.Rows,
		func(x, y Key) bool { return x.KeyID == y.KeyID && x.State == y.State }) {
		return false
	}
	return v.Signing.Equal(other.Signing) && v.Verify.String() == other.Verify.String()
}

// Deps holds the dependencies of a Set.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Wake   *events.Signal // notified after commits that appended events
	// Changed fires when the tables change. If it is nil, or no connection listens, the tables are read at each poll.
	Changed   *events.Signal
	Service   string
	ReplicaID string
	// Certificates follow the issuers of services. If nil, this replica does not take part in them.
	Certificates *Certificates
	// Consumes returns the consumers of events that this replica runs; Run calls it first. If nil, there are none.
	Consumes func() []string
	// OnProblems is called with the problems of each round, and with an empty list after they are gone. If nil, problems
	// are only logged.
	OnProblems func(ctx context.Context, problems []string)
}

// Set is one replica's view of the set. Safe for concurrent use.
type Set struct {
	deps  Deps
	parts []*part
	// issuers is nil without Certificates.
	issuers *issuers

	mu         sync.Mutex // of a round
	reported   []string   // the report that was written last
	consumes   []string   // entries for the consumers that this replica runs; nil before Run
	reportedAt time.Time
	problems   []string
	underWay   bool // a rotation is, according to the last round; also set if that round failed

	interrupt func(point string) error // for tests: ends a change at a point, as a kill does
	now       func() time.Time
	listening func() bool // whether a connection listens for changes of the tables
}

// at marks a point between two effects.
func (s *Set) at(point string) error {
	if s.interrupt == nil {
		return nil
	}
	return s.interrupt(point)
}

type part struct {
	Part

	issuers *issuers // of the kind Services
	view    *View
	keys    []privateKey // of the files, as last read
	retired time.Time    // when former keys were last checked
	// confirmed is when the round began that last found the key of view.Signing to be the one that signs; nil if no round
	// has.
	confirmed atomic.Pointer[time.Time]
}

// openEvery is how often a replica that starts tries to reach a database that does not answer.
const openEvery = 250 * time.Millisecond

// Open reads files and tables, makes the first key of a kind if this service signs with it and it has had none, and
// refuses a replica whose files differ from the set with fault signing_keys_differ. While the database cannot be
// reached, Open waits for it until ctx ends.
func Open(ctx context.Context, deps Deps, parts ...Part) (*Set, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Wake == nil || deps.Service == "" || deps.ReplicaID == "" {
		return nil, errors.New("open keys: logger, pool, signal, service or replica is missing")
	}
	s := &Set{
		deps: deps, now: time.Now, listening: deps.Changed.Listening,
		issuers: newIssuers(deps.Certificates, deps.Service),
	}
	for _, p := range parts {
		s.parts = append(s.parts, &part{Part: p})
	}
	for {
		err := s.round(ctx, true)
		if err == nil {
			return s, nil
		}
		if !pg.IsConnError(err) {
			return nil, fmt.Errorf("open keys: %w", err)
		}
		deps.Logger.WarnContext(ctx, "keys not read at the start", obs.Err(err))
		if !app.Sleep(ctx, openEvery) {
			return nil, fmt.Errorf("open keys: %w", errors.Join(err, context.Cause(ctx)))
		}
	}
}

// Run follows files and tables until ctx ends.
func (s *Set) Run(ctx context.Context) error {
	s.mu.Lock()
	s.consumes = []string{saysConsumers}
	if s.deps.Consumes != nil {
		for _, name := range s.deps.Consumes() {
			s.consumes = append(s.consumes, consumes+name)
		}
	}
	s.reportedAt = time.Time{} // so that the first round reports them
	s.mu.Unlock()
	err := app.EveryPaced(ctx, s.deps.Logger, "keys", s.pause, s.Refresh)
	// Other replicas do not wait for one that stops in order. The context has ended, so the row is deleted under a timeout
	// of its own.
	gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if _, dropErr := pg.Exec(gone, s.deps.Pool, deleteReplicas, s.deps.ReplicaID); dropErr != nil {
		s.deps.Logger.DebugContext(gone, "taking this replica off the holders of keys failed", obs.Err(dropErr))
	}
	return err
}

// pause returns a function that sleeps between two rounds: for one poll while a rotation is under way, whose next step
// waits for reports, which are not notified; else until files have changed, the tables have changed, or the longest
// sleep is over. The sleep also ends when a report is due, even if there were rounds meanwhile.
func (s *Set) pause() func(context.Context) bool {
	wake, files, began := s.deps.Changed.C(), s.files(), time.Now()
	return func(ctx context.Context) bool {
		for app.Sleep(ctx, s.poll()) {
			select {
			case <-wake:
				return true
			default:
			}
			if s.busy() || s.reportIsDue() || s.files() != files || time.Since(began) >= s.pollPeriod() {
				return true
			}
		}
		return false
	}
}

// poll returns how long to sleep until the next check whether a pause ends: PollEvery, or less if a report is due
// before.
func (s *Set) poll() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A report that is due already has failed, or is written in the next round.
	if left := time.Until(s.reportedAt.Add(reportEvery)); left > 0 && left < PollEvery {
		return left
	}
	return PollEvery
}

func (s *Set) reportIsDue() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reportIsDueLocked()
}

// reportIsDueLocked reports whether it is time to report that this replica lives.
func (s *Set) reportIsDueLocked() bool { return time.Since(s.reportedAt) >= reportEvery }

// pollPeriod returns the longest time between two reads of the tables.
func (s *Set) pollPeriod() time.Duration {
	if s.listening() {
		return reportEvery
	}
	return PollEvery
}

// busy reports whether the last round left something to be done soon.
func (s *Set) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.underWay
}

// files returns a description of the files of all parts, which differs after a change of any.
func (s *Set) files() string {
	var out strings.Builder
	for _, p := range s.parts {
		if p.Signs {
			out.WriteString(p.Files.stamp())
		}
		if p.Pinned != "" {
			out.WriteString(stamp(p.Pinned))
		}
	}
	out.WriteString(s.issuers.files())
	return out.String()
}

// Refresh reads files and tables once, and makes the changes that are due.
func (s *Set) Refresh(ctx context.Context) error { return s.round(ctx, false) }

// inTx runs a change of the set by the service that signs in a transaction.
func (s *Set) inTx(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := pg.InTx(ctx, s.deps.Pool, fn); err != nil {
		return err
	}
	s.deps.Wake.Notify()
	return nil
}
