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

// budgets ration the openings of streams, each of which costs recovery a read of its tables. Another client that uses a
// node's name, such as the holder of a copy of its key, must not use up the node's openings. Three budgets keep them
// apart:
//
//   - unproven, of a certificate and a source address: for any stream. An agent that comes back once in a while needs
//     no other.
//   - proven, of a certificate: once unproven is used up, for a stream that shows the signed join state that counts
//     now, or one that is newer than this replica has heard of. A holder of a key alone has none, however often it
//     asks.
//   - refused, of a certificate: in place of unproven once recovery has refused the serial. It is the smallest.
//
// Two cases cannot be kept apart. A node that was never admitted has no join state yet, and shares the unproven budget
// with a holder of its key who comes from the same address. A copy of the newest join state cannot be distinguished
// from the node: it is admitted, and detected when the node comes back.
type budgets struct {
	proven, unproven, refused *opens
	// often and oftenUnproven are used in place of proven and unproven for nodes that are shut out or have a short
	// certificate.
	often, oftenUnproven *opens

	mu      sync.Mutex
	marked  *lru[openKey, time.Time] // certificates whose serial recovery refused, and when it last did
	waiting map[openKey][]*roster.Session
}

const (
	// oftenEvery is the interval at which a node may open streams if it is shut out, or if its certificate lives for less
	// than shortLife. It is below every wait that a denial gives a node that is shut out; and at one stream in ten seconds
	// a certificate of twenty seconds would be replaced too late.
	oftenEvery = 2 * time.Second
	shortLife  = time.Minute
	// refusedEvery is the interval at which a serial that recovery refused may open streams. Its holder is told to renew
	// or to recover, never to try the same serial again.
	refusedEvery = 30 * time.Second
	// refusedFor is how long a serial counts as refused after its last refusal.
	refusedFor = 10 * time.Minute
	// mostWaiting is how many streams of one certificate may be without their Hello at once. Above that the oldest is
	// closed: a Hello follows its stream within a round trip, so the stream that has waited longest is the least likely to
	// be an agent's.
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

// payer identifies the client that opens a stream.
type payer struct {
	node, serial, source string
	often                bool // the node may not be admitted now, or its certificate is short
}

func (p payer) certificate() openKey { return keyOf(p.node, p.serial, "") }

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
		return b.oftenUnproven, keyOf(p.node, p.serial, p.source)
	}
	return b.unproven, keyOf(p.node, p.serial, p.source)
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

// charge takes one opening from a budget of a stream and returns zero, or returns how long to wait. It calls proven,
// which verifies a signature, only if the unproven budget is used up or the certificate was refused.
func (b *budgets) charge(p payer, proven func() bool, now time.Time) time.Duration {
	if !b.isRefused(p.certificate(), now) {
		budget, key := b.budget(p, false, now)
		if budget.take(key, now) == 0 {
			return 0
		}
	}
	budget, key := b.budget(p, proven(), now)
	return budget.take(key, now)
}

// noteDecision records recovery's decision about a certificate. Only refusals that follow from the serial alone count
// against it: the sender of a Hello chooses everything else in it.
func (b *budgets) noteDecision(p payer, err error, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch fault.ReasonOf(err) { // the others do not follow from the serial alone
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

// wait registers a stream that has not sent its Hello, and closes the oldest such stream of the certificate if there
// are more than mostWaiting. The returned function removes the stream.
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

// sourceOf returns the source of a remote address: an IPv4 address, or a /64 network in IPv6, from which one machine
// may choose any address.
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
// node, and not older than the last generation that this replica knows to be confirmed. While the view lags behind
// recovery an older state may count as the present one for a moment; the present one never counts as older.
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
