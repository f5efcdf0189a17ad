package profiles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// Deps are the dependencies of a Book; the signals may be nil.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	// Default is the name of the profile of nodes that were enrolled without one: the configured name.
	Default string
	// TrustDomain is that of the mesh, in which endpoints prove their identity.
	TrustDomain string
	Wake        *events.Signal        // notified after commits that appended events
	Numbered    *events.Signal        // notified when events were numbered
	Changed     *events.Signal        // notified when Authority returns something else
	Audit       *audit.Log            // nil: nothing is recorded
	Registerer  prometheus.Registerer // nil: nothing is counted
	// RefreshEvery is the least time between two reads of what other replicas have changed; 1 s.
	RefreshEvery time.Duration
}

// Book has the valid versions as the rows were read last. Safe for concurrent use.
type Book struct {
	deps     Deps
	reading  sync.Mutex
	refusals prometheus.Counter

	mu      sync.Mutex
	page    *page  // replaced, never changed; nil until it was read
	failed  string // fingerprint of the configured content that is not taken; empty: it is
	failure error  // why
}

// page is what one reading found.
type page struct {
	revision  int64
	active    map[string]*commonv1.Profile // by name
	names     []string                     // of all valid versions, in their order
	authority *recoveryv1.AuthorityProfiles
}

// NewBook checks the dependencies; it does not touch the database.
func NewBook(deps Deps) (*Book, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Default == "" {
		return nil, errors.New("profiles need a logger, a pool and the name of the default")
	}
	deps.RefreshEvery = cmp.Or(deps.RefreshEvery, time.Second)
	b := &Book{deps: deps, refusals: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "profile_unverified_total",
		Help: "Attempts to take the configured profile whose endpoints its trust did not verify.",
	})}
	if deps.Registerer != nil {
		if err := deps.Registerer.Register(b.refusals); err != nil {
			return nil, fmt.Errorf("register metrics of profiles: %w", err)
		}
	}
	return b, nil
}

// Name returns the name of the profile that a node has whose row has the given one.
func (b *Book) Name(name string) string { return cmp.Or(name, b.deps.Default) }

// Names returns the names of which there is a valid version, sorted, as of the last reading.
func (b *Book) Names() []string {
	if p := b.current(); p != nil {
		return p.names
	}
	return nil
}

// Default returns the active version of the default, as of the last reading; nil if there is none.
func (b *Book) Default() *commonv1.Profile {
	if p := b.current(); p != nil {
		return p.active[b.deps.Default]
	}
	return nil
}

// Active returns the active version of a name; empty: of the default. A name that is not known here is read once more,
// since another replica may have made it a moment ago.
func (b *Book) Active(ctx context.Context, name string) (*commonv1.Profile, error) {
	name = b.Name(name)
	if p := b.current(); p != nil && p.active[name] != nil {
		return p.active[name], nil
	}
	if err := b.Refresh(ctx); err != nil {
		return nil, err
	}
	if out := b.current().active[name]; out != nil {
		return out, nil
	}
	return nil, fault.New(commonv1.Reason_REASON_PROFILE_UNKNOWN, "no profile "+name+" is active",
		fault.Unmet("profile: the name of an active profile, as `gpuaas profiles list` shows them"))
}

// Authority returns the valid versions as replicas of nodeapi are sent them; nil before the first reading. It returns
// the same message until something has changed.
func (b *Book) Authority() *recoveryv1.AuthorityProfiles {
	if p := b.current(); p != nil {
		return p.authority
	}
	return nil
}

func (b *Book) current() *page {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.page
}

// Run reads what other replicas have changed until ctx ends: after events, which each change comes with, and every ten
// seconds. While no connection passes on events, and after an error, it reads every RefreshEvery.
func (b *Book) Run(ctx context.Context) error {
	failed := false
	for {
		numbered := b.deps.Numbered.C()
		err := b.Refresh(ctx)
		if err != nil && !failed && ctx.Err() == nil {
			b.deps.Logger.WarnContext(ctx, "the profiles cannot be read; those that were read before go on", obs.Err(err))
		}
		failed = err != nil
		if failed { // no event announces the end of the failure
			if !app.Sleep(ctx, b.deps.RefreshEvery) {
				return nil
			}
			continue
		}
		if !b.deps.Numbered.Pace(ctx, nil, numbered, b.deps.RefreshEvery) {
			return nil
		}
	}
}

// Refresh reads the versions again if their revision has changed.
func (b *Book) Refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	b.reading.Lock() // what was read later is kept
	defer b.reading.Unlock()
	revision, err := pg.Value[int64](ctx, b.deps.Pool, readHead)
	if err != nil {
		return fmt.Errorf("read the revision of profiles: %w", pg.Fault(err))
	}
	if p := b.current(); p != nil && p.revision == revision {
		return nil
	}
	// A change between the two reads is read again the next time: its revision is another.
	rows, err := pg.All[row](ctx, b.deps.Pool, readValid)
	if err != nil {
		return fmt.Errorf("read profiles: %w", pg.Fault(err))
	}
	read := pageOf(ctx, rows, revision)
	b.mu.Lock()
	b.page = read
	b.mu.Unlock()
	b.deps.Changed.Notify()
	return nil
}

// pageOf returns the page of rows in the order of their names. A version in a phase that this build does not know is
// reported by package aside: it is neither offered nor given, and the others are.
func pageOf(ctx context.Context, rows []row, revision int64) *page {
	p := &page{
		revision: revision, active: map[string]*commonv1.Profile{}, authority: &recoveryv1.AuthorityProfiles{},
	}
	offered := map[string]*recoveryv1.AuthorityProfile{} // by name
	known := map[string]bool{}
	for i := range rows {
		r := &rows[i]
		phase, err := names.Parse[recoveryv1.ProfilePhase](r.Phase)
		if err != nil {
			aside.Note(ctx, "profiles", r.ID, err)
			continue
		}
		known[r.Name] = true
		entry := &recoveryv1.AuthorityProfile{Profile: r.profile()}
		switch phase {
		case recoveryv1.ProfilePhase_PROFILE_PHASE_ACTIVE:
			p.active[r.Name], entry.Active = r.profile(), true
			if offered[r.Name] == nil {
				offered[r.Name] = entry
			}
		case recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED:
			offered[r.Name] = entry
		case recoveryv1.ProfilePhase_PROFILE_PHASE_UNSPECIFIED, recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRING,
			recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRED:
		}
		p.authority.Profiles = append(p.authority.Profiles, entry)
	}
	for _, entry := range p.authority.GetProfiles() {
		entry.Offered = offered[entry.GetProfile().GetName()] == entry
		if !entry.GetOffered() { // its fingerprint is all that is asked of it
			entry.Profile = &commonv1.Profile{
				Name: entry.GetProfile().GetName(), Fingerprint: entry.GetProfile().GetFingerprint(),
				Version: entry.GetProfile().GetVersion(),
			}
		}
	}
	p.names = slices.Sorted(maps.Keys(known))
	return p
}
