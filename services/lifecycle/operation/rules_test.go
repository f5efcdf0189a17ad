package operation

import (
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// This is the state machine of a workspace as the design describes it, written independently of the implementation:
// which requests are possible in which state, and the answer to each. Two tests compare the product with it: one with
// random sequences, one with concurrent clients.

// The requests on a workspace that exists, and the two creates: the second has the same name and another spec.
const (
	askCreate       = "create"
	askOther        = "create_other"
	askRetry        = "retry"
	askRecreate     = "recreate"
	askDecommission = "decommission"
	askCancel       = "cancel"
	askReset        = "reset"
	askRetryUndo    = "retry_undo"
	askSkipUndo     = "skip_undo"
	// askReplace is a recreation that the watchdog requests. It has no row of its own in the table of actions, and a key
	// of it stands for a recreation.
	askReplace = "replace"
	// The two ways out of a failed release, which are requested of the allocation.
	askRetryRelease = "retry_release"
	askForceRelease = "force_release"
)

// releaseVerbs returns the requests that are made of an allocation.
func releaseVerbs() []string { return []string{askRetryRelease, askForceRelease} }

func ofAllocation(verb string) bool { return slices.Contains(releaseVerbs(), verb) }

func verbs() []string {
	return []string{askRetry, askRecreate, askDecommission, askCancel, askReset, askRetryUndo, askSkipUndo}
}

func kindOf(verb string) commonv1.OperationKind {
	switch verb {
	case askOther:
		verb = askCreate
	case askReplace:
		verb = askRecreate
	}
	k, err := names.Parse[commonv1.OperationKind](verb)
	if err != nil {
		return commonv1.OperationKind_OPERATION_KIND_UNSPECIFIED
	}
	return k
}

// retryLimit is how many retries are possible without an override.
const retryLimit = 3

// sketch is a workspace as the rules see it. The run is the one that owns it, or that owned it last.
type sketch struct {
	ID, State       string
	Epoch           int64
	Other           bool // it was made with the other spec
	Run, Kind       string
	Open            bool
	Undoing         bool
	Cancelled       bool
	Stuck           bool
	Reset           bool
	Used            int  // retries
	Healthy         bool // active for an hour
	WithInstance    bool // an instance is claimed
	Placed          bool // something is claimed on a shared machine
	Away            bool // that machine does not answer
	Unclean         bool // the release of its allocation has failed
	Orphans         bool // claims were given up in the epoch of that allocation
	WithoutInstance bool // the run waits, stalled, for a launched instance of its own that has no session
	Held            bool // a driver has leased the run, or has died with that lease
	Leaving         bool // its decommission was begun
	Skipped         bool // a step of its run was given up by hand: what that step may have left keeps the allocation
}

// The kinds of answers.
const (
	begins  = "begins"  // a run of its own
	joins   = "joins"   // the run that is open
	does    = "does"    // something to the run or the workspace
	same    = "same"    // nothing: the state is already as requested
	refuses = "refuses" // with a reason
)

type verdict struct {
	how    string
	reason string
}

func refusal(r commonv1.Reason) verdict { return verdict{refuses, names.Of(r)} }

// rules decide requests. plant names a rule that is wrong on purpose, by which a test shows that the comparison finds a
// wrong rule.
type rules struct{ plant string }

// running returns the state of the workspace while its run goes forward.
func (s *sketch) running() string {
	switch {
	case s.Kind == askRecreate:
		return "recreating"
	case s.Kind == askDecommission, ofAllocation(s.Kind) && s.Leaving:
		return "decommissioning"
	case ofAllocation(s.Kind):
		return "cancelling"
	default:
		return "provisioning"
	}
}

func (s *sketch) brings() bool {
	return slices.Contains([]string{askCreate, askRetry, askRecreate}, s.Kind)
}

// onItsWay reports whether a run is open that a request may join.
func (s *sketch) onItsWay() bool { return s.Open && !s.Stuck && !s.Undoing && !s.Cancelled }

// decide returns the verdict on a request on a workspace in this state.
func (r rules) decide(s sketch, verb string, override bool) verdict {
	if r.plant == verb+" always" {
		return verdict{how: does}
	}
	switch verb {
	case askCreate, askOther:
		switch {
		case s.ID == "", s.State == "decommissioned":
			return verdict{how: begins}
		case s.onItsWay() && s.brings() && s.Other == (verb == askOther):
			return verdict{how: joins}
		}
		return refusal(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN)
	case askCancel:
		switch {
		case !s.Open:
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		case s.Stuck:
			return refusal(commonv1.Reason_REASON_RUN_STUCK)
		case s.Undoing, s.Cancelled:
			return verdict{how: same}
		case s.Kind == askDecommission, ofAllocation(s.Kind):
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		}
		return verdict{how: does}
	case askRetryRelease, askForceRelease:
		switch {
		case !s.Unclean, s.Open && !s.Stuck:
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		case s.Stuck && verb == askRetryRelease && !s.Orphans:
			return verdict{how: does}
		}
		return verdict{how: begins}
	case askReset:
		switch {
		case s.Open, s.State != "failed":
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		case s.Reset:
			return verdict{how: same}
		}
		return verdict{how: does}
	case askRetryUndo, askSkipUndo:
		if !s.Stuck {
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		}
		return verdict{how: does}
	case askDecommission:
		switch {
		case s.Stuck:
			return verdict{how: begins}
		case s.onItsWay() && s.Kind == askDecommission:
			return verdict{how: joins}
		case s.Open:
			return refusal(commonv1.Reason_REASON_OPERATION_IN_PROGRESS)
		case s.State == "active", s.State == "failed":
			return verdict{how: begins}
		}
		return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
	case askReplace:
		switch {
		case !s.onItsWay(), !s.brings(), !s.WithoutInstance, r.plant == "the watchdog joins":
			return r.bring(s, askRecreate, override)
		case s.Held:
			return refusal(commonv1.Reason_REASON_CONFLICT)
		}
		return verdict{how: begins}
	default:
		return r.bring(s, verb, override)
	}
}

// bring returns the verdict on a retry or a recreation.
func (r rules) bring(s sketch, verb string, override bool) verdict {
	switch {
	case s.Stuck:
		return refusal(commonv1.Reason_REASON_RUN_STUCK)
	case s.onItsWay() && s.brings():
		return verdict{how: joins}
	case s.Open:
		return refusal(commonv1.Reason_REASON_OPERATION_IN_PROGRESS)
	}
	if verb == askRetry {
		switch {
		case s.State != "failed":
			return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
		case !s.Reset && r.plant != "retry without reset":
			return refusal(commonv1.Reason_REASON_NOT_RESET)
		case s.Used >= retryLimit && !override:
			return refusal(commonv1.Reason_REASON_RETRY_LIMIT_REACHED)
		}
		return verdict{how: begins}
	}
	switch {
	case s.State != "active" && s.State != "failed":
		return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
	case s.Unclean, s.Placed && s.Away:
		return refusal(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE)
	}
	return verdict{how: begins}
}

// after returns the workspace as it is after the answer. run and id are those in the answer; they count where an
// operation began.
func (r rules) after(s sketch, verb string, v verdict, id, run string) sketch {
	if verb == askReplace {
		verb = askRecreate
	}
	switch {
	case v.how == begins && (verb == askCreate || verb == askOther):
		return sketch{
			ID: id, State: "provisioning", Epoch: 1, Other: verb == askOther, Run: run, Kind: askCreate, Open: true,
			Away: s.Away,
		}
	case v.how == begins:
		if s.State == "active" && s.Healthy {
			s.Used = 0
		}
		switch {
		case verb == askRecreate && r.plant != "recreate keeps epoch", verb == askRetry && !s.WithInstance:
			s.Epoch++
		}
		if verb == askRetry {
			s.Used++
		}
		s.Run, s.Kind, s.Leaving = run, verb, s.Leaving || verb == askDecommission
		s.State = s.running()
		s.Open, s.Undoing, s.Cancelled, s.Stuck, s.Reset, s.Skipped = true, false, false, false, false, false
	case v.how != does:
	case verb == askCancel:
		s.Cancelled, s.State = true, "cancelling"
	case verb == askReset:
		s.Reset = true
	case verb == askSkipUndo:
		s.Skipped = true
	case verb == askRetryUndo, verb == askRetryRelease:
		s.Stuck = false
		if s.State = "cancelling"; !s.Undoing {
			s.State = s.running()
		}
	}
	return s
}

// reachable returns why drivers alone cannot have brought a workspace from one state to another; empty if they can.
func reachable(was, now sketch) string {
	if was.ID != now.ID || was.Run != now.Run || was.Epoch != now.Epoch || was.Reset != now.Reset ||
		was.Used != now.Used || was.Kind != now.Kind ||
		was.Leaving != now.Leaving {
		return "a driver gave it to another run, epoch or count"
	}
	if was.Cancelled && now.Open && !now.Cancelled {
		return "a cancel was forgotten"
	}
	ended := !now.Open
	good := ended && now.State != "failed"
	switch {
	case !was.Open && (now.Open || now.State != was.State):
		return "it moved without a run"
	case !was.Open:
		return ""
	case was.Stuck && (!now.Stuck || now.State != "stuck"):
		return "a stuck run moved by itself"
	case (was.Undoing || was.Cancelled) && good:
		return "what was to be undone ended well"
	case was.Undoing && now.Open && !now.Undoing:
		return "an undo turned round"
	case was.Kind == askDecommission && (now.Undoing || ended && now.State != "decommissioned"):
		return "a decommission was undone"
	case ofAllocation(was.Kind):
		return released(was, now)
	case was.Kind != askDecommission && good && now.State != "active":
		return "it ended well and is not active"
	}
	return ""
}

// released returns what is wrong with the state to which a driver has brought the run of a release; empty if nothing
// is.
func released(was, now sketch) string {
	end := "failed"
	if was.Leaving {
		end = "decommissioned"
	}
	switch {
	case now.Undoing:
		return "a release was undone"
	case !now.Open && now.State != end:
		return "a release ended, and the workspace is not " + end
	case !now.Open && now.Unclean && was.Kind == askForceRelease && !was.Skipped:
		return "a forced release ended and has not freed the allocation"
	}
	return ""
}

// fits returns why state and run do not go together; empty if they do.
func fits(s sketch) string {
	allowed := []string{"active", "failed", "decommissioned"}
	switch {
	case s.Stuck:
		allowed = []string{"stuck"}
	case s.Open && s.Undoing:
		allowed = []string{"cancelling", s.running()}
	case s.Open && s.Cancelled:
		allowed = []string{"cancelling"}
	case s.Open:
		allowed = []string{s.running()}
	}
	if !slices.Contains(allowed, s.State) {
		return "the workspace is " + s.State
	}
	return ""
}
