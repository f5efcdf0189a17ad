package drift_test

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// drawn is any evidence, of enums that this build does not know as well.
var drawn = rapid.Custom(func(t *rapid.T) drift.Evidence {
	e := drift.Evidence{
		NodeID:        rapid.SampledFrom([]string{node, node, ""}).Draw(t, "node"),
		Part:          commonv1.DriftPart(rapid.Int32Range(-1, 8).Draw(t, "part")),
		Reason:        commonv1.DriftReason(rapid.Int32Range(-1, 27).Draw(t, "reason")),
		Source:        commonv1.EvidenceSource(rapid.Int32Range(-1, 9).Draw(t, "source")),
		ObservedAt:    now.Add(time.Duration(rapid.IntRange(-4, 1).Draw(t, "observed")) * time.Minute),
		Detail:        rapid.SampledFrom([]string{"", "pending", "fenced", "retired", "active"}).Draw(t, "detail"),
		CorrelationID: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "correlation"),
	}
	if ends := rapid.IntRange(-2, 3).Draw(t, "ends"); ends < 2 {
		e.FreshUntil = now.Add(time.Duration(ends) * time.Second)
	}
	return e
})

// likely is evidence that recovery writes: about whether the agent is heard, and of reasons by sources that may.
var likely = rapid.Custom(func(t *rapid.T) drift.Evidence {
	e := drawn.Draw(t, "any")
	e.FreshUntil = time.Time{}
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		e.Part, e.Source = process, session
		e.Reason = rapid.SampledFrom([]commonv1.DriftReason{unspecified, agentDown, disconnected}).Draw(t, "hearing")
	case 1:
		e.Source = rapid.SampledFrom([]commonv1.EvidenceSource{host, ingress}).Draw(t, "unproven")
	case 2:
		e.Part, e.Source = certificate, identity
		e.Reason = rapid.SampledFrom([]commonv1.DriftReason{unspecified, revoked, cloned, held, joinStateLost}).
			Draw(t, "decision")
	}
	return e
})

type key struct {
	node   string
	part   commonv1.DriftPart
	source commonv1.EvidenceSource
}

func keyOf(e drift.Evidence) key { return key{e.NodeID, e.Part, e.Source} }

// kept draws evidence as it is kept: one piece of each part of each source.
func kept(t *rapid.T, most int) []drift.Evidence {
	one := rapid.OneOf(drawn, likely)
	return rapid.SliceOfNDistinct(one, 0, most, keyOf).Draw(t, "evidence")
}

// worse reports whether a is of a higher severity than b. None is the lowest.
func worse(a, b commonv1.Severity) bool {
	rank := func(s commonv1.Severity) int { return (int(p2) + 1 - int(s)) % (int(p2) + 1) }
	return rank(a) > rank(b)
}

func known(reason commonv1.DriftReason) bool {
	_, ok := drift.RowOf(reason)
	return ok
}

// hears reports whether e tells that the agent is connected, or that it has not enrolled yet.
func hears(e drift.Evidence) bool {
	if e.NodeID == "" || e.Reason != unspecified {
		return false
	}
	return e.Source == session && e.Part == process || e.Source == identity && e.Detail == "pending"
}

// TestAVerdictIsWhole: any evidence gives a verdict with all that people need to act.
func TestAVerdictIsWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evidence := rapid.SliceOfN(rapid.OneOf(drawn, likely), 0, 12).Draw(t, "evidence")
		wholeOf(t, evidence)
	})
}

func wholeOf(t interface{ Fatalf(string, ...any) }, evidence []drift.Evidence) {
	v := drift.Classify(evidence, now)
	used, missing := v.Used(evidence), v.Missing(evidence)
	if v.Reason == unspecified {
		if v.UserState != normal || v.Severity != 0 || v.Owner != "" || len(missing) > 0 {
			t.Fatalf("nothing is wrong, but %+v, missing %q", v, missing)
		}
		return
	}
	if v.UserState == 0 || v.Severity == 0 || v.Owner == "" || v.NextAction == "" || v.DetectWithin <= 0 {
		t.Fatalf("verdict %+v", v)
	}
	hostKnown := slices.ContainsFunc(evidence, func(e drift.Evidence) bool { return e.Source == host && !e.Stale(now) })
	if (v.Reason == unreachable || v.Reason == agentDown && !hostKnown) != (len(missing) > 0) {
		t.Fatalf("verdict %+v misses %q", v, missing)
	}
	if v.Reason != unreachable && !slices.ContainsFunc(used, func(e drift.Evidence) bool {
		return e.Reason == v.Reason && e.ObservedAt.Equal(v.ObservedAt) && e.CorrelationID == v.CorrelationID
	}) {
		t.Fatalf("verdict %+v does not follow from %+v", v, used)
	}
	for _, e := range used {
		if e.Stale(now) {
			t.Fatalf("stale evidence %+v was used for %+v", e, v)
		}
	}
}

// TestTheOrderOfEvidenceDoesNotMatter checks that neither the order of evidence changes the verdict, nor a piece that
// is given twice, nor one that is stale.
func TestTheOrderOfEvidenceDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evidence := rapid.SliceOfN(rapid.OneOf(drawn, likely), 0, 12).Draw(t, "evidence")
		want := drift.Classify(evidence, now)
		other := rapid.Permutation(evidence).Draw(t, "order")
		if len(other) > 0 {
			other = append(other, other[0])
		}
		if got := drift.Classify(other, now); got != want {
			t.Fatalf("verdict %+v, in another order %+v", want, got)
		}
		if diff := cmp.Diff(want.Used(evidence), want.Used(other)); diff != "" {
			t.Fatalf("used in two orders:\n%s", diff)
		}
		if diff := cmp.Diff(want.Missing(evidence), want.Missing(other)); diff != "" {
			t.Fatalf("missing in two orders:\n%s", diff)
		}
		fresh := slices.DeleteFunc(slices.Clone(evidence), func(e drift.Evidence) bool { return e.Stale(now) })
		if got := drift.Classify(fresh, now); got != want {
			t.Fatalf("verdict %+v, without what is stale %+v", want, got)
		}
	})
}

// TestTimeAloneChangesNoVerdict: until some evidence becomes stale, the verdict at any later time is the same.
func TestTimeAloneChangesNoVerdict(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evidence := rapid.SliceOfN(rapid.OneOf(drawn, likely), 0, 12).Draw(t, "evidence")
		later := now.Add(time.Duration(rapid.Int64Range(1, int64(48*time.Hour)).Draw(t, "later")))
		for i := range evidence {
			if e := &evidence[i]; !e.Stale(now) && e.Stale(later) {
				e.FreshUntil = later.Add(1)
			}
		}
		want, got := drift.Classify(evidence, now), drift.Classify(evidence, later)
		if want.At = got.At; got != want {
			t.Fatalf("verdict %+v, later %+v", want, got)
		}
	})
}

// TestMoreEvidenceNeverMakesAVerdictSmaller: evidence of one more thing that is wrong, of a part or a source that none
// was known of, never lowers the severity of a verdict that names a cause. Evidence that a part is well changes
// nothing, but that the agent is heard, which clears only what rests on its silence.
func TestMoreEvidenceNeverMakesAVerdictSmaller(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evidence := kept(t, 8)
		e := rapid.OneOf(drawn, likely).Filter(func(e drift.Evidence) bool {
			return !slices.ContainsFunc(evidence, func(o drift.Evidence) bool { return keyOf(o) == keyOf(e) })
		}).Draw(t, "more")
		was := drift.Classify(evidence, now)
		got := drift.Classify(append(slices.Clone(evidence), e), now)
		switch {
		case known(e.Reason):
			if was.Reason != unreachable && worse(was.Severity, got.Severity) {
				t.Fatalf("verdict %+v became %+v", was, got)
			}
		case !hears(e):
			if was != got {
				t.Fatalf("verdict %+v became %+v", was, got)
			}
		default:
			byRecord := slices.ContainsFunc(was.Used(evidence), func(o drift.Evidence) bool {
				return o.Reason == was.Reason && o.Source != host && o.Source != ingress
			})
			rests := []commonv1.DriftReason{unspecified, unreachable, agentDown, outage, notAdmitted}
			if byRecord && !slices.Contains(rests, was.Reason) && worse(was.Severity, got.Severity) {
				t.Fatalf("verdict %+v became %+v", was, got)
			}
		}
	})
}

// TestUnprovenEvidenceOnlyExplainsSilence: what a host reports changes nothing about a node that is heard, and about
// another one makes no verdict healthier, secure or a P0. What a refused connection shows does not touch a connected
// node.
func TestUnprovenEvidenceOnlyExplainsSilence(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evidence := kept(t, 10)
		without := func(sources ...commonv1.EvidenceSource) drift.Verdict {
			return drift.Classify(slices.DeleteFunc(slices.Clone(evidence), func(e drift.Evidence) bool {
				return slices.Contains(sources, e.Source) || e.Source <= 0 || e.Source > ingress
			}), now)
		}
		got, recorded := drift.Classify(evidence, now), without(host)
		if got != recorded {
			if got.Severity == p0 || got.UserState == securityDue || got.Reason == unspecified || got.UserState == normal {
				t.Fatalf("the host made %+v of %+v", got, recorded)
			}
			if recorded.Reason != unreachable && worse(recorded.Severity, got.Severity) {
				t.Fatalf("the host made %+v of %+v", got, recorded)
			}
		}
		fresh := func(e drift.Evidence) bool { return hears(e) && !e.Stale(now) }
		silent := slices.ContainsFunc(evidence, func(e drift.Evidence) bool {
			return e.NodeID != "" && e.Source == session && e.Part == process && !e.Stale(now) &&
				(e.Reason == agentDown || e.Reason == disconnected)
		})
		if slices.ContainsFunc(evidence, fresh) && !silent && got != without(host, ingress) {
			t.Fatalf("unproven evidence made %+v of %+v, though the node is heard", got, without(host, ingress))
		}
	})
}

// TestAHostAloneDeclaresNothing: from a host's own evidence no verdict is healthy, of severity P0, or for security.
func TestAHostAloneDeclaresNothing(t *testing.T) {
	for reason := commonv1.DriftReason(-1); reason < 30; reason++ {
		for part := range commonv1.DriftPart(9) {
			for _, source := range []commonv1.EvidenceSource{0, host, 99} {
				v := drift.Classify([]drift.Evidence{saw(source, part, reason)}, now)
				if v.Reason == unspecified || v.Severity == p0 || v.UserState == securityDue || v.UserState == normal {
					t.Errorf("%s of the %s by %s: %+v", reason, part, source, v)
				}
			}
		}
	}
}

// FuzzClassify: bytes make evidence, eight for a piece; any of it gives a whole verdict, and the same one in reverse.
func FuzzClassify(f *testing.F) {
	f.Add([]byte{0, 1, 0, 2, 0, 0, 0, 0})
	f.Add([]byte{0, 1, 20, 2, 0, 0, 0, 0, 1, 7, 17, 4, 9, 9, 0, 1})
	f.Add([]byte{0, 3, 10, 1, 0, 0, 2, 0, 0, 6, 12, 6, 200, 1, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		var evidence []drift.Evidence
		for ; len(data) >= 8; data = data[8:] {
			e := drift.Evidence{
				NodeID: []string{node, ""}[data[0]%2], Part: commonv1.DriftPart(int8(data[1])),
				Reason: commonv1.DriftReason(int8(data[2])), Source: commonv1.EvidenceSource(int8(data[3])),
				ObservedAt: now.Add(-time.Duration(binary.LittleEndian.Uint16(data[4:])) * time.Second),
				Detail:     []string{"", "pending", "fenced", "retired"}[data[6]%4],
			}
			if data[7] > 0 {
				e.FreshUntil = now.Add(time.Duration(int8(data[7])) * time.Second)
			}
			evidence = append(evidence, e)
		}
		wholeOf(t, evidence)
		other := slices.Clone(evidence)
		slices.Reverse(other)
		if got, want := drift.Classify(other, now), drift.Classify(evidence, now); got != want {
			t.Errorf("verdict %+v, in reverse %+v", want, got)
		}
		wholeFleet := drift.ClassifyFleet(evidence, now)
		if wholeFleet.Reason == unreachable || wholeFleet.Reason == agentDown && !slices.ContainsFunc(evidence,
			func(e drift.Evidence) bool { return e.NodeID == "" }) {
			t.Errorf("the fleet's verdict is %+v", wholeFleet)
		}
	})
}
