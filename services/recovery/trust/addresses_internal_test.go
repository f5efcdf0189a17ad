package trust

import (
	"strings"
	"testing"
)

// TestASummaryNamesItsSidesOnce: the replicas that refuse are named together, apart from the addresses of agents, and
// of many only some.
func TestASummaryNamesItsSidesOnce(t *testing.T) {
	replica := func(id, address string) *target {
		out := &target{address: address}
		out.replica.ReplicaID = id
		return out
	}
	c := &check{targets: []*target{
		replica("r1", "10.0.0.1:1"), replica("r2", "10.0.0.2:1"), {address: "agents.example:8443"},
	}}
	const want = "authority: it signs with an issuer that is not known now, which the replicas of nodeapi r1 " +
		"(10.0.0.1:1), r2 (10.0.0.2:1) and the address that agents use (agents.example:8443) refuse; they trust the " +
		"issuer from before, abc; no certificate is issued"
	if got := summary(authoritySide, preflightRow{TrustedIssuer: "abc"}, c,
		[]string{"10.0.0.1:1", "10.0.0.2:1", "agents.example:8443"}); got != want {
		t.Errorf("%s", got)
	}
	const one = "ingress: the replica of nodeapi r1 (10.0.0.1:1) refuses an issuer that is not known, with which the " +
		"authority signs; no certificate is issued"
	if got := summary(ingressSide, preflightRow{}, c, []string{"10.0.0.1:1"}); got != one {
		t.Errorf("%s", got)
	}
	many := make([]string, mostNamed+3)
	if got := addresses(&check{}, many); !strings.HasSuffix(got, " and 3 more") {
		t.Errorf("%s", got)
	}
}
