package ingress

import (
	"container/list"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// every is the shortest time between two events of one claimed node and reason.
	every = time.Minute
	// forgetAfter is how long after its last rejection a claimed node and reason begin anew.
	forgetAfter = 10 * time.Minute
	// pace is the shortest time between two writes.
	pace = time.Second
)

// Metrics counts rejections, by reasons of a closed set.
type Metrics interface {
	IngressRejected(reason string)
	IngressForgotten()
}

// Deps is what Rejections work with.
type Deps struct {
	Logger      *slog.Logger
	DB          *pgxpool.Pool
	ReplicaID   string
	TrustDomain string
	// Known reports whether recovery has an identity of this id. It must not block.
	Known func(nodeID string) bool
	// Now returns the database's time, by this replica's estimate.
	Now func() time.Time
	// Wake notifies this process's sequencer of new events.
	Wake    func()
	Metrics Metrics
}

// Rejections are the rejections of one replica. Safe for concurrent use.
type Rejections struct {
	deps    Deps
	elapsed func() time.Time // the monotonic clock
	poke    chan struct{}

	mu      sync.Mutex
	known   *part // claims of nodes that recovery knows
	unknown *part // all others, those that name no node among them
}

// part is a bounded set of rejections, with its bound of events.
type part struct {
	most     int // entries
	perWrite int
	entries  map[key]*entry
	recent   *list.List // of *entry, the one that was seen last at the front
	waiting  []*entry   // for their event, in the order in which they began to wait
}

type key struct {
	claimed string // the node, or the names of a certificate that names none
	reason  commonv1.Reason
}

// entry is what was seen of one claimed node for one reason.
type entry struct {
	key

	fact    *nodev1.IngressRejected
	place   *list.Element // nil once it is forgotten
	seenAt  time.Time     // the last one; monotonic
	written time.Time     // zero: never
	waits   bool
}

// New makes an empty set of rejections. Nothing is written before Run.
func New(deps Deps) *Rejections {
	return &Rejections{
		deps: deps, elapsed: time.Now, poke: make(chan struct{}, 1),
		known:   newPart(8192, 256),
		unknown: newPart(256, 2),
	}
}

func newPart(most, perWrite int) *part {
	return &part{most: most, perWrite: perWrite, entries: map[key]*entry{}, recent: list.New()}
}

// reasonOf returns the reason under which recovery learns of a rejection; false: it was not for a certificate.
func reasonOf(r pki.RejectReason) (commonv1.Reason, bool) {
	switch r { // all others are no fault of a certificate
	case pki.RejectExpired:
		return commonv1.Reason_REASON_CERTIFICATE_EXPIRED, true
	case pki.RejectUnknownAuthority:
		return commonv1.Reason_REASON_CERTIFICATE_UNTRUSTED, true
	case pki.RejectNotYetValid, pki.RejectWrongUsage, pki.RejectWrongKind, pki.RejectIdentity, pki.RejectCertificate:
		return commonv1.Reason_REASON_CERTIFICATE_INVALID, true
	default:
		return 0, false
	}
}

// Refused takes a refused handshake. It does not block.
func (r *Rejections) Refused(rejected pki.Reject) {
	reason, ok := reasonOf(rejected.Reason)
	if !ok {
		return
	}
	r.deps.Metrics.IngressRejected(names.Of(reason))
	claimed := rejected.Claimed
	nodeID := ""
	if id := claimed.ID; id.Kind == pki.KindNode && id.TrustDomain == r.deps.TrustDomain && ids.Valid(id.Name) {
		nodeID = id.Name
	}
	known := nodeID != "" && r.deps.Known(nodeID)
	now, at := r.deps.Now(), r.elapsed()
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.unknown
	if known {
		p = r.known
	}
	k := key{claimed: nodeID, reason: reason}
	if nodeID == "" {
		k.claimed = claimed.SAN
	}
	e := p.entries[k]
	if e != nil && at.Sub(e.seenAt) > forgetAfter {
		p.forget(e)
		e = nil
	}
	if e == nil {
		e = r.begin(p, k, nodeID, now)
	}
	e.seenAt = at
	p.recent.MoveToFront(e.place)
	f := e.fact
	f.ClaimedSan, f.Serial, f.IssuerFingerprint = claimed.SAN, claimed.Serial, claimed.Issuer
	f.Detail, f.RemoteAddress = detailOf(rejected), addressOf(rejected.Remote)
	f.Count++
	if last := f.GetLastSeenAt(); last == nil || now.After(last.AsTime()) {
		f.LastSeenAt = timestamppb.New(now)
	}
	if !e.waits {
		p.wait(e)
		r.wake()
	}
}

func (r *Rejections) begin(p *part, k key, nodeID string, now time.Time) *entry {
	if p.recent.Len() >= p.most {
		if oldest, ok := p.recent.Back().Value.(*entry); ok {
			p.forget(oldest)
			r.deps.Metrics.IngressForgotten()
		}
	}
	name := r.deps.ReplicaID + "\x00" + k.claimed + "\x00" + names.Of(k.reason)
	e := &entry{key: k, fact: &nodev1.IngressRejected{
		RejectionId: uuid.NewSHA1(uuid.NameSpaceURL, []byte("gpuaas:ingress-rejection:"+name)).String(),
		ReplicaId:   r.deps.ReplicaID, ClaimedNodeId: nodeID, Reason: k.reason, FirstSeenAt: timestamppb.New(now),
	}}
	e.place = p.recent.PushFront(e)
	p.entries[k] = e
	return e
}

// wait adds an entry to those that wait for their event. While no write comes to its end, those that were forgotten
// meanwhile are taken out from time to time.
func (p *part) wait(e *entry) {
	if len(p.waiting) >= 2*p.most {
		p.waiting = slices.DeleteFunc(p.waiting, func(e *entry) bool { return e.place == nil })
	}
	e.waits = true
	p.waiting = append(p.waiting, e)
}

func (p *part) forget(e *entry) {
	p.recent.Remove(e.place)
	delete(p.entries, e.key)
	e.place = nil
}

func (r *Rejections) wake() {
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

// detailOf returns what is wrong with the certificate, in words of ours.
func detailOf(r pki.Reject) string {
	detail := string(r.Reason)
	if r.Reason == pki.RejectExpired || r.Reason == pki.RejectNotYetValid {
		detail = fmt.Sprintf("%s: the certificate is valid from %s", detail, r.Claimed.Validity)
	}
	return detail + " (claimed by a client that proved nothing)"
}

// addressOf returns an address without its port, which differs with each connection.
func addressOf(remote string) string {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		return ""
	}
	return host
}
