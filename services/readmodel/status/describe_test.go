package status_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

func TestDescribeNode(t *testing.T) {
	in := func(state commonv1.NodeIdentityState) *recoveryv1.NodeIdentity {
		return &recoveryv1.NodeIdentity{State: state, CreatedAt: ago(time.Hour), StateAt: ago(30 * time.Minute)}
	}
	active := in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE)
	pending := in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING)
	launched := in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING)
	launched.InstanceId = "0197c0de-0000-7000-8000-000000000001"
	admitted := &nodev1.SessionChanged{
		State:      commonv1.SessionState_SESSION_STATE_ADMITTED,
		LastSeenAt: ago(10 * time.Minute),
	}
	closed := func(seen time.Duration) *nodev1.SessionChanged {
		return &nodev1.SessionChanged{
			State: commonv1.SessionState_SESSION_STATE_CLOSED, LastSeenAt: ago(seen),
			ClosedAt: ago(seen),
		}
	}
	beat := now.Add(-4 * time.Second)
	const (
		normal    = commonv1.UserState_USER_STATE_NORMAL
		temporary = commonv1.UserState_USER_STATE_TEMPORARY
		operator  = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
		security  = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
	)
	verdict := func(reason commonv1.DriftReason, state commonv1.UserState) *recoveryv1.NodeVerdict {
		return &recoveryv1.NodeVerdict{Reason: reason, UserState: state, NextAction: "what recovery advises"}
	}
	well := verdict(commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED, normal)
	down := verdict(commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, temporary)
	fact := verdict(commonv1.DriftReason_DRIFT_REASON_DISCONNECTED, temporary)
	held := verdict(commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD, operator)
	cloned := verdict(commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, security)
	outage := verdict(commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, temporary)
	for name, c := range map[string]struct {
		facts  status.NodeFacts
		state  commonv1.UserState
		reason string
		heard  time.Duration // ago; 0: never
		since  time.Duration
	}{
		"connected, not judged": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now.Add(-time.Minute),
			},
			state: normal, heard: 4 * time.Second, since: time.Minute,
		},
		"connected and well": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now, Verdict: well,
			},
			state: normal, heard: 4 * time.Second,
		},
		"heard after the beat": {
			facts: status.NodeFacts{
				Identity: active, Connected: true, Since: now.Add(-time.Second), BeatAt: beat,
				Session: &nodev1.SessionChanged{State: commonv1.SessionState_SESSION_STATE_ADMITTED, LastSeenAt: ago(time.Second)},
			},
			state: normal, heard: time.Second, since: time.Second,
		},
		"connected, with a verdict": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now,
				Verdict: verdict(commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, temporary),
			},
			state: temporary, reason: "node_not_admitted", heard: 4 * time.Second,
		},
		"connected again, judged down before": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now, Verdict: down,
			},
			state: normal, heard: 4 * time.Second,
		},
		"connected while recovery sees an outage": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now, ControlPlane: outage,
			},
			state: normal, heard: 4 * time.Second,
		},
		"lost, however long ago": {
			facts: status.NodeFacts{Identity: active, Session: closed(time.Hour)},
			state: temporary, reason: "disconnected", heard: time.Hour, since: time.Hour,
		},
		"lost and judged well before": {
			facts: status.NodeFacts{Identity: active, Session: closed(time.Minute), Verdict: well, ControlPlane: well},
			state: temporary, reason: "disconnected", heard: time.Minute, since: time.Minute,
		},
		"judged down, a moment after": {
			facts: status.NodeFacts{Identity: active, Session: closed(time.Second), Verdict: down},
			state: temporary, reason: "agent_down", heard: time.Second, since: time.Second,
		},
		"lost in an outage": {
			facts: status.NodeFacts{Identity: active, Session: admitted, BeatAt: now.Add(-time.Minute), ControlPlane: outage},
			state: temporary, reason: "control_plane_outage", heard: 10 * time.Minute, since: time.Minute,
		},
		"judged down before an outage": {
			facts: status.NodeFacts{Identity: active, Session: closed(time.Hour), Verdict: down, ControlPlane: outage},
			state: temporary, reason: "control_plane_outage", heard: time.Hour, since: time.Hour,
		},
		"its gate shut before an outage": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: now.Add(-time.Minute), ControlPlane: outage,
				Verdict: verdict(commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, temporary),
			},
			state: temporary, reason: "control_plane_outage", heard: 10 * time.Minute, since: time.Minute,
		},
		"its gate shut before it was lost": {
			facts: status.NodeFacts{
				Identity: active, Session: closed(time.Second),
				Verdict: verdict(commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, temporary),
			},
			state: temporary, reason: "disconnected", heard: time.Second, since: time.Second,
		},
		"its disk full before an outage": {
			facts: status.NodeFacts{
				Identity: active, Session: closed(time.Hour), ControlPlane: outage,
				Verdict: verdict(commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, operator),
			},
			state: temporary, reason: "control_plane_outage", heard: time.Hour, since: time.Hour,
		},
		"disconnected before an outage": {
			facts: status.NodeFacts{Identity: active, Session: closed(time.Hour), Verdict: fact, ControlPlane: outage},
			state: temporary, reason: "control_plane_outage", heard: time.Hour, since: time.Hour,
		},
		"held in an outage": {
			facts: status.NodeFacts{
				Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD), Session: closed(time.Hour), Verdict: held,
				ControlPlane: outage,
			},
			state: operator, reason: "identity_held", heard: time.Hour, since: time.Hour,
		},
		"never connected": {
			facts: status.NodeFacts{Identity: active}, state: temporary, reason: "disconnected", since: 30 * time.Minute,
		},
		"never connected, and judged": {
			facts: status.NodeFacts{Identity: active, Verdict: down}, state: temporary, reason: "agent_down",
			since: 30 * time.Minute,
		},
		"pending": {
			facts: status.NodeFacts{Identity: pending}, state: operator, since: 30 * time.Minute,
		},
		"in a state of another build": {
			facts: status.NodeFacts{Identity: in(0)}, state: temporary, since: 30 * time.Minute,
		},
		"pending instance": {
			facts: status.NodeFacts{Identity: launched}, state: temporary, since: 30 * time.Minute,
		},
		"pending in an outage": {
			facts: status.NodeFacts{Identity: pending, ControlPlane: outage}, state: operator, since: 30 * time.Minute,
		},
		"held, not judged": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD)},
			state: temporary, reason: "disconnected", since: 30 * time.Minute,
		},
		"cloned, still connected": {
			facts: status.NodeFacts{
				Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED), Session: admitted, BeatAt: beat,
				Connected: true, Since: now, Verdict: cloned,
			},
			state: security, reason: "cloned_identity_detected", heard: 4 * time.Second,
		},
		"a verdict without a family": {
			facts: status.NodeFacts{Identity: active, Verdict: &recoveryv1.NodeVerdict{Reason: 1000, NextAction: "update"}},
			state: temporary, reason: "1000", since: 30 * time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := status.Describe(c.facts)
			if got.UserState != c.state || got.Reason != c.reason {
				t.Errorf("got %s %q, want %s %q", names.Of(got.UserState), got.Reason, names.Of(c.state), c.reason)
			}
			enrolled := c.facts.Identity.GetState() > commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING
			if (got.UserState == normal) != (got.Reason == "") && (enrolled || got.Reason != "") {
				t.Errorf("%s with reason %q", names.Of(got.UserState), got.Reason)
			}
			if got.UserState != normal && got.NextAction == "" {
				t.Error("no next action")
			}
			if heard := now.Sub(got.LastHeartbeat); (c.heard == 0) != got.LastHeartbeat.IsZero() ||
				(c.heard != 0 && heard != c.heard) {
				t.Errorf("last heartbeat %s ago, want %s", heard, c.heard)
			}
			if since := now.Sub(got.Since); since != c.since {
				t.Errorf("since %s, want %s", since, c.since)
			}
		})
	}
}

func TestDescribeAgent(t *testing.T) {
	active := &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE}
	held := &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, StateAt: ago(time.Minute)}
	open := &lifecyclev1.NodeGate{Admitted: true}
	verdict := func(reason commonv1.DriftReason) *recoveryv1.NodeVerdict {
		return &recoveryv1.NodeVerdict{Reason: reason}
	}
	const (
		down        = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
		unreachable = commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE
		fact        = commonv1.DriftReason_DRIFT_REASON_DISCONNECTED
		expired     = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED
		onHold      = commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD
		cloned      = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED
		shut        = commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED
		diskFull    = commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL
		outage      = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE
		rollback    = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK
	)
	for name, c := range map[string]struct {
		facts  status.NodeFacts
		reason string
		detail string // a part of it
	}{
		"acts": {status.NodeFacts{Identity: active, Gate: open, Connected: true}, "", ""},
		"acts, with an alarm": {
			status.NodeFacts{Identity: active, Gate: open, Connected: true, Verdict: verdict(cloned)}, "", "",
		},
		"judged down, is back": {
			status.NodeFacts{Identity: active, Gate: open, Connected: true, Verdict: verdict(down)}, "", "",
		},
		"its gate is shut": {
			status.NodeFacts{Identity: active, Connected: true, Verdict: verdict(shut)},
			"node_not_admitted",
			"until lifecycle opens its gate",
		},
		"its gate is shut, and its disk full": {
			status.NodeFacts{Identity: active, Connected: true, Verdict: verdict(diskFull)},
			"node_not_admitted",
			"until lifecycle opens its gate",
		},
		"held, not judged": {
			status.NodeFacts{Identity: held, Gate: open, Connected: true}, "node_not_admitted", "its identity is held",
		},
		"lost": {status.NodeFacts{Identity: active, Gate: open}, "disconnected", "cannot be reached"},
		"lost, as judged": {
			status.NodeFacts{Identity: active, Gate: open, Verdict: verdict(fact)}, "disconnected", "cannot be reached",
		},
		"down": {
			status.NodeFacts{Identity: active, Gate: open, Verdict: verdict(down)}, "agent_down", "cannot be reached",
		},
		"unreachable": {
			status.NodeFacts{Identity: active, Gate: open, Verdict: verdict(unreachable)}, "agent_down", "cannot be reached",
		},
		"a finer reason": {
			status.NodeFacts{Identity: active, Gate: open, Verdict: verdict(expired)}, "disconnected", "cannot be reached",
		},
		"an outage": {
			status.NodeFacts{Identity: active, Gate: open, Verdict: verdict(down), ControlPlane: verdict(outage)},
			"control_plane_outage", "no replica of nodeapi listens",
		},
		"rolled back": {
			status.NodeFacts{Identity: active, Gate: open, ControlPlane: verdict(rollback)}, "disconnected", "cannot be reached",
		},
		"held": {
			status.NodeFacts{Identity: held, Gate: open, Connected: true, Verdict: verdict(onHold)},
			"identity_held",
			"its identity is held since 2026-07-01T11:59:00Z",
		},
		"held in an outage": {
			status.NodeFacts{Identity: held, Verdict: verdict(onHold), ControlPlane: verdict(outage)},
			"identity_held",
			"its identity is held",
		},
		"of a node that is not known": {status.NodeFacts{}, "disconnected", "cannot be reached"},
	} {
		t.Run(name, func(t *testing.T) {
			got := status.DescribeAgent(c.facts)
			if got.Reason != c.reason || !strings.Contains(got.Detail, c.detail) || (got.Reason == "") != (got.Detail == "") {
				t.Errorf("got %q: %q, want %q: %q", got.Reason, got.Detail, c.reason, c.detail)
			}
			if got.Reason != "" && !strings.HasSuffix(got.Detail, "; the workload may well run") {
				t.Errorf("silence is taken for a dead workload: %q", got.Detail)
			}
		})
	}
}

func TestEveryIdentityAndWorkspaceStateIsDescribed(t *testing.T) {
	for _, state := range names.All[commonv1.NodeIdentityState]() {
		got := status.Describe(status.NodeFacts{Identity: &recoveryv1.NodeIdentity{State: state}})
		if got.UserState == commonv1.UserState_USER_STATE_UNSPECIFIED {
			t.Errorf("a node that is %s has no user state", names.Of(state))
		}
	}
	want := map[commonv1.WorkspaceState]commonv1.UserState{
		commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING:    commonv1.UserState_USER_STATE_NORMAL,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:          commonv1.UserState_USER_STATE_NORMAL,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED:          commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
		commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:           commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
		commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING:      commonv1.UserState_USER_STATE_NORMAL,
		commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING:      commonv1.UserState_USER_STATE_RECOVERING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING: commonv1.UserState_USER_STATE_NORMAL,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:  commonv1.UserState_USER_STATE_NORMAL,
	}
	for _, state := range names.All[commonv1.WorkspaceState]() {
		if got := status.DescribeWorkspace(
			status.WorkspaceFacts{Workspace: &lifecyclev1.Workspace{State: state}},
		); got != want[state] {
			t.Errorf("%s: %s, want %s", names.Of(state), names.Of(got), names.Of(want[state]))
		}
	}
	provisioning := &lifecyclev1.Workspace{State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING}
	active := &lifecyclev1.Workspace{State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE}
	for reason, want := range map[string]commonv1.UserState{
		"": commonv1.UserState_USER_STATE_NORMAL, status.ReasonOutage: commonv1.UserState_USER_STATE_NORMAL,
		status.ReasonDisconnected:    commonv1.UserState_USER_STATE_NORMAL,
		"identity_held":              commonv1.UserState_USER_STATE_NORMAL,
		status.ReasonRegisterFailing: commonv1.UserState_USER_STATE_TEMPORARY,
	} {
		if got := status.DescribeWorkspace(status.WorkspaceFacts{
			Workspace: active,
			Agent:     status.AgentStatus{Reason: reason},
		}); got != want {
			t.Errorf("active, its agent %q: %s, want %s", reason, names.Of(got), names.Of(want))
		}
	}
	if got := status.DescribeWorkspace(status.WorkspaceFacts{
		Workspace: provisioning,
		Stalled:   true,
	}); got != commonv1.UserState_USER_STATE_TEMPORARY {
		t.Errorf("stalled: %s", names.Of(got))
	}
	if got := status.DescribeWorkspace(status.WorkspaceFacts{
		Workspace:  provisioning,
		HasStalled: true,
	}); got != commonv1.UserState_USER_STATE_TEMPORARY {
		t.Errorf("has stalled: %s", names.Of(got))
	}
	cancelled := &lifecyclev1.Workspace{
		State:         commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		LastErrorCode: "cancel_requested",
	}
	got := status.DescribeWorkspace(status.WorkspaceFacts{Workspace: cancelled})
	if got != commonv1.UserState_USER_STATE_NORMAL {
		t.Errorf("cancelled: %s", names.Of(got))
	}
}

func TestTimelineShowsWhatWasRecordedAndWhatHasNotBegun(t *testing.T) {
	run := &lifecyclev1.Run{
		RunId: "r", Round: 2,
		StepNames: []string{"Validate request", "Allocate storage", "Mark active"}, WhyWaiting: "waiting for the run",
	}
	do, undo := commonv1.Direction_DIRECTION_DO, commonv1.Direction_DIRECTION_UNDO
	attempts := []*lifecyclev1.StepAttempt{
		{
			Step: 0, Name: "Validate request", Direction: undo, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
			StartedAt: ago(time.Second), HeartbeatAt: ago(time.Second),
		},
		{
			Step: 1, Name: "Allocate storage", Direction: do, Attempt: 2, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED,
			StartedAt: ago(20 * time.Second), FinishedAt: ago(10 * time.Second), Error: "full", Stage: "make_directory",
			ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
		},
		{
			Step: 1, Name: "Allocate storage", Direction: undo, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
			StartedAt: ago(9 * time.Second), FinishedAt: ago(8 * time.Second),
		},
		{
			Step: 0, Name: "Validate request", Direction: do, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
			StartedAt: ago(60 * time.Second), FinishedAt: ago(58 * time.Second),
		},
		{
			Step: 1, Name: "Allocate storage", Direction: do, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_LOST,
			StartedAt: ago(50 * time.Second), FinishedAt: ago(40 * time.Second),
		},
	}
	type brief struct {
		Step, Dir, State string
		Attempt          int32
		Seconds, Beat    float64
		Advised          bool
		Why, Stage       string
	}
	var got []brief
	for _, i := range status.Timeline(run, attempts, now) {
		got = append(got, brief{
			i.GetStep() + " " + i.GetName(), names.Of(i.GetDirection()), names.Of(i.GetState()), i.GetAttempt(),
			i.GetDurationSeconds(), i.GetHeartbeatAgeSeconds(), i.GetAdvice() != "" && i.GetLikelyCause() != "",
			i.GetWhyWaiting(), i.GetStage(),
		})
	}
	want := []brief{
		{"1 Validate request", "do", "succeeded", 1, 2, 0, false, "", ""},
		{"2 Allocate storage", "do", "lost", 1, 10, 0, true, "", ""},
		{"2 Allocate storage", "do", "failed", 2, 10, 0, true, "", "make_directory"},
		{"3 Mark active", "do", "unspecified", 0, 0, 0, false, "", ""},
		{"2 Allocate storage", "undo", "succeeded", 1, 1, 0, false, "", ""},
		{"1 Validate request", "undo", "running", 1, 1, 1, false, "waiting for the run", ""},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if items := status.Timeline(run, nil, now); len(items) != 3 || items[0].GetAttempt() != 0 || items[0].GetRound() != 2 {
		t.Errorf("a run without attempts: %v", items)
	}
	// A run without the names of its steps still has all recorded attempts.
	if items := status.Timeline(&lifecyclev1.Run{}, attempts, now); len(items) != len(attempts) {
		t.Errorf("without names: %d items", len(items))
	}
}

func TestCurrentTask(t *testing.T) {
	for name, c := range map[string]struct {
		state   commonv1.TaskState
		expires time.Duration
		want    bool
	}{
		"queued":             {commonv1.TaskState_TASK_STATE_QUEUED, time.Minute, true},
		"queued, expired":    {commonv1.TaskState_TASK_STATE_QUEUED, -time.Minute, false},
		"delivered, expired": {commonv1.TaskState_TASK_STATE_DELIVERED, -time.Minute, false},
		"running, past":      {commonv1.TaskState_TASK_STATE_RUNNING, -time.Minute, true},
		"succeeded":          {commonv1.TaskState_TASK_STATE_SUCCEEDED, time.Minute, false},
		"unknown":            {commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, time.Minute, false},
	} {
		task := &lifecyclev1.Task{State: c.state, ExpiresAt: ago(-c.expires)}
		if got := status.CurrentTask(task, now); got != c.want {
			t.Errorf("%s: current %v", name, got)
		}
	}
}

func TestEveryRowOfTheCatalogueIsWhole(t *testing.T) {
	rows, err := status.Explain("")
	if err != nil || len(rows) < 50 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		if seen[r.GetCode()] {
			t.Errorf("%s twice", r.GetCode())
		}
		seen[r.GetCode()] = true
		if r.GetMeaning() == "" || r.GetImpact() == "" || r.GetOwner() == "" || r.GetNextAction() == "" ||
			r.GetAction() == commonv1.Action_ACTION_UNSPECIFIED {
			t.Errorf("%s is not whole: %v", r.GetCode(), r)
		}
	}
	if _, err := status.Explain("no_such_reason"); err == nil {
		t.Error("an unknown reason was explained")
	}
}
