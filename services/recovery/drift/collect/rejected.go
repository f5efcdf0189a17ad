package collect

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// claim is a client that the ingress refused, with the identity that it claimed. Nothing of it is verified.
type claim struct {
	fact        *nodev1.IngressRejected
	at          time.Time // of the event
	version     int64
	correlation string
	// ours reports that it names a certificate that recovery has issued to that node, which counts and is in its time,
	// while the preflight of the authority has not found the ingress to trust what the authority issues.
	ours bool
	way  wayBack
}

func readRejected(r events.Record) (change, error) {
	f := &nodev1.IngressRejected{}
	if err := r.Decode(f); err != nil {
		return change{}, err
	}
	if !ids.Valid(f.GetClaimedNodeId()) {
		return change{}, nil
	}
	c := &claim{fact: f, at: r.CreatedAt, version: r.AggregateVersion, correlation: r.CorrelationID}
	return change{nodeID: f.GetClaimedNodeId(), claim: c, apply: func(n *Node) { n.rejected(c) }}, nil
}

// countingRow is a certificate that counts for a node and is in its time.
type countingRow struct {
	NodeID  string `db:"node_id" expr:"@.node_id::text"`
	Serial  string `db:"serial"`
	Issuer  string `db:"issuer_fingerprint"`
	Trusted bool   `db:"trusted" expr:"EXISTS (SELECT FROM recovery.ca_preflight p WHERE p.state = 'ok')"`
}

var countingSerials = pg.Define(pg.RoleRecovery, "drift.counting_serials", `
	SELECT `+pg.Columns[countingRow]("s")+` FROM recovery.serial s
	WHERE s.serial = ANY ($1::text[]) AND s.state IN ('current', 'next')
		AND s.not_before <= mesh.clock() AND s.not_after > mesh.clock()`)

// compareClaims compares what refused clients claimed with the certificates that recovery has issued. A claim of a
// certificate that counts means that the ingress refuses what it has to accept; or that the client has seen the
// certificate, and shows one of its own with the same numbers. While the preflight has proven that the ingress trusts
// what the authority issues it can only be the latter. It also looks up whether the nodes can enrol again by
// themselves.
func compareClaims(ctx context.Context, tx pgx.Tx, changes []change, nodes map[string]*Node) error {
	var serials []string
	for _, c := range changes {
		if c.claim != nil && c.claim.fact.GetSerial() != "" && nodes[c.nodeID] != nil {
			serials = append(serials, c.claim.fact.GetSerial())
		}
	}
	if len(serials) == 0 {
		return findWaysBack(ctx, tx, changes, nodes)
	}
	rows, err := pg.All[countingRow](ctx, tx, countingSerials, serials)
	if err != nil {
		return fmt.Errorf("read certificates that count: %w", err)
	}
	for _, c := range changes {
		if c.claim == nil {
			continue
		}
		f := c.claim.fact
		c.claim.ours = slices.ContainsFunc(rows, func(r countingRow) bool {
			return r.NodeID == c.nodeID && r.Serial == f.GetSerial() &&
				f.GetIssuerFingerprint() == r.Issuer && !r.Trusted
		})
	}
	return findWaysBack(ctx, tx, changes, nodes)
}

// evidence returns what a claim is evidence of, as it counts for fresh after the last rejection; false: of nothing that
// this build knows.
func (c *claim) evidence(fresh time.Duration) (drift.Evidence, bool) {
	f := c.fact
	e := drift.Evidence{
		NodeID: f.GetClaimedNodeId(), Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: drift.FromIngress,
		CorrelationID: c.correlation,
	}
	what := "unverified: a client that claims to be this node shows a certificate"
	if f.GetSerial() != "" {
		what += " with the serial " + f.GetSerial()
	}
	switch f.GetReason() { // the others are of a newer build
	case commonv1.Reason_REASON_CERTIFICATE_EXPIRED:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED
		e.Detail = what + ", which has expired"
	case commonv1.Reason_REASON_CERTIFICATE_UNTRUSTED:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED
		e.Detail = what + " of an issuer that the ingress does not trust, and which is not the node's current one"
		if c.ours {
			e.Part = commonv1.DriftPart_DRIFT_PART_AUTHORITY
			e.Reason = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
			e.Detail = what + ", as recovery has issued it; the ingress does not trust its issuer"
		}
	case commonv1.Reason_REASON_CERTIFICATE_INVALID:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED
		e.Detail = what + " that is not valid for a node of this mesh"
	default:
		return drift.Evidence{}, false
	}
	// The replica has these times by its estimate of the database's clock.
	last := c.at
	if at := f.GetLastSeenAt(); at != nil && at.AsTime().Before(last) {
		last = at.AsTime()
	}
	e.ObservedAt = last
	if at := f.GetFirstSeenAt(); at != nil && at.AsTime().Before(last) {
		e.ObservedAt = at.AsTime()
	}
	e.FreshUntil = last.Add(fresh)
	return e, true
}

// rejected keeps that the ingress refused a client that claims to be the node. One that was refused before the node was
// served, or heard last if it is not served, is over: a replica reports within a minute what it has refused since its
// last report. Of two claims about one part the worse one stays while it is fresh: a client that claims something
// else must not hide it. One that goes on is written again only when it would be stale soon.
func (n *Node) rejected(c *claim) {
	fresh := n.settings.RejectedFresh
	e, ok := c.evidence(fresh)
	if !ok {
		return
	}
	last := e.FreshUntil.Add(-fresh)
	if since, served := n.servedSince(); served && !last.After(since) || n.heardAt().After(last.Add(clockError)) {
		return
	}
	if e.ObservedAt.Before(n.heardAt()) {
		e.ObservedAt = last // the replica counts on from what it refused before the agent was heard
	}
	for _, old := range n.Evidence {
		if old.Part != e.Part || old.Source != e.Source || old.Reason == 0 || old.Stale(c.at) {
			continue
		}
		if drift.CompareRank(old.Reason, e.Reason) > 0 {
			return
		}
		if old.Reason == e.Reason && old.Detail == e.Detail {
			if e.FreshUntil.Sub(old.FreshUntil) < fresh/2 {
				return
			}
			e.ObservedAt, e.CorrelationID = old.ObservedAt, old.CorrelationID
		}
	}
	n.note(e, c.version)
	n.cannotReturn(c.way, e)
}

// servedSince returns since when a session has served the node, and whether one does.
func (n *Node) servedSince() (time.Time, bool) {
	for _, e := range n.Evidence {
		if e.Heard() && e.Reason == 0 {
			return e.ObservedAt, true
		}
	}
	return time.Time{}, false
}

// acceptedByIngress ends what the ingress refused before the node was served: its agent has a certificate that is
// accepted.
func (n *Node) acceptedByIngress(at time.Time) {
	for _, old := range n.Evidence {
		if old.Source == drift.FromIngress && old.Reason != 0 && !old.ObservedAt.After(at) {
			old.Evidence = drift.Evidence{NodeID: n.NodeID, Part: old.Part, Source: drift.FromIngress, ObservedAt: at}
		}
	}
}
