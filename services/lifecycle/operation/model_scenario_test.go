package operation

import (
	"fmt"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

// scenario is one sequence: a name, the workspace that has it, and the model of it.
type scenario struct {
	*stage

	rt       fataler
	rules    rules
	tenant   string
	tenantID string
	other    string // id of a foreign tenant
	name     string
	where    commonv1.PlacementDriver
	machine  string
	flush    func()

	s        sketch
	healthy  time.Duration     // clock offset at which it became active
	keys     map[string]string // idempotency key → what it stands for and the run that it got
	before   history
	troubled bool     // something was done to the open run by which it may fail
	acks     []string // claims that the last dry run of a forced release has listed
	reported []string
	counts   map[string]int
}

type fataler interface {
	Fatalf(format string, args ...any)
}

func (a *scenario) fail(format string, args ...any) {
	a.rt.Fatalf("%s\nin %+v\nafter %s", fmt.Sprintf(format, args...), a.s, strings.Join(a.reported, "; "))
}

func (a *scenario) say(format string, args ...any) {
	a.reported = append(a.reported, fmt.Sprintf(format, args...))
}

// request is one request.
type request struct {
	verb, who, key     string
	override, noReason bool // of a forced release: another fence than the allocation's, and no claim acknowledged
	seat               int
	dry                bool
}

func (a *scenario) ask(q request) (*lifecyclev1.Operation, error) {
	ctx := testkit.Context(a.t)
	switch q.who {
	case "operator":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "olga", Roles: []string{"operator"}})
	case "member":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "tom", TenantID: a.tenantID, Roles: []string{"tenant"}})
	case "stranger":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "eve", TenantID: a.other, Roles: []string{"tenant"}})
	}
	req := &lifecyclev1.RequestOperationRequest{
		Kind: kindOf(q.verb), IdempotencyKey: q.key, DryRun: q.dry,
		Override: q.override, Reason: "the model asks",
	}
	if q.verb == askReplace {
		ctx, req.Requester = asService(testkit.Context(a.t), "recovery"), "watchdog"
	}
	if ofAllocation(q.verb) {
		return a.askRelease(ctx, q)
	}
	if q.noReason {
		req.Reason = ""
	}
	if q.verb == askCreate || q.verb == askOther {
		spec := &lifecyclev1.WorkspaceSpec{Placement: a.where, Gpus: 1}
		if q.verb == askOther {
			spec.Gpus = 2
		}
		req.Target = &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: a.tenant,
			Name:   a.name, Spec: spec,
		}}
	} else {
		req.Target = &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: a.s.ID}
	}
	res, err := a.seats[q.seat].server.RequestOperation(ctx, req)
	return res.GetOperation(), err
}

// expects returns the model's verdict on a request: whether the caller may make it at all, whether the key was used
// before, and then the rules.
func (a *scenario) expects(q request) (verdict, string) {
	if q.verb == askReplace {
		q.who = "service"
	}
	if ofAllocation(q.verb) {
		return a.expectsRelease(q), ""
	}
	create := q.verb == askCreate || q.verb == askOther
	if !create && (q.override || q.verb == askSkipUndo || q.verb == askRetryUndo) &&
		(q.who == "member" || q.who == "stranger") {
		return refusal(commonv1.Reason_REASON_PERMISSION_DENIED), ""
	}
	needs := q.override || q.verb == askSkipUndo || q.verb == askDecommission || q.verb == askRecreate ||
		q.verb == askReplace
	if !create && q.noReason && needs && !q.dry {
		return refusal(commonv1.Reason_REASON_REASON_REQUIRED), ""
	}
	if q.who == "stranger" {
		if create {
			return refusal(commonv1.Reason_REASON_TENANT_UNKNOWN), ""
		}
		return refusal(commonv1.Reason_REASON_NOT_FOUND), ""
	}
	if was := a.keys[q.key]; was != "" && !q.dry {
		stands, run, _ := strings.Cut(was, "|")
		if stands != a.stands(q.verb) {
			return refusal(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED), ""
		}
		return verdict{how: "replays"}, run
	}
	return a.rules.decide(a.s, q.verb, q.override), ""
}

func (a *scenario) stands(verb string) string {
	switch verb {
	case askCreate, askOther:
		return verb
	case askReplace:
		verb = askRecreate
	}
	return verb + "/" + a.s.ID
}

// request makes a request in three ways, through the table of actions, as a dry run and for effect, and compares the
// answers with the model.
func (a *scenario) request(q request) {
	a.s.Healthy = a.s.State == "active" && a.offset-a.healthy >= time.Hour
	before, err := a.traces(a.tenantID)
	if err != nil {
		a.fail("%v", err)
	}
	a.table()
	dry := q
	dry.dry = true
	want, _ := a.expects(dry)
	got, err := a.ask(dry)
	a.compare("a dry run of "+q.verb, dry, want, got, err, "")
	if now, err := a.traces(a.tenantID); err != nil || now != before {
		a.fail("a dry run of %s changed something: %v", q.verb, err)
	}
	want, run := a.expects(q)
	got, err = a.ask(q)
	a.say("%s by %s key %q override %v: %s %s", q.verb, q.who, q.key, q.override, want.how, want.reason)
	a.counts[q.verb+" "+want.how]++
	a.compare(q.verb, q, want, got, err, run)
	if want.how == refuses || want.how == joins || want.how == same || want.how == "replays" {
		if now, err := a.traces(a.tenantID); err != nil || now != before {
			a.fail("%s, which %s, changed something: %v", q.verb, want.how, err)
		}
	}
	if want.how != refuses && want.how != "replays" {
		old := a.s.ID
		next := a.rules.after(a.s, q.verb, want, got.GetWorkspaceId(), got.GetOperationId())
		if q.key != "" {
			if a.keys[q.key] = a.stands(q.verb) + "|" + got.GetOperationId(); q.verb != askCreate && q.verb != askOther {
				a.keys[q.key] = names.Of(kindOf(q.verb)) + "/" + old + "|" + got.GetOperationId()
			}
		}
		if next.ID != old {
			a.before = history{}
		}
		a.s = next
		if want.how == begins {
			a.troubled = a.planted() || a.s.Unclean || a.s.Away || a.world.impaired()
		}
		a.observe(q.verb == askSkipUndo && want.how == does)
	}
	a.holds()
}

// compare compares an answer with a verdict.
func (a *scenario) compare(what string, q request, want verdict, got *lifecyclev1.Operation, err error,
	replayed string,
) {
	if want.how == refuses {
		if err == nil || names.Of(fault.ReasonOf(err)) != want.reason {
			a.fail("%s by %s is to be refused with %s: %v, %v", what, q.who, want.reason, got, err)
		}
		return
	}
	if err != nil {
		a.fail("%s by %s is to be accepted (%s): %v", what, q.who, want.how, err)
	}
	problem := ""
	switch {
	case got.GetDryRun() != q.dry:
		problem = "dry run"
	case got.GetJoined() != (want.how == joins):
		problem = "joined"
	case got.GetReplayed() != (want.how == "replays"):
		problem = "replayed"
	case want.how == joins && got.GetOperationId() != a.s.Run, !q.dry && (want.how == does || want.how == same) &&
		got.GetOperationId() != a.s.Run:
		problem = "operation"
	case want.how == "replays" && got.GetOperationId() != replayed:
		problem = "operation, which was " + replayed
	case q.dry && want.how != joins && (got.GetOperationId() != "" || got.GetEpoch() != 0):
		problem = "operation, and none was begun"
	case !q.dry && want.how == begins && (got.GetOperationId() == a.s.Run || got.GetOperationId() == ""):
		problem = "operation, which is not new"
	case want.how == joins && got.GetEpoch() != a.s.Epoch:
		problem = "epoch"
	}
	if problem != "" {
		a.fail("%s by %s, which %s, is answered with another %s: %v", what, q.who, want.how, problem, got)
	}
}

// table compares the table of actions with the rules.
func (a *scenario) table() {
	if a.s.ID == "" {
		return
	}
	res, err := a.seats[0].server.GetActions(testkit.Context(a.t), &lifecyclev1.GetActionsRequest{WorkspaceId: a.s.ID})
	if err != nil {
		a.fail("table of actions: %v", err)
	}
	rows := map[string]*lifecyclev1.ActionOption{}
	for _, row := range res.GetActions() {
		rows[names.Of(row.GetKind())] = row
	}
	for _, verb := range append(verbs(), releaseVerbs()...) {
		row, v := rows[verb], a.rules.decide(a.s, verb, false)
		switch {
		case row == nil:
			a.fail("the table has no row for %s", verb)
		case v.how == same:
		case row.GetPossible() != (v.how == begins || v.how == does):
			a.fail("the table says %v of %s, which %s %s", row, verb, v.how, v.reason)
		case v.how == refuses && names.Of(row.GetReason()) != v.reason:
			a.fail("the table says that %s is refused with %s, it is with %s", verb, names.Of(row.GetReason()), v.reason)
		}
	}
}

// observe reads the rows and compares them with the model: up to what drivers may have changed (moved), or in every
// field.
func (a *scenario) observe(moved bool) {
	now, run, err := a.view(a.s.ID)
	if err != nil {
		a.fail("%v", err)
	}
	now.Other, now.Healthy, now.Away, now.Skipped = a.s.Other, a.s.Healthy, a.s.Away, a.s.Skipped
	if problem := fits(now); problem != "" {
		a.fail("%s, and its run is %+v", problem, now)
	}
	was := a.s
	if !moved {
		was.WithInstance, was.Placed, was.Unclean, was.Orphans = now.WithInstance, now.Placed, now.Unclean, now.Orphans
		was.WithoutInstance, was.Held = now.WithoutInstance, now.Held
		if was != now {
			a.fail("the model has %+v, there is %+v", was, now)
		}
	} else {
		if was.Stuck && !now.Stuck { // changed by an operator's verb
			was.Stuck = false
			if !now.Open && now.State == "failed" || now.State == "decommissioned" || now.Open {
				was = now
			}
		}
		if problem := reachable(was, now); problem != "" {
			a.fail("%s: %+v, then %+v", problem, was, now)
		}
	}
	if now.State == "active" && a.s.State != "active" {
		a.healthy = a.offset
	}
	if !a.troubled && a.s.Open && !a.s.Undoing && !a.s.Cancelled && !a.s.Stuck &&
		(now.Undoing || now.Stuck || !now.Open && now.State == "failed") {
		a.fail("nothing was done to run %s, and it failed: %s %s", run.ID, run.ErrorCode, run.Error)
	}
	a.s = now
	a.s.Healthy = false
}

func (a *scenario) holds() {
	if a.s.ID == "" {
		return
	}
	wrong, err := a.wrong(a.s.ID, &a.before)
	if err != nil || len(wrong) > 0 {
		a.fail("%q %v", wrong, err)
	}
}
