package status_test

import (
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
	active := &recoveryv1.NodeIdentity{
		State:     commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
		CreatedAt: ago(time.Hour), StateAt: ago(30 * time.Minute),
	}
	in := func(state commonv1.NodeIdentityState, alarm string) *recoveryv1.NodeIdentity {
		return &recoveryv1.NodeIdentity{State: state, Alarm: alarm, CreatedAt: ago(time.Hour)}
	}
	open := &lifecyclev1.NodeGate{Admitted: true}
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
	listening := now.Add(-time.Hour)
	const (
		normal    = commonv1.UserState_USER_STATE_NORMAL
		temporary = commonv1.UserState_USER_STATE_TEMPORARY
		operator  = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
		security  = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
	)
	for name, c := range map[string]struct {
		facts  status.NodeFacts
		state  commonv1.UserState
		reason string
		heard  time.Duration // ago; 0: never
		since  time.Duration
	}{
		"connected": {
			facts: status.NodeFacts{
				Identity: active, Gate: open, Session: admitted, BeatAt: beat, Connected: true,
				Since: now.Add(-time.Minute),
			},
			state: normal, heard: 4 * time.Second, since: time.Minute,
		},
		"heard after the beat": {
			facts: status.NodeFacts{
				Identity: active, Gate: open, Connected: true, Since: now.Add(-time.Second), BeatAt: beat,
				Session: &nodev1.SessionChanged{State: commonv1.SessionState_SESSION_STATE_ADMITTED, LastSeenAt: ago(time.Second)},
			},
			state: normal, heard: time.Second, since: time.Second,
		},
		"cordoned": {
			facts: status.NodeFacts{
				Identity: active, Gate: &lifecyclev1.NodeGate{Admitted: true, Cordoned: true}, Session: admitted, BeatAt: beat,
				Connected: true, Since: now,
			},
			state: normal, heard: 4 * time.Second,
		},
		"no room on its disk": {
			facts: status.NodeFacts{
				Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now, Gate: &lifecyclev1.NodeGate{
					Admitted: true, Host: &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Full: true, Path: "/var/lib/gpuaas"}},
				},
			},
			state: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, reason: "node_disk_full", heard: 4 * time.Second,
		},
		"gate not open": {
			facts: status.NodeFacts{Identity: active, Session: admitted, BeatAt: beat, Connected: true, Since: now},
			state: temporary, reason: "node_not_admitted", heard: 4 * time.Second,
		},
		"just lost": {
			facts: status.NodeFacts{Identity: active, Gate: open, Session: closed(20 * time.Second)},
			state: temporary, reason: "disconnected", heard: 20 * time.Second, since: 20 * time.Second,
		},
		"lost for long": {
			facts: status.NodeFacts{Identity: active, Gate: open, Session: closed(121 * time.Second)},
			state: temporary, reason: "agent_down", heard: 121 * time.Second, since: 121 * time.Second,
		},
		"lost while nobody listened": {
			facts: status.NodeFacts{
				Identity: active, Gate: open, Session: closed(time.Hour),
				ListeningSince: now.Add(-10 * time.Second),
			},
			state: temporary, reason: "disconnected", heard: time.Hour, since: time.Hour,
		},
		"nobody listens": {
			facts: status.NodeFacts{
				Identity: active, Gate: open, Session: admitted, BeatAt: now.Add(-time.Minute),
				ListeningSince: time.Unix(0, 0),
			},
			state: temporary, reason: "control_plane_outage", heard: 10 * time.Minute, since: time.Minute,
		},
		"never connected": {
			facts: status.NodeFacts{Identity: active, Gate: open}, state: temporary, reason: "agent_down",
			since: 30 * time.Minute,
		},
		"pending": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, "")}, state: normal,
			since: time.Hour,
		},
		"held": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, "")}, state: operator,
			reason: "identity_held", since: time.Hour,
		},
		"join state lost": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, "join_state_lost")},
			state: operator, reason: "join_state_lost", since: time.Hour,
		},
		"cloned": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD,
				"cloned_identity_detected")},
			state: security, reason: "cloned_identity_detected", since: time.Hour,
		},
		"cloned and fenced": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
				"cloned_identity_detected")},
			state: security, reason: "cloned_identity_detected", since: time.Hour,
		},
		"token reuse": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, "token_reuse")},
			state: security, reason: "token_reuse", since: time.Hour,
		},
		"quarantined": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, "")},
			state: operator, reason: "identity_revoked_or_fenced", since: time.Hour,
		},
		"fenced, still connected": {
			facts: status.NodeFacts{
				Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED, ""), Gate: open,
				Session: admitted, BeatAt: beat, Connected: true, Since: now,
			},
			state: operator, reason: "identity_revoked_or_fenced", heard: 4 * time.Second,
		},
		"retired": {
			facts: status.NodeFacts{Identity: in(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
				"cloned_identity_detected")},
			state: operator, reason: "identity_revoked_or_fenced", since: time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.facts.StaleAfter = 2 * time.Minute
			switch {
			case c.facts.ListeningSince.IsZero():
				c.facts.ListeningSince = listening
			case c.facts.ListeningSince.Unix() == 0:
				c.facts.ListeningSince = time.Time{}
			}
			got := status.Describe(c.facts, now)
			if got.UserState != c.state || got.Reason != c.reason {
				t.Errorf("got %s %q, want %s %q", names.Of(got.UserState), got.Reason, names.Of(c.state), c.reason)
			}
			if (got.UserState == normal) != (got.Reason == "") {
				t.Errorf("%s with reason %q", names.Of(got.UserState), got.Reason)
			}
			if got.Reason != "" {
				if got.NextAction == "" {
					t.Error("no next action")
				}
				if _, err := status.Explain(got.Reason); err != nil {
					t.Errorf("%s cannot be explained: %v", got.Reason, err)
				}
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

func TestEveryIdentityAndWorkspaceStateIsDescribed(t *testing.T) {
	for _, state := range names.All[commonv1.NodeIdentityState]() {
		if got := status.Describe(status.NodeFacts{Identity: &recoveryv1.NodeIdentity{State: state}},
			now); got.UserState == commonv1.UserState_USER_STATE_UNSPECIFIED {
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
		status.ReasonDisconnected:    commonv1.UserState_USER_STATE_TEMPORARY,
		status.ReasonHeld:            commonv1.UserState_USER_STATE_TEMPORARY,
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
			StartedAt: ago(20 * time.Second), FinishedAt: ago(10 * time.Second), Error: "full",
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
		Why              string
	}
	var got []brief
	for _, i := range status.Timeline(run, attempts, now) {
		got = append(got, brief{
			i.GetStep() + " " + i.GetName(), names.Of(i.GetDirection()), names.Of(i.GetState()), i.GetAttempt(),
			i.GetDurationSeconds(), i.GetHeartbeatAgeSeconds(), i.GetAdvice() != "" && i.GetLikelyCause() != "",
			i.GetWhyWaiting(),
		})
	}
	want := []brief{
		{"1 Validate request", "do", "succeeded", 1, 2, 0, false, ""},
		{"2 Allocate storage", "do", "lost", 1, 10, 0, true, ""},
		{"2 Allocate storage", "do", "failed", 2, 10, 0, true, ""},
		{"3 Mark active", "do", "unspecified", 0, 0, 0, false, ""},
		{"2 Allocate storage", "undo", "succeeded", 1, 1, 0, false, ""},
		{"1 Validate request", "undo", "running", 1, 1, 1, false, "waiting for the run"},
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
