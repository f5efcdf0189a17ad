package session

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// Opening a stream costs recovery a look into its tables, so it is rationed. A node must not pay for what others do
// with its name, and a copy of one of its keys is a case that happens. Three budgets keep them apart:
//
//   - proven, of a certificate: for a stream that shows the signed join state that counts now, or one that is newer
//     than this replica has heard of. A holder of a key alone has none, however often it asks.
//   - unproven, of a certificate and a source address: for everything else, such as an agent that lost its join state.
//     recovery challenges or refuses these.
//   - refused, of a certificate: in place of unproven once recovery has refused the serial. It is the smallest.
//
// Two cases cannot be told apart. A node that was never admitted has no join state yet, and shares the unproven budget
// with a holder of its key who comes from the same address. A copy of the newest join state is the node for all that
// anybody knows: it is admitted, and found when the node comes back.
type budgets struct {
	proven, unproven, refused *opens
	often, oftenUnproven      *opens // of nodes that are shut out or have a short certificate, in place of proven and unproven

	mu      sync.Mutex
	marked  *lru[openKey, time.Time] // certificates whose serial recovery refused, and when it last did
	waiting map[openKey][]*roster.Session
}

const (
	// oftenEvery is how often a node may open that is shut out, or whose certificate lives for less than shortLife: it is below
	// every wait that a node that is shut out is told, and at one open in ten seconds a certificate of twenty would be replaced
	// too late.
	oftenEvery = 2 * time.Second
	shortLife  = time.Minute
	// refusedEvery is the pace of a serial that recovery refused. Its holder is told to renew or to recover, never to
	// ask again with it.
	refusedEvery = 30 * time.Second
	// refusedFor is how long a refusal is remembered after the last of them.
	refusedFor = 10 * time.Minute
	// mostWaiting is how many streams of one certificate may be without their Hello at once. The oldest of more is
	// closed: a Hello follows its stream within a round trip, so whoever waits longest is the least likely to be an
	// agent.
	mostWaiting = 64
)

func newBudgets(lim Limits) *budgets {
	often := min(lim.OpenEvery, oftenEvery)
	return &budgets{
		proven: newOpens(lim.OpenBurst, lim.OpenEvery), unproven: newOpens(lim.OpenBurst, lim.OpenEvery),
		refused: newOpens(1, max(lim.OpenEvery, refusedEvery)),
		often:   newOpens(lim.OpenBurst, often), oftenUnproven: newOpens(lim.OpenBurst, often),
		marked: newLRU[openKey, time.Time](mostKeys), waiting: map[openKey][]*roster.Session{},
	}
}

// payer is who opens a stream.
type payer struct {
	node, serial, source string
	often                bool // the node may not be admitted now, or its certificate is short
}

func (p payer) certificate() openKey { return openKey{node: p.node, serial: p.serial} }

// budget returns which budget a stream is charged to, and under which key.
func (b *budgets) budget(p payer, proven bool, now time.Time) (*opens, openKey) {
	switch {
	case proven && p.often:
		return b.often, p.certificate()
	case proven:
		return b.proven, p.certificate()
	case b.isRefused(p.certificate(), now):
		return b.refused, p.certificate()
	case p.often:
		return b.oftenUnproven, openKey{p.node, p.serial, p.source}
	}
	return b.unproven, openKey{p.node, p.serial, p.source}
}

// exhausted returns how long to wait if nothing is left in either budget that the stream could be charged to, before
// its Hello is read; else zero.
func (b *budgets) exhausted(p payer, now time.Time) time.Duration {
	proven, key := b.budget(p, true, now)
	least := proven.peek(key, now)
	if least == 0 {
		return 0
	}
	unproven, key := b.budget(p, false, now)
	return min(least, unproven.peek(key, now))
}

// charge takes one opening from the budget of a stream, or returns how long to wait.
func (b *budgets) charge(p payer, proven bool, now time.Time) time.Duration {
	budget, key := b.budget(p, proven, now)
	return budget.take(key, now)
}

// judged notes what recovery decided about a certificate. Only refusals that follow from the serial alone count
// against it: everything else in a Hello is up to whoever sends it.
func (b *budgets) judged(p payer, err error, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch fault.ReasonOf(err) { //nolint:exhaustive // the others do not follow from the serial alone
	case commonv1.Reason_REASON_SERIAL_UNKNOWN, commonv1.Reason_REASON_SERIAL_SUPERSEDED:
		b.marked.put(p.certificate(), now)
	default:
		if err == nil {
			b.marked.remove(p.certificate())
		}
	}
}

func (b *budgets) isRefused(certificate openKey, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.marked.trim(func(at time.Time) bool { return now.Sub(at) > refusedFor })
	_, refused := b.marked.get(certificate)
	return refused
}

// wait notes a stream that has not sent its Hello, and closes the oldest one where there are too many. The returned
// function ends the waiting.
func (b *budgets) wait(p payer, s *roster.Session) func() {
	key := p.certificate()
	b.mu.Lock()
	b.waiting[key] = append(b.waiting[key], s)
	var oldest *roster.Session
	if all := b.waiting[key]; len(all) > mostWaiting {
		oldest, b.waiting[key] = all[0], slices.Delete(all, 0, 1)
	}
	b.mu.Unlock()
	if oldest != nil {
		oldest.Close(fault.ToDenial(rateLimited(refusedEvery), ""))
	}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		rest := slices.DeleteFunc(b.waiting[key], func(other *roster.Session) bool { return other == s })
		if len(rest) == 0 {
			delete(b.waiting, key)
			return
		}
		b.waiting[key] = rest
	})
}

func rateLimited(wait time.Duration) error {
	const public = "this certificate opens streams too often"
	return fault.New(commonv1.Reason_REASON_RATE_LIMITED, public, fault.RetryAfter(wait))
}

// sourceOf returns what counts as one source: an IPv4 address, or a network of 64 bits, which is what one machine may
// choose from in IPv6.
func sourceOf(remote string) string {
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return remote
	}
	addr := at.Addr().Unmap()
	bits := addr.BitLen()
	if addr.Is6() {
		bits = 64
	}
	network, err := addr.WithZone("").Prefix(bits)
	if err != nil {
		return addr.String()
	}
	return network.String()
}

// isProven reports whether a Hello shows the join state that counts now: signed by recovery for this instance of the
// node, and not older than the last generation that this replica knows to be confirmed. A view that lags behind
// recovery takes an older state for the present one for a moment, never the present one for an older.
func (s *Server) isProven(hello *nodev1.Hello) bool {
	if s.cfg.JoinStates == nil {
		return false
	}
	state, err := s.cfg.JoinStates.Verify(hello.GetJoinState())
	if err != nil || state.NodeID != hello.GetNodeId() || state.NodeInstanceID != hello.GetNodeInstanceId() {
		return false
	}
	known := s.deps.View.Get(hello.GetNodeId())
	return known == nil ||
		(known.GetNodeInstanceId() == state.NodeInstanceID && state.Generation >= known.GetConfirmed())
}
