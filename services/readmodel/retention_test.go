package readmodel

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// endedRow is a kind of row of one cut, as events make it. All rows of one have the same id.
type endedRow struct {
	cut, name string
	stays     bool // whatever the term
	// of returns the messages of the events that make the row with the id, which has ended at a time.
	of func(id string, at *timestamppb.Timestamp) []proto.Message
	// with are tables whose rows of the id stay with the row, and go with it, each with the column of the id.
	with [][2]string
}

func retiredNode(id string, state commonv1.NodeIdentityState, at *timestamppb.Timestamp) []proto.Message {
	return []proto.Message{
		&recoveryv1.NodeIdentity{NodeId: id, Name: id, State: state, StateAt: at}, &lifecyclev1.NodeGate{NodeId: id},
		&nodev1.SessionChanged{SessionId: id, NodeId: id, State: commonv1.SessionState_SESSION_STATE_CLOSED},
	}
}

func taskOf(id string, state commonv1.TaskState, at *timestamppb.Timestamp) proto.Message {
	return &lifecyclev1.TaskChanged{
		Task:        &lifecyclev1.Task{TaskId: id, NodeId: id, State: state, StateAt: at, ExpiresAt: at},
		Transitions: []*lifecyclev1.TaskTransition{{State: state, At: at}},
	}
}

func runOf(id string, state commonv1.RunState, finished *timestamppb.Timestamp) proto.Message {
	return &lifecyclev1.Run{
		RunId: id, WorkspaceId: id, TenantId: id, State: state, FinishedAt: finished,
		ChangedSteps: []*lifecyclev1.StepAttempt{{
			RunId: id, WorkspaceId: id, Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, Version: 1,
			State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		}},
	}
}

func workspaceOf(id string, state commonv1.WorkspaceState, at *timestamppb.Timestamp) []proto.Message {
	return []proto.Message{
		&lifecyclev1.Workspace{WorkspaceId: id, TenantId: id, Name: id, State: state, StateAt: at, NodeId: id},
		&nodev1.Observation{WorkspaceId: id},
	}
}

func allocationOf(id string, state commonv1.AllocationState, at *timestamppb.Timestamp) proto.Message {
	return &lifecyclev1.Allocation{AllocationId: id, WorkspaceId: id, TenantId: id, State: state, StateAt: at}
}

// verdictOf returns a verdict on a node that ends a reason, or that begins one.
func verdictOf(id string, ends bool, at *timestamppb.Timestamp) proto.Message {
	const down = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	if !ends {
		return &recoveryv1.NodeVerdict{NodeId: id, Reason: down, DetectedAt: at}
	}
	return &recoveryv1.NodeVerdict{
		NodeId: id, Ended: &recoveryv1.VerdictPeriod{NodeId: id, Reason: down, DetectedAt: at, EndedAt: at, Version: 1},
	}
}

const (
	decommissioned = commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
	retired        = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
	activeNode     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
	succeededTask  = commonv1.TaskState_TASK_STATE_SUCCEEDED
	releasedOne    = commonv1.AllocationState_ALLOCATION_STATE_RELEASED
)

var (
	steps     = [][2]string{{"step", "run_id"}}
	moves     = [][2]string{{"task_transition", "task_id"}}
	observed  = [][2]string{{"observed", "workspace_id"}}
	ofNode    = [][2]string{{"gate", "node_id"}, {"session", "node_id"}}
	ofVerdict = [][2]string{{"verdict", "node_id"}, {"verdict_period", "node_id"}}
)

// beside returns a decommissioned workspace with something else of it.
func beside(other func(id string, at *timestamppb.Timestamp) proto.Message,
) func(string, *timestamppb.Timestamp) []proto.Message {
	return func(id string, at *timestamppb.Timestamp) []proto.Message {
		return append(workspaceOf(id, decommissioned, at), other(id, at))
	}
}

// alone returns a row that one event makes.
func alone(one func(id string, at *timestamppb.Timestamp) proto.Message,
) func(string, *timestamppb.Timestamp) []proto.Message {
	return func(id string, at *timestamppb.Timestamp) []proto.Message { return []proto.Message{one(id, at)} }
}

func inTask(state commonv1.TaskState) func(string, *timestamppb.Timestamp) []proto.Message {
	return alone(func(id string, at *timestamppb.Timestamp) proto.Message { return taskOf(id, state, at) })
}

func inRun(state commonv1.RunState) func(string, *timestamppb.Timestamp) []proto.Message {
	return alone(func(id string, at *timestamppb.Timestamp) proto.Message { return runOf(id, state, at) })
}

func inAllocation(state commonv1.AllocationState) func(string, *timestamppb.Timestamp) []proto.Message {
	return alone(func(id string, at *timestamppb.Timestamp) proto.Message { return allocationOf(id, state, at) })
}

// rowsOfTerms are kinds of rows that have a term.
var rowsOfTerms = []endedRow{
	{cut: "tasks", name: "succeeded", of: inTask(succeededTask), with: moves},
	{cut: "tasks", name: "of an unknown outcome", of: inTask(commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN), with: moves},
	{cut: "tasks", name: "queued", stays: true, of: inTask(commonv1.TaskState_TASK_STATE_QUEUED), with: moves},
	{cut: "tasks", name: "dispatched", stays: true, of: inTask(commonv1.TaskState_TASK_STATE_DISPATCHED), with: moves},
	{cut: "tasks", name: "delivered", stays: true, of: inTask(commonv1.TaskState_TASK_STATE_DELIVERED), with: moves},
	{cut: "tasks", name: "running", stays: true, of: inTask(commonv1.TaskState_TASK_STATE_RUNNING), with: moves},
	{cut: "runs", name: "succeeded", of: inRun(commonv1.RunState_RUN_STATE_SUCCEEDED), with: steps},
	{cut: "runs", name: "failed", of: inRun(commonv1.RunState_RUN_STATE_FAILED), with: steps},
	{cut: "runs", name: "waiting", stays: true, of: inRun(commonv1.RunState_RUN_STATE_WAITING), with: steps},
	{cut: "runs", name: "compensating", stays: true, of: inRun(commonv1.RunState_RUN_STATE_COMPENSATING), with: steps},
	{cut: "runs", name: "stuck", stays: true, of: inRun(commonv1.RunState_RUN_STATE_STUCK), with: steps},
	{cut: "claims", name: "released", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, ReleasedAt: at}
	})},
	{cut: "claims", name: "given up, and reaped", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, OrphanedAt: at, ReleasedAt: at}
	})},
	{cut: "claims", name: "held", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, ConfirmedAt: at}
	})},
	{cut: "claims", name: "given up", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, OrphanedAt: at}
	})},
	{cut: "allocations", name: "released", of: inAllocation(releasedOne)},
	{
		cut: "allocations", name: "active", stays: true,
		of: inAllocation(commonv1.AllocationState_ALLOCATION_STATE_ACTIVE),
	},
	{
		cut: "allocations", name: "whose release has failed", stays: true,
		of: inAllocation(commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED),
	},
	{cut: "instances", name: "ended", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Instance{
			InstanceId: id, WorkspaceId: id, State: commonv1.InstanceState_INSTANCE_STATE_ENDED, EndedAt: at,
		}
	})},
	{cut: "instances", name: "ending", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Instance{
			InstanceId: id, WorkspaceId: id, State: commonv1.InstanceState_INSTANCE_STATE_ENDING, StartedAt: at,
		}
	})},
	{cut: "findings", name: "resolved", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Finding{FindingId: id, Severity: commonv1.Severity_SEVERITY_P1, ResolvedAt: at}
	})},
	{cut: "findings", name: "open", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &lifecyclev1.Finding{FindingId: id, Severity: commonv1.Severity_SEVERITY_P1, LastSeenAt: at}
	})},
	{
		cut: "workspaces", name: "decommissioned", with: observed,
		of: func(id string, at *timestamppb.Timestamp) []proto.Message { return workspaceOf(id, decommissioned, at) },
	},
	{
		cut: "workspaces", name: "decommissioned, with all that has ended", with: observed,
		of: beside(func(id string, at *timestamppb.Timestamp) proto.Message {
			return runOf(id, commonv1.RunState_RUN_STATE_SUCCEEDED, at)
		}),
	},
	{
		cut: "workspaces", name: "active", stays: true, with: observed,
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return workspaceOf(id, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, at)
		},
	},
	{
		cut: "workspaces", name: "decommissioned, with an open run", stays: true, with: observed,
		of: beside(func(id string, _ *timestamppb.Timestamp) proto.Message {
			return runOf(id, commonv1.RunState_RUN_STATE_STUCK, nil)
		}),
	},
	{
		cut: "workspaces", name: "decommissioned, with a claim that was given up", stays: true, with: observed,
		of: beside(func(id string, at *timestamppb.Timestamp) proto.Message {
			return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, OrphanedAt: at}
		}),
	},
	{
		cut: "workspaces", name: "decommissioned, with an allocation whose release has failed", stays: true, with: observed,
		of: beside(func(id string, at *timestamppb.Timestamp) proto.Message {
			return allocationOf(id, commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, at)
		}),
	},
	{
		cut: "workspaces", name: "decommissioned, with an instance that lives", stays: true, with: observed,
		of: beside(func(id string, at *timestamppb.Timestamp) proto.Message {
			return &lifecyclev1.Instance{
				InstanceId: id, WorkspaceId: id, State: commonv1.InstanceState_INSTANCE_STATE_LIVE, StartedAt: at,
			}
		}),
	},
	{
		cut: "workspaces", name: "decommissioned, with an open finding", stays: true, with: observed,
		of: beside(func(id string, at *timestamppb.Timestamp) proto.Message {
			return &lifecyclev1.Finding{
				FindingId: id, WorkspaceId: id, Severity: commonv1.Severity_SEVERITY_P1, LastSeenAt: at,
			}
		}),
	},
	{
		cut: "nodes", name: "retired", with: slices.Concat(ofNode, ofVerdict),
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, retired, at), verdictOf(id, false, at))
		},
	},
	{
		cut: "nodes", name: "active", stays: true, with: slices.Concat(ofNode, ofVerdict),
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, activeNode, at), verdictOf(id, false, at))
		},
	},
	{
		cut: "nodes", name: "retired, with an open task", stays: true, with: ofNode,
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, retired, at), taskOf(id, commonv1.TaskState_TASK_STATE_DELIVERED, at))
		},
	},
	{
		cut: "verdicts", name: "of a node that is gone",
		of: alone(func(id string, at *timestamppb.Timestamp) proto.Message { return verdictOf(id, true, at) }),
	},
	{
		cut: "verdicts", name: "of a node that is shown", stays: true,
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, activeNode, at), verdictOf(id, true, at))
		},
	},
	{
		cut: "verdict_periods", name: "over",
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, activeNode, at), verdictOf(id, true, at))
		},
	},
	{
		cut: "verdict_periods", name: "lasting", stays: true,
		of: func(id string, at *timestamppb.Timestamp) []proto.Message {
			return append(retiredNode(id, activeNode, at), verdictOf(id, false, at))
		},
	},
	{
		cut: "verdict_periods", name: "lasting, of a node that is gone",
		of: alone(func(id string, at *timestamppb.Timestamp) proto.Message { return verdictOf(id, false, at) }),
	},
	{cut: "recoveries", name: "ended", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &recoveryv1.RecoveryRecord{RecordId: id, WorkspaceId: id, DetectedAt: at, EndedAt: at}
	})},
	{cut: "recoveries", name: "open", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &recoveryv1.RecoveryRecord{RecordId: id, WorkspaceId: id, DetectedAt: at}
	})},
	{cut: "incidents", name: "closed", of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &recoveryv1.Incident{IncidentId: id, OpenedAt: at, ClosedAt: at}
	})},
	{cut: "incidents", name: "open", stays: true, of: alone(func(id string, at *timestamppb.Timestamp) proto.Message {
		return &recoveryv1.Incident{IncidentId: id, OpenedAt: at, LastSeenAt: at}
	})},
}

// testedElsewhere are the cuts that have tests of their own, with these: no event makes an impact by itself, and the
// cuts of the two logs go by their order.
var testedElsewhere = map[string]string{
	"impacts": "notify: TestRetention",
	"audit":   "project: TestTheAuditLogGoesOnBehindASignedCheckpoint",
	"events":  "events: TestACutKeepsWhatIsUnread",
}

// placed is a row of a kind.
type placed struct {
	endedRow
	id    string
	young bool
}

// put writes a row that has ended an age ago, with an id of that time.
func (e endedRow) put(l *projecttest.Log, age time.Duration) placed {
	l.TB.Helper()
	var at time.Time
	var id string
	err := l.DB.OwnerPool().QueryRow(testkit.Context(l.TB),
		`SELECT c.at, overlay(mesh.first_id(c.at)::text PLACING right($2, 12) FROM 25)
			FROM (SELECT mesh.clock() - make_interval(secs => $1) AS at) c`, age.Seconds(), ids.New()).Scan(&at, &id)
	if err != nil {
		l.TB.Fatal(err)
	}
	for _, m := range e.of(id, timestamppb.New(at)) {
		if o, ok := m.(*nodev1.Observation); ok {
			l.Observe(id, o)
		} else {
			l.Append(m)
		}
	}
	return placed{e, id, false}
}

// tables returns the table of the row, and those of the rows that go with it, each with the column of the id.
func (p placed) tables() [][2]string {
	of := terms[slices.IndexFunc(terms, func(of retention.Table) bool { return of.Name == p.cut })]
	own := [2]string{of.Table, of.ID}
	if p.cut == "verdicts" || p.cut == "verdict_periods" {
		own = [2]string{cmp.Or(of.Table, "verdict"), "node_id"} // the id of a period is made of the time
	}
	return append([][2]string{own}, p.with...)
}

// TestNoTermCutsWhatIsOpen checks for each kind of rows that what is over is deleted after its term with what belongs
// to it, and not before, that what is open stays with what belongs to it, whatever the term, and that in rollback mode
// everything stays.
func TestNoTermCutsWhatIsOpen(t *testing.T) {
	testkit.IO(t)
	ctx, l := testkit.Context(t), projecttest.New(t)
	pool := l.DB.Pool(pg.RoleReadmodel)
	testkit.SetClockOffset(l.DB, 1000*time.Hour)
	var all []placed
	for _, row := range rowsOfTerms {
		young := row.put(l, time.Hour)
		young.young = true
		all = append(all, row.put(l, 100*time.Hour), young)
	}
	l.Number()
	p := l.Projector()
	if err := p.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	if parked, err := p.Parked(ctx); err != nil || len(parked) > 0 {
		t.Fatalf("events that make no rows: %v, %v", parked, err)
	}
	check := func(what string, term time.Duration, gone func(placed) bool) {
		t.Helper()
		for _, c := range cuts {
			if _, err := pg.One[retention.Batch](ctx, pool, c.Statement, term.Seconds(),
				"00000000-0000-0000-0000-000000000000", 1000); err != nil {
				t.Fatalf("%s: %v", c.Name, err)
			}
		}
		for _, p := range all {
			for _, of := range p.tables() {
				var there bool
				if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM readmodel.`+of[0]+` WHERE `+of[1]+` = $1)`,
					p.id).Scan(&there); err != nil {
					t.Fatal(err)
				}
				if there == gone(p) {
					t.Errorf("%s: of %s that is %s, young: %t, a row of %s is there: %t", what, p.cut, p.name, p.young, of[0],
						there)
				}
			}
		}
	}
	mode := func(state string) {
		t.Helper()
		if _, err := l.DB.OwnerPool().Exec(ctx, `UPDATE recovery.rollback SET state = $1, since = mesh.clock()`,
			state); err != nil {
			t.Fatal(err)
		}
	}
	mode("active")
	check("in rollback mode", 0, func(placed) bool { return false })
	mode("none")
	check("after a term of 50 h", 50*time.Hour, func(p placed) bool { return !p.stays && !p.young })
	check("at once", 0, func(p placed) bool { return !p.stays })
	for _, of := range terms {
		for _, stays := range []bool{false, true} {
			if testedElsewhere[of.Name] == "" && !slices.ContainsFunc(rowsOfTerms, func(row endedRow) bool {
				return row.cut == of.Name && row.stays == stays
			}) {
				t.Errorf("%s has no row that stays: %t", of.Name, stays)
			}
		}
	}
}
