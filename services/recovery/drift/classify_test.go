package drift_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// TestEveryReasonHasEvidenceThatProvesIt: for each reason, evidence that gives it, and what people see then. Fault:
// each row of the failure matrix that a node shows.
func TestEveryReasonHasEvidenceThatProvesIt(t *testing.T) {
	seen := map[commonv1.DriftReason]bool{unspecified: true}
	for name, c := range map[string]struct {
		evidence []drift.Evidence
		reason   commonv1.DriftReason
		state    commonv1.UserState
		severity commonv1.Severity
		owner    string
		next     string
		detect   time.Duration
		recover  time.Duration
	}{
		"agent is silent for longer than the threshold": {
			evidence: []drift.Evidence{active, isDown, admitted}, reason: agentDown, state: temporary, severity: p2,
			owner: "agent / host", next: "wait for the agent; if it stays away, restart it on its host",
			detect: 5 * time.Minute, recover: 24 * time.Hour,
		},
		"certificate is expired": {
			evidence: []drift.Evidence{isDown, saw(ingress, certificate, certExpired)}, reason: certExpired,
			state: recovering, severity: p1, owner: "agent", next: "wait: the agent recovers with its recovery token",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"identity is rejected": {
			evidence: []drift.Evidence{isLost, saw(ingress, certificate, rejected)}, reason: rejected,
			state: recovering, severity: p1, owner: "recovery",
			next:   "wait: the node enrols again, a bounded number of times",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"ingress refuses the certificate of a node that is away": {
			evidence: []drift.Evidence{active, isLost, saw(ingress, authority, certUntrusted)}, reason: certUntrusted,
			state: operator, severity: p0, owner: "control plane",
			next:   "repair what the ingress trusts first, then enrol only the nodes that still need it",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"host names endpoints of another mesh": {
			evidence: []drift.Evidence{active, isDown, saw(host, endpoint, endpointDrift)}, reason: endpointDrift,
			state: operator, severity: p1, owner: "profile",
			next:   "issue a bundle (`gpuaas nodes bundle NODE`): the node's endpoints are not those of this mesh",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"host does not trust the server": {
			evidence: []drift.Evidence{active, isDown, saw(host, authority, tlsUntrusted)}, reason: tlsUntrusted,
			state: recovering, severity: p1, owner: "profile",
			next: "wait for the recovery by pinned trust; if it does not come, issue a bundle " +
				"(`gpuaas nodes bundle NODE`)",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"host trusts neither the server nor recovery": {
			evidence: []drift.Evidence{isDown, saw(host, authority, tlsUntrusted), saw(host, endpoint, blocked)},
			reason:   blocked, state: operator, severity: p1, owner: "profile",
			next: "repair what the evidence names, such as the node's profile, or issue a bundle " +
				"(`gpuaas nodes bundle NODE`)",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"policy leaves recovery to operators": {
			evidence: []drift.Evidence{
				isDown, saw(host, authority, tlsUntrusted), saw(drift.FromEnrolment, certificate, blocked),
			},
			reason: blocked, state: operator, severity: p1, owner: "operator",
			next: "issue a bundle for the node (`gpuaas nodes bundle NODE`), or set node.auto_recovery to true: its " +
				"agent asks within an hour",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"certificate is expired and no token is left": {
			evidence: []drift.Evidence{
				isDown, saw(ingress, certificate, certExpired), saw(host, certificate, tokenMissing),
			},
			reason: tokenMissing, state: operator, severity: p1, owner: "operator",
			next: "issue a bundle (`gpuaas nodes bundle NODE`): the node has no recovery token " +
				"that may still be used",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"tasks expired in the queue": {
			evidence: []drift.Evidence{active, isHeard, saw(drift.FromTasks, tasks, backlog)}, reason: backlog, state: temporary,
			severity: p2, owner: "lifecycle", next: "wait: the next sweep ends what has expired",
			detect: 5 * time.Minute, recover: 24 * time.Hour,
		},
		"identity is quarantined": {
			evidence: []drift.Evidence{detail(saw(identity, certificate, revoked), "quarantined"), isHeard},
			reason:   revoked, state: operator, severity: p0, owner: "security",
			next:   "reactivate the node; to enrol it again, issue a bundle then (`gpuaas nodes bundle NODE`)",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"identity is fenced": {
			evidence: []drift.Evidence{detail(saw(identity, certificate, revoked), drift.DetailFenced), isLost},
			reason:   revoked, state: operator, severity: p0, owner: "security",
			next: "reactivate with the security role; to enrol it again, issue a bundle then " +
				"(`gpuaas nodes bundle NODE`)",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"identity is retired": {
			evidence: []drift.Evidence{detail(saw(identity, certificate, revoked), drift.DetailRetired)},
			reason:   revoked, state: operator, severity: p0, owner: "security",
			next:   "none: this identity is final; enrol the machine anew if it is to return",
			detect: time.Minute,
		},
		"identity is copied": {
			evidence: []drift.Evidence{saw(identity, certificate, cloned), isHeard}, reason: cloned, state: securityDue,
			severity: p0, owner: "security",
			next:   "fence the node, find the second copy, and give the machine a new identity",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"host's clock is wrong": {
			evidence: []drift.Evidence{
				isDown, saw(host, hostPart, clockSkew), saw(host, certificate, certExpired),
			},
			reason: clockSkew, state: operator, severity: p1, owner: "host",
			next:   "set the host's clock right; certificates are judged again after that",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"edge limits the agent": {
			evidence: []drift.Evidence{isDown, saw(host, endpoint, rateLimited)}, reason: rateLimited, state: temporary,
			severity: p2, owner: "edge",
			next:   "wait: the agent asks less often; if it stays, repair the rule of the edge",
			detect: 5 * time.Minute, recover: 24 * time.Hour,
		},
		"address of the node changed": {
			evidence: []drift.Evidence{isHeard, saw(session, endpoint, networkFacts)}, reason: networkFacts,
			state: normal, severity: p2, owner: "recovery",
			next:   "none: the present addresses are recorded, and the next sweep ends this",
			detect: 30 * time.Minute, recover: 24 * time.Hour,
		},
		"agent is old": {
			evidence: []drift.Evidence{isHeard, saw(session, endpoint, version)}, reason: version, state: normal,
			severity: p2, owner: "rollout",
			next: "update the agent", detect: 30 * time.Minute, recover: 24 * time.Hour,
		},
		"agent is too old for the work": {
			evidence: []drift.Evidence{isHeard, saw(drift.FromTasks, tasks, version)}, reason: version, state: operator,
			severity: p2, owner: "rollout",
			next: "update the agent", detect: 30 * time.Minute, recover: 24 * time.Hour,
		},
		"driver changed under a placed node": {
			evidence: []drift.Evidence{isHeard, saw(session, hostPart, hostRuntime)}, reason: hostRuntime, state: operator,
			severity: p1, owner: "provider",
			next: "diagnose the node, then repair or reimage it; `gpuaas nodes accept-facts " +
				"NODE --reason TEXT` if the change was meant",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"no replica listens": {
			evidence: []drift.Evidence{active, isDown, noServer}, reason: outage, state: temporary, severity: p1,
			owner:  "control plane",
			next:   "none at the node: no replica of nodeapi listens; restore the control plane",
			detect: time.Minute, recover: time.Hour,
		},
		"database went back": {
			evidence: []drift.Evidence{active, isHeard, ofAll(saw(rollback, ofControl, rolledBack))},
			reason:   rolledBack, state: operator, severity: p0, owner: "control plane",
			next:   "none at the node: follow docs/restore.md (`gpuaas rollback status`)",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"nothing tells whether the agent is heard": {
			evidence: []drift.Evidence{active}, reason: unreachable, state: temporary, severity: p1, owner: "unknown",
			next:   "collect the host's diagnostics: nothing that is known names a cause",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"identity is on hold": {
			evidence: []drift.Evidence{saw(identity, certificate, held), isLost}, reason: held, state: operator,
			severity: p1, owner: "operator",
			next:   "look at the reason of the hold, then reactivate, quarantine or fence",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"join state is lost": {
			evidence: []drift.Evidence{saw(identity, certificate, joinStateLost), isLost}, reason: joinStateLost,
			state: operator, severity: p1, owner: "operator",
			next:   "let the node recover, or issue a bundle (`gpuaas nodes bundle NODE`)",
			detect: 5 * time.Minute, recover: time.Hour,
		},
		"token was used with two keys": {
			evidence: []drift.Evidence{saw(identity, certificate, tokenReuse)}, reason: tokenReuse, state: securityDue,
			severity: p0, owner: "security", next: "fence the node: its enrolment token was used with two keys",
			detect: time.Minute, recover: 15 * time.Minute,
		},
		"gate is closed to a connected node": {
			evidence: []drift.Evidence{active, isHeard, saw(gate, tasks, notAdmitted)}, reason: notAdmitted,
			state: temporary, severity: p2, owner: "lifecycle", next: "wait: lifecycle has yet to open its gate",
			detect: 5 * time.Minute, recover: 24 * time.Hour,
		},
		"disk of the agent is full": {
			evidence: []drift.Evidence{isHeard, detail(saw(gate, hostPart, diskFull), "/var/lib/agent: 2 MiB free")},
			reason:   diskFull, state: operator, severity: p1, owner: "agent / host",
			next:   "free room on its disk, in /var/lib/agent: 2 MiB free",
			detect: 5 * time.Minute, recover: time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := drift.Verdict{
				Reason: c.reason, UserState: c.state, Severity: c.severity, Owner: c.owner, NextAction: c.next,
				DetectWithin: c.detect, RecoverWithin: c.recover, At: now,
			}
			for _, e := range c.evidence {
				if e.Reason == c.reason {
					want.ObservedAt, want.CorrelationID = e.ObservedAt, e.CorrelationID
				}
			}
			if diff := cmp.Diff(want, drift.Classify(c.evidence, now)); diff != "" {
				t.Errorf("verdict (-want +got):\n%s", diff)
			}
		})
		seen[c.reason] = true
	}
	for _, reason := range names.All[commonv1.DriftReason]() {
		// disconnected is a fact, which no verdict names.
		if !seen[reason] && reason != disconnected {
			t.Errorf("no evidence gives %s", names.Of(reason))
		}
	}
}

// TestOfSeveralReasonsOneWins checks which reason is named where evidence of several holds, or is contradicted.
func TestOfSeveralReasonsOneWins(t *testing.T) {
	for name, c := range map[string]struct {
		evidence []drift.Evidence
		want     commonv1.DriftReason
	}{
		"connected and admitted":     {[]drift.Evidence{active, isHeard, admitted, roomy}, unspecified},
		"disconnected only":          {[]drift.Evidence{active, isLost, admitted}, unspecified},
		"gate closes with a session": {[]drift.Evidence{active, isLost, saw(gate, tasks, notAdmitted)}, unspecified},
		"down, gate closed":          {[]drift.Evidence{active, isDown, saw(gate, tasks, notAdmitted)}, agentDown},
		"disconnected in an outage":  {[]drift.Evidence{active, isLost, noServer}, outage},
		"connected in an outage":     {[]drift.Evidence{active, isHeard, noServer}, unspecified},
		"never heard in an outage":   {[]drift.Evidence{active, noServer}, outage},
		"outage is over":             {[]drift.Evidence{active, isDown, stale(noServer)}, agentDown},
		"pending":                    {[]drift.Evidence{detail(active, drift.DetailPending)}, unspecified},
		"pending in an outage":       {[]drift.Evidence{detail(active, drift.DetailPending), noServer}, unspecified},
		"heard long ago":             {[]drift.Evidence{active, stale(isHeard)}, unreachable},
		"nothing":                    {nil, unreachable},
		"minor drift, heard or not":  {[]drift.Evidence{active, saw(session, endpoint, networkFacts)}, unreachable},
		"minor drift, away":          {[]drift.Evidence{active, isLost, saw(session, endpoint, networkFacts)}, networkFacts},
		"on hold in an outage":       {[]drift.Evidence{saw(identity, certificate, held), isLost, noServer}, held},
		"copied and on hold": {
			[]drift.Evidence{saw(identity, certificate, cloned), saw(identity, endpoint, held), isDown}, cloned,
		},
		"host alone explains":         {[]drift.Evidence{saw(host, hostPart, clockSkew)}, clockSkew},
		"host alone explains, slowly": {[]drift.Evidence{active, saw(host, endpoint, rateLimited)}, rateLimited},
		"heard and silent":            {[]drift.Evidence{isDown, isHeard}, agentDown},
		"silence of no node": {
			[]drift.Evidence{isHeard, saw(gate, tasks, notAdmitted), ofAll(isLost)}, notAdmitted,
		},
		"host alone is well":            {[]drift.Evidence{saw(host, process, unspecified)}, unreachable},
		"host's word on a heard node":   {[]drift.Evidence{isHeard, saw(host, hostPart, clockSkew)}, unspecified},
		"host's word on its disk":       {[]drift.Evidence{isDown, saw(host, hostPart, diskFull)}, agentDown},
		"host's word on a copy":         {[]drift.Evidence{isDown, saw(host, certificate, cloned)}, agentDown},
		"host's word on its identity":   {[]drift.Evidence{isDown, saw(host, certificate, revoked)}, agentDown},
		"host's word on an outage":      {[]drift.Evidence{isDown, saw(host, ofControl, outage)}, agentDown},
		"refused by the ingress, heard": {[]drift.Evidence{isHeard, saw(ingress, authority, certUntrusted)}, unspecified},
		"another service's word on it":  {[]drift.Evidence{isHeard, saw(gate, certificate, cloned)}, unspecified},
		"reason of a newer build":       {[]drift.Evidence{isHeard, saw(session, hostPart, 4711)}, unspecified},
		"source of a newer build":       {[]drift.Evidence{isHeard, saw(4711, hostPart, clockSkew)}, unspecified},
	} {
		t.Run(name, func(t *testing.T) {
			if got := drift.Classify(c.evidence, now); got.Reason != c.want {
				t.Errorf("reason %s, want %s: %+v", names.Of(got.Reason), names.Of(c.want), got)
			}
		})
	}
}

// TestAVerdictCountsFromItsFirstEvidence: of several pieces of evidence for a reason the oldest gives the time and the
// correlation, and what is stale gives neither.
func TestAVerdictCountsFromItsFirstEvidence(t *testing.T) {
	first := before(saw(session, hostPart, clockSkew), time.Minute)
	all := []drift.Evidence{
		isDown, saw(host, hostPart, clockSkew), first, stale(before(saw(host, certificate, clockSkew), time.Hour)),
	}
	v := drift.Classify(all, now)
	if !v.ObservedAt.Equal(first.ObservedAt) || v.CorrelationID != first.CorrelationID {
		t.Errorf("verdict %+v, want the time and correlation of %+v", v, first)
	}
	if diff := cmp.Diff([]drift.Evidence{first, all[0], all[1]}, v.Used(all)); diff != "" {
		t.Errorf("used (-want +got):\n%s", diff)
	}
	if missing := v.Missing(all); missing != nil {
		t.Errorf("missing %q, though the reason is known", missing)
	}
}

// TestUsedIsWhatTheVerdictFollowsFrom: evidence of other things is left out, and what tells whether the agent is heard
// stands beside a reason that depends on it.
func TestUsedIsWhatTheVerdictFollowsFrom(t *testing.T) {
	fenced := detail(saw(identity, certificate, revoked), drift.DetailFenced)
	hostIsWell, skewed := saw(host, process, unspecified), saw(host, hostPart, clockSkew)
	for name, c := range map[string]struct {
		evidence, want []drift.Evidence
	}{
		"healthy":              {[]drift.Evidence{isHeard, roomy, hostIsWell}, []drift.Evidence{isHeard, roomy}},
		"disconnected":         {[]drift.Evidence{isLost}, []drift.Evidence{isLost}},
		"twice":                {[]drift.Evidence{isDown, isDown}, []drift.Evidence{isDown}},
		"fenced":               {[]drift.Evidence{isDown, fenced, admitted}, []drift.Evidence{fenced}},
		"outage":               {[]drift.Evidence{isLost, noServer, active}, []drift.Evidence{noServer, isLost}},
		"unreachable":          {[]drift.Evidence{active, stale(isHeard)}, []drift.Evidence{active}},
		"unproven":             {[]drift.Evidence{isDown, skewed, roomy}, []drift.Evidence{isDown, skewed}},
		"unproven, overridden": {[]drift.Evidence{fenced, skewed}, []drift.Evidence{fenced}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, drift.Classify(c.evidence, now).Used(c.evidence)); diff != "" {
				t.Errorf("used (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAVerdictNamesWhatIsMissing: a verdict without a cause says which evidence would name one. Of an agent that is
// down it is the host's record, unless a fresh one is known.
func TestAVerdictNamesWhatIsMissing(t *testing.T) {
	explained := detail(saw(host, process, unspecified), "connection_refused: dial tcp")
	record := []string{"host: its diagnostics"}
	for name, c := range map[string]struct {
		evidence []drift.Evidence
		want     []string
	}{
		"nothing is known": {
			nil, []string{
				"session: whether its agent is heard", "identity: the state of its identity", "host: its diagnostics",
			},
		},
		"heard long ago": {
			[]drift.Evidence{active, stale(isHeard), saw(host, process, unspecified)},
			[]string{
				"session: whether its agent is heard", "session of the process: stale since 2026-03-01T11:59:59Z",
			},
		},
		"down":                        {[]drift.Evidence{active, isDown, admitted}, record},
		"down, and explained":         {[]drift.Evidence{active, isDown, explained}, nil},
		"down, explained long ago":    {[]drift.Evidence{active, isDown, stale(explained)}, record},
		"down, and the host knows it": {[]drift.Evidence{active, isDown, saw(host, endpoint, rateLimited)}, nil},
		"lost a moment ago":           {[]drift.Evidence{active, isLost}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, drift.Classify(c.evidence, now).Missing(c.evidence)); diff != "" {
				t.Errorf("missing (-want +got):\n%s", diff)
			}
		})
	}
}

// TestTheFleetsVerdict checks that the verdict on the fleet follows from what is known of the control plane, and never
// from one node.
func TestTheFleetsVerdict(t *testing.T) {
	for name, c := range map[string]struct {
		evidence []drift.Evidence
		want     commonv1.DriftReason
	}{
		"nothing is known":  {nil, unspecified},
		"a replica listens": {[]drift.Evidence{ofAll(saw(replicas, ofControl, unspecified))}, unspecified},
		"no replica":        {[]drift.Evidence{noServer}, outage},
		"outage, rollback":  {[]drift.Evidence{noServer, ofAll(saw(rollback, ofControl, rolledBack))}, rolledBack},
		"a node's fault":    {[]drift.Evidence{isDown, saw(identity, certificate, cloned)}, unspecified},
	} {
		t.Run(name, func(t *testing.T) {
			if got := drift.ClassifyFleet(c.evidence, now); got.Reason != c.want {
				t.Errorf("reason %s, want %s", names.Of(got.Reason), names.Of(c.want))
			}
		})
	}
}
