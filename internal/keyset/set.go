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
	// PollEvery is how often a replica looks whether its files have changed, and reads the tables where something is under way or nothing is notified.
	PollEvery = 2 * time.Second
	// QuietPoll is how often tables are read of whose changes a connection is told that lives.
	QuietPoll = time.Minute
	// reportEvery is how often a replica says that it is alive, if what it holds does not change.
	reportEvery = 15 * time.Second
	// liveFor is how long a report counts: one may be lost. Replicas of an earlier build believe one for 30 s: a report
	// that fails is made again with the next poll, before they end.
	liveFor = 45 * time.Second
	// settle is how old a key is before it may sign: a replica that was starting when it was made has reported by then.
	settle = 2 * PollEvery
	// retireEvery is how often it is looked whether a former key is needed.
	retireEvery = 15 * time.Second
)

// Part is what a replica does with one kind.
type Part struct {
	Kind Kind
	// Files are the private keys of a replica that signs.
	Files Files
	// Pinned is the file of public keys that a replica believes which verifies alone; its form is that of pki.ParseKeySet.
	Pinned string
	// Signs says that the service signs with the kind, and so drives its states.
	Signs bool
	// Relays says that the service verifies nothing with the kind itself, and passes the rows on to those who do: it needs no file.
	Relays bool
	// Outstanding describes what still needs a former key; "" is nothing. Nil: nothing.
	Outstanding func(ctx context.Context, q pg.Querier, key Key) (string, error)
	// Distributed describes what else must hold a key before it may sign, beside the replicas, and does not yet; it
	// returns "" if there is nothing. It may be nil.
	Distributed func(ctx context.Context, q pg.Querier, key Key) (string, error)
	// Changed is called with each new view, the first within Open.
	Changed func(View) error
}

// distributes begins the word of a replica that signs and asks Distributed before a key may.
const distributes = "distribute:"

// consumes begins the word of a replica for a consumer of events that it runs, and saysConsumers is that of a replica
// whose words name all that it runs: one of an earlier build names none.
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

// View is what a replica signs and verifies with.
type View struct {
	Signing  ed25519.PrivateKey            // nil for one that verifies alone
	Privates map[string]ed25519.PrivateKey // by key id, those that are not retired
	Verify   *pki.KeySet
	Rows     []Key // of the kind
	// Confirmed fails with fault signing_key_unconfirmed when this replica could not read for long that Signing still signs: it may be retired
	// meanwhile. It is asked before each signature.
	Confirmed func() error
}

func (v *View) same(other *View) bool {
	if other == nil || !slices.EqualFunc(v.Rows, other.Rows, func(x, y Key) bool { return x.KeyID == y.KeyID && x.State == y.State }) {
		return false
	}
	return v.Signing.Equal(other.Signing) && v.Verify.String() == other.Verify.String()
}

// Deps is what a Set works with.
type Deps struct {
	Logger    *slog.Logger
	Pool      *pgxpool.Pool
	Wake      *events.Signal // notified after commits that appended events
	Changed   *events.Signal // fires when the tables change; nil, or without a connection that listens: they are read at each poll
	Service   string
	ReplicaID string
	// Certificates follow the issuers of services. Nil: this replica takes no part in them.
	Certificates *Certificates
	// Consumes returns the consumers of events that this replica runs; Run asks for it first. Nil: none.
	Consumes func() []string
	// OnProblems is told the problems of each round, an empty list after they are gone. Nil: they are logged alone.
	OnProblems func(ctx context.Context, problems []string)
}

// Set is one replica's view of the set. Safe for concurrent use.
type Set struct {
	deps  Deps
	parts []*part
	// issuers is nil without Certificates.
	issuers *issuers

	mu         sync.Mutex // of a round
	reported   []string   // what was last reported
	consumes   []string   // words for the consumers that this replica runs; nil before Run
	reportedAt time.Time
	problems   []string
	underWay   bool // a rotation, as of the last round; also where that failed

	interrupt func(point string) error // of tests: ends a change at a point, as a kill does
	now       func() time.Time
	listening func() bool // whether a connection passes on that the tables changed
}

// at is a point between two effects.
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
	retired time.Time    // when former keys were last looked at
	// confirmed is when the round began that last found the key of view.Signing to be the one that signs; nil: none has.
	confirmed atomic.Pointer[time.Time]
}

// openEvery is how often a replica that starts asks for a database that cannot be reached.
const openEvery = 250 * time.Millisecond

// Open reads files and tables, makes the first key of a kind where this service signs and there has been none, and refuses a replica whose files
// differ from the set with fault signing_keys_differ. A database that cannot be reached is waited for until ctx ends.
func Open(ctx context.Context, deps Deps, parts ...Part) (*Set, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Wake == nil || deps.Service == "" || deps.ReplicaID == "" {
		return nil, errors.New("open keys: logger, pool, signal, service or replica is missing")
	}
	s := &Set{deps: deps, now: time.Now, listening: deps.Changed.Listening, issuers: newIssuers(deps.Certificates, deps.Service)}
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
	s.reportedAt = time.Time{} // the first round says so
	s.mu.Unlock()
	err := app.EveryPaced(ctx, s.deps.Logger, "keys", s.pause, s.Refresh)
	// A replica that stops in order is not waited for. The context has ended, and the row goes with a bound of its own.
	gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if _, dropErr := pg.Exec(gone, s.deps.Pool, deleteReplicas, s.deps.ReplicaID); dropErr != nil {
		s.deps.Logger.DebugContext(gone, "taking this replica off the holders of keys failed", obs.Err(dropErr))
	}
	return err
}

// pause sleeps between two rounds: a poll where a rotation is under way, whose next step waits for reports that no event tells of; else until files have
// changed, or events have come, or it is time in any case. It ends when a report is due, whatever rounds came between.
func (s *Set) pause() func(context.Context) bool {
	wake, files, began := s.deps.Changed.C(), s.files(), time.Now()
	return func(ctx context.Context) bool {
		for app.Sleep(ctx, s.poll()) {
			select {
			case <-wake:
				return true
			default:
			}
			if s.busy() || s.reportIsDue() || s.files() != files || time.Since(began) >= s.rest() {
				return true
			}
		}
		return false
	}
}

// poll returns how long to sleep until the next look whether a pause ends: PollEvery, or less if a report is due before.
func (s *Set) poll() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A report that is due already has failed, or comes with the round that is next.
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

// rest returns how long nothing is read at most.
func (s *Set) rest() time.Duration {
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

// files describes the files of all parts, so that a change of any shows.
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

// Refresh reads files and tables once, and does what is due.
func (s *Set) Refresh(ctx context.Context) error { return s.round(ctx, false) }

// inTx is a change of the set by the service that signs.
func (s *Set) inTx(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := pg.InTx(ctx, s.deps.Pool, fn); err != nil {
		return err
	}
	s.deps.Wake.Notify()
	return nil
}
