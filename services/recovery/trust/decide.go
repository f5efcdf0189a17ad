package trust

import (
	"fmt"
	"slices"
	"strings"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

// The states of the preflight.
const (
	unknown  = recoveryv1.PreflightState_PREFLIGHT_STATE_UNKNOWN
	agree    = recoveryv1.PreflightState_PREFLIGHT_STATE_OK
	mismatch = recoveryv1.PreflightState_PREFLIGHT_STATE_MISMATCH
)

// The sides of a mismatch.
const (
	authoritySide = recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY
	ingressSide   = recoveryv1.TrustSide_TRUST_SIDE_INGRESS
)

// inARow is how many checks in a row must find the same before it counts.
const inARow = 2

// lately is how many of an address's last checks are remembered. A balancer in front of two proxies, of which one
// refuses, may never refuse twice in a row: two refusals among these begin a mismatch too.
const lately = 5

// streaks are what the checks have found. They are of one holder of the lease: another begins anew.
type streaks struct {
	refused map[string]int // by address, in a row
	trusted map[string]int
	recent  map[string][]outcome // by address: the last checks, at most lately
	// mixed are addresses that have refused, accepted and refused again lately. They must accept in all of lately.
	mixed   map[string]bool
	nothing int // checks that have proven nothing
}

// outcome of one handshake.
type outcome = recoveryv1.HandshakeOutcome

// add counts a check.
func (s *streaks) add(c *check) {
	refusals, accepts := map[string]int{}, map[string]int{}
	recent, mixed := map[string][]outcome{}, map[string]bool{}
	for _, t := range c.targets {
		switch t.outcome {
		case canary.Refused:
			refusals[t.address] = s.refused[t.address] + 1
		case canary.Trusted:
			accepts[t.address] = s.trusted[t.address] + 1
		default:
		}
		list := append(slices.Clone(s.recent[t.address]), t.outcome)
		recent[t.address] = list[max(len(list)-lately, 0):]
		mixed[t.address] = s.mixed[t.address] && accepts[t.address] < lately || alternates(recent[t.address])
	}
	s.refused, s.trusted, s.recent, s.mixed = refusals, accepts, recent, mixed
	if c.result() == unknown {
		s.nothing++
	} else {
		s.nothing = 0
	}
}

// alternates reports whether there is an acceptance between two refusals.
func alternates(list []outcome) bool {
	first := slices.Index(list, canary.Refused)
	if first < 0 {
		return false
	}
	accepted := slices.Index(list[first:], canary.Trusted)
	return accepted >= 0 && slices.Contains(list[first+accepted:], canary.Refused)
}

// accepts reports whether an address has accepted often enough after it refused.
func (s *streaks) accepts(address string) bool {
	if s.mixed[address] {
		return false
	}
	return s.trusted[address] >= inARow
}

// refusing returns the addresses that have refused often enough, sorted.
func (s *streaks) refusing() []string {
	var out []string
	for address := range s.recent {
		if s.refused[address] >= inARow || s.mixed[address] {
			out = append(out, address)
		}
	}
	slices.Sort(out)
	return out
}

// concluded returns the state that follows from the checks for a preflight that is in the given state. Out of a
// mismatch leads only that each address that refused, and is still one of the ingress, has accepted often enough.
func (s *streaks) concluded(row preflightRow, c *check) (recoveryv1.PreflightState, []string) {
	if refusing := s.refusing(); len(refusing) > 0 {
		return mismatch, refusing
	}
	accepted := false
	for _, count := range s.trusted {
		accepted = accepted || count >= inARow
	}
	if row.State == stateMismatch {
		for _, t := range c.targets {
			if slices.Contains(row.RefusedBy, t.address) && !s.accepts(t.address) {
				return mismatch, row.RefusedBy
			}
		}
		if !accepted || len(s.refused) > 0 {
			return mismatch, row.RefusedBy
		}
		return agree, nil
	}
	switch {
	case accepted && len(s.refused) == 0:
		return agree, nil
	case s.nothing >= inARow:
		return unknown, nil
	}
	return stateOf(row.State), nil
}

// undecided reports whether the next check may come to another state, so that it is made soon.
func (s *streaks) undecided(row preflightRow) bool {
	switch row.State {
	case stateMismatch:
		return len(s.refused) == 0 && len(s.trusted) > 0
	case stateOK:
		return s.refusedLately() || s.nothing > 0 && s.nothing < inARow
	}
	return len(s.refused) > 0 || len(s.trusted) > 0
}

// refusedLately reports whether any address has.
func (s *streaks) refusedLately() bool {
	for _, list := range s.recent {
		if slices.Contains(list, canary.Refused) {
			return true
		}
	}
	return false
}

// side returns which side of a mismatch has changed since the ingress was last seen to trust an issuer. If some of the
// ingress trusts the issuer the rest of it is at fault.
func side(row preflightRow, c *check) recoveryv1.TrustSide {
	switch {
	case len(c.with(canary.Trusted)) > 0:
		return ingressSide
	case c.authority == nil || row.TrustedIssuer == "":
		return recoveryv1.TrustSide_TRUST_SIDE_UNSPECIFIED
	case c.authority.fingerprint() == row.TrustedIssuer:
		return ingressSide
	}
	return authoritySide
}

// What the summary of a mismatch begins with, if it is known which side has changed.
const (
	OfAuthority = "authority: "
	OfIngress   = "ingress: "
)

// The next actions of a mismatch, by the side that has changed.
const (
	NextAuthority = "repair the authority: give it back the signing material that the ingress trusts, or have the " +
		"ingress trust its present root as well (`gpuaas ca status`, then `gpuaas ca repair --root FINGERPRINT`); then " +
		"enrol only the nodes that are still refused"
	NextIngress = "repair the ingress: have it trust the root of the authority again at the addresses that `gpuaas ca " +
		"status` names, by its file or by `gpuaas ca repair --root FINGERPRINT`; then enrol only the nodes that are " +
		"still refused"
	nextUnknown = "compare both sides with `gpuaas ca status`, and have the ingress trust the root of the authority " +
		"(`gpuaas ca repair --root FINGERPRINT`); then enrol only the nodes that are still refused"
)

// nextAction returns what a person does about a mismatch.
func nextAction(s recoveryv1.TrustSide) string {
	switch s {
	case authoritySide:
		return NextAuthority
	case ingressSide:
		return NextIngress
	default:
		return nextUnknown
	}
}

// mostNamed bounds the addresses that a summary names.
const mostNamed = 8

// summary describes a mismatch.
func summary(side recoveryv1.TrustSide, row preflightRow, c *check, refusing []string) string {
	issuer := "an issuer that is not known"
	if c.authority != nil {
		issuer = short(c.authority.fingerprint())
	}
	where, refuse, trust := addresses(c, refusing), "refuse", "they trust"
	if len(refusing) == 1 {
		refuse, trust = "refuses", "it trusts"
	}
	switch side {
	case authoritySide:
		return fmt.Sprintf("%sit signs with %s now, which %s %s; %s the issuer from before, %s; no certificate is issued",
			OfAuthority, issuer, where, refuse, trust, short(row.TrustedIssuer))
	case ingressSide:
		return fmt.Sprintf("%s%s %s %s, with which the authority signs; no certificate is issued", OfIngress, where, refuse,
			issuer)
	default:
		return fmt.Sprintf("the authority signs with %s, which %s %s; they were never seen to agree; no certificate "+
			"is issued", issuer, where, refuse)
	}
}

// addresses names the targets at addresses: the replicas of nodeapi together, with their addresses, then those that are
// no replica's, which agents are told to connect to.
func addresses(c *check, list []string) string {
	var replicas, others []string
	for _, address := range list[:min(len(list), mostNamed)] {
		i := slices.IndexFunc(c.targets, func(t *target) bool {
			return t.address == address && t.replica.ReplicaID != ""
		})
		if i >= 0 {
			replicas = append(replicas, c.targets[i].replica.ReplicaID+" ("+address+")")
		} else {
			others = append(others, address)
		}
	}
	var out []string
	for _, each := range []struct {
		one, several string
		names        []string
	}{
		{"the replica of nodeapi %s", "the replicas of nodeapi %s", replicas},
		{"the address that agents use (%s)", "the addresses that agents use (%s)", others},
	} {
		switch len(each.names) {
		case 0:
		case 1:
			out = append(out, fmt.Sprintf(each.one, each.names[0]))
		default:
			out = append(out, fmt.Sprintf(each.several, strings.Join(each.names, ", ")))
		}
	}
	if more := len(list) - mostNamed; more > 0 {
		out = append(out, fmt.Sprintf("%d more", more))
	}
	return strings.Join(out, " and ")
}

// short returns the beginning of a fingerprint, by which people compare.
func short(fingerprint string) string {
	if len(fingerprint) > 16 {
		return fingerprint[:16]
	}
	return fingerprint
}
