package operation

import (
	"fmt"

	"github.com/anishathalye/porcupine"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// askView reads the workspace's row.
const askView = "look"

// called is a request of a client, and heard the answer to it.
type called struct {
	verb, id, key string
	override      bool
}

type heard struct {
	reason           string
	joined, replayed bool
	id, run, state   string
	epoch            int64
	reset            bool
	used             int
}

const linearKeys = 3

// account is the whole state of the sequential specification: the workspace that has the name, and the answers that
// keys got.
type account struct {
	s    sketch
	keys [linearKeys]struct{ stands, run string }
}

// hidden returns every state to which drivers may have brought the workspace between two requests.
func hidden(s sketch) []sketch {
	out := []sketch{s}
	seen := map[sketch]bool{s: true}
	for i := 0; i < len(out); i++ {
		at := out[i]
		to := func(change func(n *sketch)) {
			n := at
			if change(&n); !seen[n] {
				seen[n] = true
				out = append(out, n)
			}
		}
		end := func(state string) func(n *sketch) {
			return func(n *sketch) { n.Open, n.Undoing, n.Cancelled, n.State = false, false, false, state }
		}
		stick := func(n *sketch) { n.Stuck, n.State = true, "stuck" }
		switch {
		case !at.Open || at.Stuck:
		case at.Kind == askDecommission:
			to(end("decommissioned"))
			to(stick)
		case at.Undoing:
			to(end("failed"))
			to(stick)
		case at.Cancelled:
			to(func(n *sketch) { n.Undoing = true })
		default:
			to(end("active"))
			to(func(n *sketch) { n.Undoing = true })
		}
	}
	return out
}

// step returns the states in which the workspace may be after an answer; none if no order of events explains the
// answer.
func (r rules) step(was account, in called, out heard) []account {
	var next []account
	for _, s := range hidden(was.s) {
		now := was
		now.s = s
		if after, ok := r.explains(now, in, out); ok {
			next = append(next, after)
		}
	}
	return next
}

func (r rules) explains(now account, in called, out heard) (account, bool) {
	s := now.s
	create := in.verb == askCreate || in.verb == askOther
	if !create && in.id != s.ID {
		s = sketch{ID: in.id, State: "decommissioned"} // a workspace that had the name before
	}
	if in.verb == askView {
		if s.ID != now.s.ID {
			return now, out.state == s.State
		}
		s.State = out.state
		return now, fits(s) == "" && (now.s.Open || now.s.State == out.state) && s.Epoch == out.epoch && s.Run == out.run &&
			s.Reset == out.reset && s.Used == out.used
	}
	stands, slot := in.verb, -1
	if stands == askReplace {
		stands = askRecreate
	}
	if !create {
		stands += "/" + in.id
	}
	if in.key != "" {
		slot = int(in.key[1] - '0')
		if was := now.keys[slot]; was.run != "" {
			if was.stands != stands {
				return now, out.reason == names.Of(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
			}
			return now, out.replayed && out.run == was.run
		}
	}
	v := r.decide(s, in.verb, in.override)
	if v.how == refuses {
		ended := in.verb == askCancel && !s.Open && out.reason == names.Of(commonv1.Reason_REASON_STATE_TERMINAL)
		return now, out.reason == v.reason || ended
	}
	if out.reason != "" || out.replayed || out.joined != (v.how == joins) || (v.how == begins) == (out.run == s.Run) {
		return now, false
	}
	after := r.after(s, in.verb, v, out.id, out.run)
	if after.Epoch != out.epoch || after.ID != out.id {
		return now, false
	}
	if in.verb == askSkipUndo && v.how == does {
		after.Stuck, after.State = false, "cancelling"
		if !after.Undoing {
			after.State = after.running()
		}
	}
	if slot >= 0 {
		now.keys[slot] = struct{ stands, run string }{stands, out.run}
	}
	if s.ID == now.s.ID || create {
		now.s = after
	}
	return now, true
}

// specification returns the rules as a model of porcupine.
func (r rules) specification() porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{account{}} },
		Step: func(state, in, out any) []any {
			var next []any
			for _, a := range r.step(state.(account), in.(called), out.(heard)) {
				next = append(next, a)
			}
			return next
		},
		Equal:             func(a, b any) bool { return a == b },
		DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %+v", in, out) },
		DescribeState:     func(s any) string { return fmt.Sprintf("%+v", s) },
	}
	return m.ToModel()
}
