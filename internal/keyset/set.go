package keyset

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	reportEvery = 10 * time.Second
	// liveFor is how long a report counts.
	liveFor = 30 * time.Second
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

func (p *Part) word(keyID string) string {
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
	s := &Set{deps: deps, now: time.Now, issuers: newIssuers(deps.Certificates, deps.Service)}
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
	return err //nolint:wrapcheck // a panic, as it is
}

// pause sleeps between two rounds: a poll where a rotation is under way, whose next step waits for reports that no event tells of; else until files have
// changed, or events have come, or it is time in any case.
func (s *Set) pause() func(context.Context) bool {
	wake, files, began := s.deps.Changed.C(), s.files(), time.Now()
	return func(ctx context.Context) bool {
		for app.Sleep(ctx, PollEvery) {
			select {
			case <-wake:
				return true
			default:
			}
			if s.busy() || s.files() != files || time.Since(began) >= s.rest() {
				return true
			}
		}
		return false
	}
}

// rest returns how long nothing is read at most: until this replica has to report again that it lives.
func (s *Set) rest() time.Duration {
	if s.deps.Changed.Listening() {
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

func (s *Set) round(ctx context.Context, start bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay = true
	if start {
		// Before anything is read: a key that is made from now on waits for this replica.
		if err := s.report(ctx, nil, nil); err != nil {
			return err
		}
	}
	var batch pg.Batch
	due := !start && time.Since(s.reportedAt) >= reportEvery
	if due {
		// Also before, in the same transaction: a replica that was stopped for a while must not decide as if it were none.
		batch.Queue(saveReplica, s.saving(s.reported, s.problems)...)
	}
	began := s.now()
	rows, open, err := readSet(ctx, s.deps.Pool, &batch)
	if err != nil {
		return err
	}
	if due {
		s.reportedAt = time.Now()
	}
	var holds, problems []string
	var failed []error
	for _, p := range s.parts {
		held, bad, err := s.one(ctx, p, roundOf{rows: rows, open: open, began: began, start: start})
		if err != nil && start {
			return err
		}
		// What goes wrong with one kind does not keep the others from being read.
		failed = append(failed, err)
		holds, problems = append(holds, held...), append(problems, bad...)
	}
	if s.issuers != nil {
		held, bad, err := s.certificates(ctx, roundOf{rows: rows, open: open, began: began, start: start})
		if err != nil && start {
			return err
		}
		failed = append(failed, err)
		holds, problems = append(holds, held...), append(problems, bad...)
	}
	s.tellProblems(ctx, problems)
	// A request for an issuer of services waits for a file, whose change ends the pause.
	s.underWay = slices.ContainsFunc(open, func(r Rotation) bool { return r.Kind != Services }) ||
		slices.ContainsFunc(rows, func(row Key) bool { return row.State == VerifyOnly }) || errors.Join(failed...) != nil
	if !slices.Equal(holds, s.reported) || s.reportedAt.IsZero() || start {
		failed = append(failed, s.report(ctx, holds, problems))
	}
	return errors.Join(failed...)
}

// saving returns the arguments of saveReplica.
func (s *Set) saving(holds, problems []string) []any {
	takes := make([]string, 0, len(s.parts))
	for _, p := range s.parts {
		takes = append(takes, p.word(""))
		if p.Distributed != nil {
			takes = append(takes, distributes+string(p.Kind))
		}
	}
	if s.issuers != nil {
		takes = append(takes, trusts)
	}
	takes = append(takes, s.consumes...)
	return []any{s.deps.ReplicaID, takes, texts(holds), texts(problems)}
}

func (s *Set) report(ctx context.Context, holds, problems []string) error {
	if _, err := pg.Exec(ctx, s.deps.Pool, saveReplica, s.saving(holds, problems)...); err != nil {
		return fmt.Errorf("report keys: %w", err)
	}
	s.reported, s.reportedAt = holds, time.Now()
	return nil
}

// texts is a list as a column that is never null.
func texts(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

func (s *Set) tellProblems(ctx context.Context, problems []string) {
	if !slices.Equal(problems, s.problems) {
		for _, problem := range problems {
			s.deps.Logger.ErrorContext(ctx, "a key cannot be used; what was loaded before goes on serving", slog.String("problem", problem))
		}
		s.problems, s.reportedAt = problems, time.Time{}
	}
	if s.deps.OnProblems != nil {
		s.deps.OnProblems(ctx, problems)
	}
}

// roundOf is what a round has read.
type roundOf struct {
	rows  []Key
	open  []Rotation
	began time.Time
	start bool // it is the first
}

// one does a round of one kind. It returns the words of what the replica holds, and what is wrong. A directory that cannot be read or written is a problem,
// and an error beside what was loaded before, which goes on.
func (s *Set) one(ctx context.Context, p *part, r roundOf) ([]string, []string, error) {
	var holds, problems []string
	var err error
	all, start := r.rows, r.start
	rows := ofKind(p.Kind, all)
	var bad map[string]string
	var failed error
	if p.Signs {
		if rows, bad, failed = s.signer(ctx, p, rows, r.open); failed != nil {
			if start || p.view == nil {
				return nil, nil, failed
			}
			problems = append(problems, fmt.Sprintf("%s: %s", p.Kind, failed))
		}
	}
	pinned, err := p.pinned(rows)
	if err != nil {
		if start || p.view == nil {
			return nil, nil, err
		}
		bad = map[string]string{p.Pinned: err.Error()}
		pinned = publics(p.view.Verify)
	}
	trusted := Trusted(p.Kind, pinned, rows)
	differs := p.differs(rows, all, trusted, bad)
	if start && len(differs) > 0 {
		return nil, nil, differ(p, differs[0])
	}
	view := &View{
		Privates: map[string]ed25519.PrivateKey{}, Verify: keySet(trusted), Rows: rows, Confirmed: func() error { return p.mayStillSign(s.now()) },
	}
	if s.privates(p, view, rows) {
		p.confirmed.Store(&r.began)
	}
	if view.Verify != nil && (!p.Signs || view.Signing != nil) && !view.same(p.view) {
		if p.Changed != nil {
			if err := p.Changed(*view); err != nil {
				return nil, nil, fmt.Errorf("use keys of %s: %w", p.Kind, err)
			}
		}
		p.view = view
	}
	for _, row := range rows {
		if _, ok := view.Privates[row.KeyID]; row.State != Retired && (p.Signs && ok || !p.Signs && trusted[row.KeyID] != nil) {
			holds = append(holds, p.word(row.KeyID))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bad)) {
		problems = append(problems, fmt.Sprintf("%s: %s: %s", p.Kind, name, bad[name]))
	}
	for _, d := range differs {
		problems = append(problems, fmt.Sprintf("%s: %s", p.Kind, d.what))
	}
	return holds, problems, failed
}

// signer reads the files of a part that signs and changes what is due. It returns the rows as they are then, those that it was given with an error.
func (s *Set) signer(ctx context.Context, p *part, rows []Key, open []Rotation) ([]Key, map[string]string, error) {
	keys, bad, err := p.Files.read(p.Kind)
	if err != nil {
		return rows, nil, err
	}
	p.keys = keys
	if !s.due(p, rows, open) {
		return rows, bad, nil
	}
	changed, err := s.drive(ctx, p)
	if err != nil {
		return rows, bad, err
	}
	return changed, bad, nil
}

func (p *part) private(keyID string) ed25519.PrivateKey {
	i := slices.IndexFunc(p.keys, func(k privateKey) bool { return k.id == keyID })
	if i < 0 {
		return nil
	}
	return p.keys[i].private
}

// pinned returns the keys that this replica believes because of its files.
func (p *part) pinned(rows []Key) (map[string]ed25519.PublicKey, error) {
	out := map[string]ed25519.PublicKey{}
	if p.Signs {
		for _, key := range p.keys {
			if slices.ContainsFunc(rows, func(row Key) bool { return row.KeyID == key.id }) {
				out[key.id] = key.public()
			}
		}
	}
	if p.Relays {
		for _, row := range rows {
			out[row.KeyID] = row.PublicKey
		}
	}
	if p.Pinned == "" {
		return out, nil
	}
	raw, err := pki.ReadFile(p.Pinned)
	if err != nil {
		return nil, fmt.Errorf("read keys of %s: %w", p.Kind, err)
	}
	set, err := pki.ParseKeySet(strings.TrimSpace(string(raw)))
	if err != nil {
		return nil, fmt.Errorf("read keys of %s in %s: %w", p.Kind, p.Pinned, err)
	}
	maps.Copy(out, publics(set))
	return out, nil
}

func publics(set *pki.KeySet) map[string]ed25519.PublicKey {
	out := map[string]ed25519.PublicKey{}
	if set == nil {
		return out
	}
	for _, id := range set.IDs() {
		out[id], _ = set.Key(id)
	}
	return out
}

// inTx is a change of the set by the service that signs.
func (s *Set) inTx(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := pg.InTx(ctx, s.deps.Pool, fn); err != nil {
		return err //nolint:wrapcheck // the caller says what it did
	}
	s.deps.Wake.Notify()
	return nil
}
