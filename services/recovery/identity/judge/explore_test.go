package judge_test

import (
	"fmt"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

// finish drops all messages and calls under way and lets agent k open sessions until it is admitted or found to be a
// copy; it returns false if neither ever happens.
func (w *world) finish(k int, r rules) bool {
	w.conns, w.mail = [slots]conn{}, [mails]mail{}
	for i := range w.agents {
		w.agents[i].dial, w.agents[i].sess = 0, 0
	}
	a := &w.agents[k]
	for range 4 {
		if a.lost || a.shut || w.rec.alarm != 0 {
			return false
		}
		w.dialUp(k)
		slot := int(a.dial) - 1
		for a.dial != 0 && w.conns[slot].phase != free {
			if !w.execute(slot, r) && !w.deliver(slot) {
				break
			}
		}
		if a.sess != 0 {
			return true
		}
	}
	return false
}

// reactivate lets a person with the security role reactivate the node, after which all agents try again.
func (w *world) reactivate(r rules) {
	if r.ends(w.rec.alarm) {
		w.rec.of++
		for i := range w.rec.certs {
			if w.rec.certs[i].state != 0 {
				w.rec.certs[i].state = 4
			}
		}
	}
	w.rec.alarm, w.rec.confirmed = 0, 0
	for k := range w.agents {
		w.agents[k].shut = false
	}
}

// bundle has agent k enrol with an operator's bundle, as another node instance.
func (w *world) bundle(k int) {
	w.keys++
	w.rec.of++
	w.rec.confirmed, w.rec.confID = 0, 0
	w.rec.certs[w.keys] = cert{state: 1}
	w.agents[k] = agent{alive: true, of: w.rec.of, active: w.keys}
}

// checkReactivation lets a person reactivate the node, with either holder as the machine. If its join state was lost,
// it opens again as long as its certificate counts, and if it does not, only a bundle helps. If two holders may have
// the identity, neither comes back, by a call of theirs that is still to be executed or by a new one: only a bundle
// brings the machine back, beside which the other holder stays out and raises no alarm.
func (w world) checkReactivation(r rules) string {
	if w.rec.alarm == commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED {
		return w.checkCopied(r)
	}
	for k := range w.agents {
		n := w
		n.reactivate(r)
		if state := n.rec.certs[n.agents[k].active].state; n.agents[k].lost || state == 0 || state == 3 {
			continue
		}
		if !n.finish(k, r) {
			return "the holder that is left cannot open after a person reactivated the node"
		}
	}
	return ""
}

func (w world) checkCopied(r rules) string {
	w.reactivate(r)
	for i := range w.conns {
		if phase := w.conns[i].phase; phase == hello || phase == ready {
			w.execute(i, r)
		}
	}
	if w.rec.confID != 0 {
		return "a copy is admitted by a call from before the reactivation"
	}
	for machine, copied := range []int{1, 0} {
		n := w
		if n.finish(machine, r) || n.finish(copied, r) {
			return "a holder of a copied identity opens after a person reactivated the node"
		}
		n.bundle(machine)
		for range 2 { // before the other holder has tried again, and after
			if !n.finish(machine, r) {
				return "the machine cannot open with its bundle"
			}
			if n.agents[copied].lost = false; n.finish(copied, r) || n.rec.alarm != 0 {
				return "the copy is admitted, or raises an alarm, beside the machine's new identity"
			}
		}
	}
	return ""
}

func (w world) check(r rules) string {
	if !w.split {
		if w.rec.alarm != 0 {
			return "an innocent agent is on hold: " + w.rec.alarm.String()
		}
		if w.agents[0].lost {
			return "the agent is locked out"
		}
		if n := w; !n.finish(0, r) {
			return "no way back to Admitted"
		}
		return ""
	}
	if w.rec.alarm == commonv1.Reason_REASON_JOIN_STATE_LOST && !w.bare {
		return "a copy is taken for a lost join state"
	}
	if w.rec.alarm != 0 {
		return w.checkReactivation(r)
	}
	if w.won[0] && w.won[1] {
		return "both copies were admitted and nobody knows"
	}
	for first := range 2 {
		n := w
		for round := 0; n.rec.alarm == 0; round++ {
			if round == 6 {
				return "two active copies are never found"
			}
			n.finish((first+round)%2, r)
		}
		if n.rec.alarm != commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED && !w.bare {
			return "two active copies raise the wrong alarm"
		}
	}
	return ""
}

type step struct {
	from world
	name string
}

// explore visits every reachable world and returns their number; problem is empty if every one of them is sound.
func explore(b bounds) (states int, problem string) { // two values that need names
	start := world{keys: 1}
	start.rec.certs[1] = cert{state: 1}
	start.agents[0] = agent{alive: true, active: 1}
	seen := map[world]struct{}{start: {}}
	parents := map[world]step{}
	queue := []world{start}
	generations := 0
	for len(queue) > 0 {
		w := queue[0]
		queue = queue[1:]
		if what := w.check(b.rules); what != "" {
			return len(seen), what + "\n" + trace(parents, w)
		}
		w.successors(b, func(name string, next world) {
			if _, old := seen[next]; old {
				return
			}
			seen[next] = struct{}{}
			parents[next] = step{from: w, name: name}
			queue = append(queue, next)
		})
		generations = max(generations, int(w.rec.issued))
	}
	if generations < int(b.opens) {
		return len(seen), fmt.Sprintf("only %d generations were issued: the model is blind", generations)
	}
	return len(seen), ""
}

func trace(parents map[world]step, w world) string {
	out := fmt.Sprintf("%+v\n", w)
	for {
		p, ok := parents[w]
		if !ok {
			return out
		}
		out = fmt.Sprintf("%s\n  -> rec %+v\n     agents %+v\n     conns %+v\n     mail %+v\n", p.name, w.rec, w.agents,
			w.conns, w.mail) + out
		w = p.from
	}
}

func TestJoinStateExhaustively(t *testing.T) {
	tests := []bounds{
		{name: "lost replies, crashes, late calls, paused replicas", opens: 4},
		{name: "renewal and a refused handshake", opens: 3, renewals: 1, fallbacks: 1},
		{name: "a copy", opens: 3, copies: true},
		{name: "a restored database", opens: 3, restore: true},
		{name: "a restored database of a later era", opens: 3, restore: true, era: true},
	}
	if !slow {
		tests = append(tests,
			bounds{name: "renewal with two serials", opens: 3, renewals: 2},
			bounds{name: "a copy and a renewal", opens: 3, renewals: 1, copies: true},
			bounds{name: "a restored database and a renewal", opens: 3, renewals: 1, restore: true},
			bounds{name: "a restored database of a later era and a renewal", opens: 3, renewals: 1, restore: true, era: true},
			bounds{name: "a restored database and two renewals", opens: 2, renewals: 2, restore: true},
			bounds{name: "a restored database of a later era and two renewals", opens: 2, renewals: 2, restore: true, era: true},
		)
	}
	if !slow && !testing.Short() {
		tests = append(tests,
			bounds{name: "wide: renewals and fallbacks", opens: 4, renewals: 1, fallbacks: 2},
			bounds{name: "wide: a copy", opens: 4, copies: true},
		)
	}
	for _, b := range tests {
		t.Run(b.name, func(t *testing.T) {
			b.rules = realRules()
			states, problem := explore(b)
			t.Logf("%d states", states)
			if problem != "" {
				t.Fatal(problem)
			}
		})
	}
}

// TestSearchCatchesWrongRules explores rules with the mistakes that the real rules exist to prevent. If the search does
// not catch one of them, its other results prove nothing.
func TestSearchCatchesWrongRules(t *testing.T) {
	tests := []struct {
		name  string
		bound bounds
		rules rules
	}{
		{
			name:  "an unanswered challenge convicts",
			bound: bounds{opens: 3},
			rules: rules{judge: judge.Open, judgeReady: judge.Confirm, eager: true},
		},
		{
			name:  "an old generation is welcome",
			bound: bounds{opens: 3, copies: true},
			rules: rules{judgeReady: judge.Confirm, judge: func(s judge.Standing, h judge.Hello) judge.Verdict {
				s.Confirmed = 0
				return judge.Open(s, h)
			}},
		},
		{
			name:  "only the last generation is welcome",
			bound: bounds{opens: 3},
			rules: rules{judgeReady: judge.Confirm, judge: func(s judge.Standing, h judge.Hello) judge.Verdict {
				s.Confirmed = s.Issued
				return judge.Open(s, h)
			}},
		},
		{
			name:  "a Ready counts for any generation given",
			bound: bounds{opens: 3, copies: true},
			rules: rules{
				judge: judge.Open,
				judgeReady: func(s judge.Standing, confirmed string, r judge.Ready) judge.ReadyVerdict {
					s.Issued = r.Generation
					return judge.Confirm(s, confirmed, r)
				},
			},
		},
		{
			name:  "a reactivation leaves the copies their certificates",
			bound: bounds{opens: 3, copies: true},
			rules: rules{judge: judge.Open, judgeReady: judge.Confirm, lenient: true},
		},
		{
			name:  "a certificate is forgotten by a restore",
			bound: bounds{opens: 3, renewals: 1, restore: true},
			rules: rules{judgeReady: judge.Confirm, judge: func(s judge.Standing, h judge.Hello) judge.Verdict {
				v := judge.Open(s, h)
				if v.AdoptSerial {
					return judge.Verdict{Ruling: judge.RulingDeny, Reason: commonv1.Reason_REASON_SERIAL_UNKNOWN}
				}
				return v
			}},
		},
		{
			name:  "a certificate is replaced for good before its session is ready",
			bound: bounds{opens: 2, renewals: 2, restore: true},
			rules: rules{judgeReady: judge.Confirm, judge: func(s judge.Standing, h judge.Hello) judge.Verdict {
				v := judge.Open(s, h)
				if v.AdoptSerial && h.Certificate.State == commonv1.SerialState_SERIAL_STATE_SUPERSEDED {
					return judge.Verdict{Ruling: judge.RulingDeny, Reason: commonv1.Reason_REASON_SERIAL_SUPERSEDED}
				}
				return v
			}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.bound.rules = tt.rules
			states, problem := explore(tt.bound)
			if problem == "" {
				t.Fatalf("not caught in %d states", states)
			}
		})
	}
}
