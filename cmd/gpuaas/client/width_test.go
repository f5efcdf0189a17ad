package client

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

const (
	uuidOne   = "01a202da-fe6f-713c-ac64-0f4e1b6a9d31"
	uuidTwo   = "01a202da-fe70-7c11-9a02-77c1d2e3f405"
	uuidThree = "01a202e6-0b1c-7a55-8d3e-1b6a9d310c64"
	longError = "launch_box: the box did not start: exec: \"/opt/trainer/bin/serve\": stat /opt/trainer/bin/serve: no such file or directory"
)

// shown is one list with values as long as they are in use.
type shown struct {
	name string
	keys []string // values that no width may cut, whole or as a short id
	show func(*printer) error
}

func listed[T proto.Message](name string, v view[T], keys []string, items ...T) shown {
	return shown{name, keys, func(pr *printer) error { return list(pr, v, items, "") }}
}

// longLists returns all lists with realistic long values.
func longLists() []shown {
	return []shown{
		listed("nodes", nodeView, []string{"box-2ba66a74c341-1", "rack12-node-0007", "operator_action_required", "normal"},
			&readmodelv1.Node{
				NodeId: uuidOne, Name: "box-2ba66a74c341-1", Connected: true, UserState: commonv1.UserState_USER_STATE_NORMAL,
				LastHeartbeatAt: ago(3 * time.Second),
				Identity:        &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE},
				Gate:            &lifecyclev1.NodeGate{Admitted: true, SlotsUsed: 1, Slots: 1, GpusUsed: 8, Gpus: 8},
				WorkspaceId:     uuidThree, Workspace: "acme/canary-7f3a91c2",
			},
			&readmodelv1.Node{
				NodeId: uuidTwo, Name: "rack12-node-0007", UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
				LastHeartbeatAt: ago(49 * time.Hour),
				Identity:        &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED},
				Reason:          "identity_revoked_or_fenced",
				Gate:            &lifecyclev1.NodeGate{Cordoned: true, Slots: 4, Gpus: 8},
			}),
		listed("workspaces", workspaceView,
			[]string{"research-platform", "canary-7f3a91c2-training-run", "decommissioning", "active"},
			&readmodelv1.Workspace{
				WorkspaceId: uuidOne, Tenant: "research-platform", Name: "canary-7f3a91c2-training-run",
				State:     commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
				UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, Epoch: 12, CurrentStep: "Stop the workloads",
				Stalled: true, NodeId: uuidTwo, NodeName: "box-2ba66a74c341-1", StateAt: ago(16 * time.Minute),
				LastError: longError,
				Reason:    "agent_down",
			},
			&readmodelv1.Workspace{
				WorkspaceId: uuidTwo, Tenant: "acme", Name: "demo2", State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
				Epoch: 1, StateAt: ago(30 * time.Hour), UserState: commonv1.UserState_USER_STATE_NORMAL, AgentConnected: true,
				NodeName: "box-91c2ba66a743-1",
			}),
		listed("timeline", timelineView,
			[]string{"undo Wait for workloads ready", "failed (stalled)", "succeeded", "/opt/trainer/bin/serve:", "directory"},
			&readmodelv1.TimelineItem{
				Step: "1", Name: "Reserve a slot", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
				State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, StartedAt: ago(time.Hour), DurationSeconds: 0.25,
			},
			&readmodelv1.TimelineItem{
				Step: "7", Name: "Wait for workloads ready", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 2,
				State: commonv1.AttemptState_ATTEMPT_STATE_FAILED, Stalled: true, StartedAt: ago(30 * time.Minute),
				DurationSeconds: 1800, Error: longError,
				ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
			},
			&readmodelv1.TimelineItem{
				Step: "7", Name: "Wait for workloads ready", Direction: commonv1.Direction_DIRECTION_UNDO, Attempt: 1,
				State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, StartedAt: ago(time.Minute), DurationSeconds: 0.5,
			}),
		listed("runs", runView, []string{"retry", "0f4e1b6a9d31", "succeeded"},
			&readmodelv1.RunBrief{
				RunId: uuidOne, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, State: commonv1.RunState_RUN_STATE_SUCCEEDED,
				StartedAt: ago(time.Hour), EndedAt: ago(time.Minute), FailedStep: "Wait for workloads ready", Shown: true,
			}),
		listed("actions", actionView, []string{"decommission", "retry-undo"},
			&lifecyclev1.ActionOption{
				Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Possible: true,
				Consequence: "ends the workspace for good: stops its workloads, deletes its storage and gives back 8 GPUs",
			},
			&lifecyclev1.ActionOption{
				Kind:   commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO,
				Unmet:  []string{"the workspace is stuck; it is active", "no operation is open"},
				Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
			}),
		listed("tasks", taskView, []string{"outcome_unknown", "0f4e1b6a9d31", "2e3f405"},
			&readmodelv1.Task{
				TaskId: uuidOne, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: uuidThree, NodeName: "box-2ba66a74c341-1",
				State: commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, Attempt: 3, CreatedAt: ago(26 * time.Hour),
				Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED,
			},
			&readmodelv1.Task{
				TaskId: uuidTwo, NodeId: uuidThree, NodeName: "rack12-node-0007",
				State: commonv1.TaskState_TASK_STATE_QUEUED, CreatedAt: ago(time.Second),
			}),
		listed("instances", instanceView, []string{"canary-7f3a91c2-training-run", "ended", "live"},
			&lifecyclev1.Instance{
				InstanceId: uuidOne, WorkspaceId: uuidTwo, WorkspaceName: "canary-7f3a91c2-training-run", Epoch: 12,
				State: commonv1.InstanceState_INSTANCE_STATE_ENDED, Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER,
				ProviderId: "docker:7f3a91c2ba66a74c3417f3a91c2ba66a74c341", StartedAt: ago(26 * time.Hour),
				EndedAt: ago(time.Hour), NodeId: uuidThree,
			},
			&lifecyclev1.Instance{
				InstanceId: uuidTwo, WorkspaceId: uuidThree, Unaccounted: true, State: commonv1.InstanceState_INSTANCE_STATE_LIVE,
				ProviderId: "process:4242",
			}),
		listed("claims", claimView, []string{"storage", "ws-01a202dafe6f713cac640f4e1b6a9d31", "orphaned"},
			&lifecyclev1.Claim{
				ClaimId: uuidOne, WorkspaceId: uuidTwo, Kind: "storage", Name: "ws-01a202dafe6f713cac640f4e1b6a9d31",
				Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL, OrphanedAt: ago(time.Hour), OrphanedBy: "ana@example.org",
				OrphanReason: "rack 12 is dead", NodeId: uuidThree,
			}),
		listed("allocations", allocationView, []string{"release_failed", "0f4e1b6a9d31", "acme/canary-7f3a91c2"},
			&lifecyclev1.Allocation{
				AllocationId: uuidOne, WorkspaceId: uuidTwo, Epoch: 12,
				State: commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, Workspace: "acme/canary-7f3a91c2",
				Occupancy: "cleanup", Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS, NodeId: uuidThree, Fence: 14,
				StateAt: ago(20 * time.Minute), LastError: longError,
			}),
		listed("findings", findingView, []string{"p0", "open, node cordoned", "0f4e1b6a9d31"},
			&lifecyclev1.Finding{
				FindingId: uuidOne, Severity: commonv1.Severity_SEVERITY_P0, Kind: commonv1.FindingKind(1),
				SubjectType: "workspace", SubjectId: uuidTwo, FirstSeenAt: ago(26 * time.Hour), Count: 1041, Cordoned: true,
				Summary: "the allocation is released and its instance still runs on the node",
			}),
		listed("incidents", incidentView, []string{"P0", "0f4e1b6a9d31"},
			&recoveryv1.Incident{
				IncidentId: uuidOne, Kind: commonv1.IncidentKind(1), Severity: commonv1.Severity_SEVERITY_P0,
				WorkspaceIds: []string{uuidTwo, uuidThree},
				Summary:      "7 nodes share cert_untrusted_by_ingress: repair the rendering of the authority first",
				OpenedAt:     ago(26 * time.Hour),
			}),
		listed("recoveries", recoveryView, []string{"research-platform/canary-7f3a91c2-training-run"},
			&recoveryv1.RecoveryRecord{
				RecordId: uuidOne, Workspace: "research-platform/canary-7f3a91c2-training-run", DetectedAt: ago(26 * time.Hour),
				Step: "Wait for workloads ready", WhatWorked: "by itself", TotalSeconds: 1198,
				WithheldBecause: "the fleet brake is engaged",
				NextAt:          ago(-time.Minute),
			}),
		listed("audit", auditView, []string{
			"1h0m ago", "ana.maria.longname@example.org", "workspace.decommission", "refused",
			"workspace acme/canary-7f3a91c2",
		},
			&readmodelv1.AuditRow{Number: 1048576, Workspace: "acme/canary-7f3a91c2", Entry: &commonv1.AuditEntry{
				At: ago(time.Hour), Action: "workspace.decommission", Outcome: "refused", Actor: "ana.maria.longname@example.org",
				SubjectType: "workspace", SubjectId: uuidTwo, Count: 12,
				Reason: "the workspace belongs to another tenant, and the person may not operate it",
			}}),
		listed("tenants", tenantView, []string{"research-platform"},
			&lifecyclev1.Tenant{
				TenantId: uuidOne, Name: "research-platform",
				Quota: &lifecyclev1.Quota{Workspaces: 100, Gpus: 64, StorageBytes: 1 << 40}, CreatedAt: ago(99 * time.Hour),
			}),
		listed("policies", policyView, []string{"node.heartbeat_stale_after_seconds", "300"},
			&recoveryv1.PolicyKey{
				Key: "node.heartbeat_stale_after_seconds", Value: "300", DefaultValue: "90", Minimum: "15", Maximum: "3600",
				Overridden: true, UpdatedBy: "ana.maria.longname@example.org",
				Meaning: "how old the last heartbeat may be before silence counts",
			}),
		listed("reasons", reasonView, []string{"policy_weakening_unacknowledged"},
			&readmodelv1.ReasonText{
				Code: "policy_weakening_unacknowledged", Meaning: "the new value weakens a promise, and nobody has accepted that",
				NextAction: "say so with --acknowledge-weakening",
			}),
		{"status", []string{"lock_store", "down"}, func(pr *printer) error {
			return table(pr, componentColumns, []*readmodelv1.ComponentStatus{
				{Name: "database", Ok: true, ObservedAt: ago(time.Second)},
				{
					Name: "lock_store", State: commonv1.PartState_PART_STATE_DOWN,
					Detail: "dial tcp 127.0.0.1:6379: connect: connection refused", ObservedAt: ago(2 * time.Second),
					Since: ago(time.Hour), NextAction: "start Redis again; leases are kept in the database meanwhile",
					Severity: commonv1.Severity_SEVERITY_P1,
				},
			})
		}},
	}
}

func terminal(out *bytes.Buffer, width int) *printer {
	return &printer{
		format: formatTable, out: out, err: &bytes.Buffer{}, tty: true, relative: true, width: width,
		now: noon,
	}
}

// TestKeysAreNeverCut: at any width the keys of every row are whole, and lines are longer than the terminal only where
// the keys alone are.
func TestKeysAreNeverCut(t *testing.T) {
	for _, l := range longLists() {
		for _, width := range []int{60, 80, 100, 140} {
			var out bytes.Buffer
			if err := l.show(terminal(&out, width)); err != nil {
				t.Fatal(err)
			}
			for _, key := range l.keys {
				short := key
				if hexDigits.MatchString(key) && len(key) > 8 {
					short = key[len(key)-8:]
				}
				if !strings.Contains(out.String(), key) && !strings.Contains(out.String(), short) {
					t.Errorf("%s at %d columns cuts %q:\n%s", l.name, width, key, out.String())
				}
			}
			for line := range strings.Lines(out.String()) {
				if got := ansi.StringWidth(strings.TrimSuffix(line, "\n")); got > width && width >= 80 {
					t.Errorf("%s at %d columns has a line of %d: %q", l.name, width, got, line)
				}
			}
		}
	}
}

var hexDigits = regexp.MustCompile(`^[0-9a-f]+$`)

// TestGoldenWidths checks every list as people see it on terminals of three widths.
func TestGoldenWidths(t *testing.T) {
	for _, l := range longLists() {
		t.Run(l.name, func(t *testing.T) {
			var whole bytes.Buffer
			for _, width := range []int{80, 100, 140} {
				whole.WriteString("-- " + map[int]string{80: "80", 100: "100", 140: "140"}[width] + " --\n")
				if err := l.show(terminal(&whole, width)); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join("testdata", "width", l.name+".golden")
			if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
				if err := os.WriteFile(path, whole.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil || string(want) != whole.String() {
				t.Errorf("%s differs (%v):\n%s", path, err, whole.String())
			}
		})
	}
}

// TestLongTextCostsNoColumns: a long error is cut before other columns are dropped.
func TestLongTextCostsNoColumns(t *testing.T) {
	var out bytes.Buffer
	failed := &readmodelv1.Workspace{
		WorkspaceId: uuidOne, Tenant: "acme", Name: "demo2", State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, Epoch: 3,
		StateAt: ago(time.Minute), UserState: commonv1.UserState_USER_STATE_NORMAL, LastError: longError,
	}
	if err := list(terminal(&out, 80), workspaceView, []*readmodelv1.Workspace{failed}, ""); err != nil {
		t.Fatal(err)
	}
	header, row, _ := strings.Cut(out.String(), "\n")
	if diff := cmp.Diff("TENANT NAME STATE USER STATE EPOCH SINCE LAST ERROR",
		strings.Join(strings.Fields(header), " ")); diff != "" {
		t.Errorf("columns (-want +got):\n%s\n%s", diff, out.String())
	}
	if got := ansi.StringWidth(strings.TrimSuffix(row, "\n")); got != 80 || !strings.Contains(row, "launch_box: the box") {
		t.Errorf("the error does not fill the width: %d\n%s", got, out.String())
	}
}

// TestWideCutsNothing: `-o wide` on a terminal shows every column and every value whole, ids too.
func TestWideCutsNothing(t *testing.T) {
	for _, l := range longLists() {
		var out bytes.Buffer
		pr := terminal(&out, 80)
		pr.format = formatWide
		if err := l.show(pr); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "...") {
			t.Errorf("%s -o wide cuts:\n%s", l.name, out.String())
		}
	}
}

// TestGetKeepsItsLabels: the names of the lines are never cut, whatever the width.
func TestGetKeepsItsLabels(t *testing.T) {
	node := &readmodelv1.Node{
		NodeId: uuidOne, Name: "n1", Gate: &lifecyclev1.NodeGate{Host: &commonv1.HostFacts{
			Hostname: strings.Repeat("very-long-host-name-", 8), Os: "linux", Kernel: "6.18", Cpus: 2, MemoryBytes: 1 << 34,
		}},
	}
	for _, width := range []int{40, 80, 100} {
		var out bytes.Buffer
		if err := one(terminal(&out, width), nodeView, node); err != nil {
			t.Fatal(err)
		}
		for _, label := range []string{"NAME", "CONNECTED", "STATE", "HEARTBEAT", "ID", "gate: epochs", "host"} {
			if !regexp.MustCompile(`(?m)^` + label + `( |$)`).MatchString(out.String()) {
				t.Errorf("at %d columns there is no line %q:\n%s", width, label, out.String())
			}
		}
	}
}

// full is a writer to a full disk.
type full struct{}

var errFull = errors.New("no space left on device")

func (full) Write([]byte) (int, error) { return 0, errFull }

// TestWriteErrorsFail: a failed write fails the command, on a terminal and in a pipe.
func TestWriteErrorsFail(t *testing.T) {
	fleet := []*readmodelv1.Node{{Name: "node-1"}}
	for _, tty := range []bool{true, false} {
		pr := &printer{format: formatTable, out: full{}, err: &bytes.Buffer{}, tty: tty, width: 80, now: noon}
		if err := list(pr, nodeView, fleet, ""); !errors.Is(err, errFull) {
			t.Errorf("list with tty %t: %v", tty, err)
		}
		if err := one(pr, nodeView, fleet[0]); !errors.Is(err, errFull) {
			t.Errorf("one with tty %t: %v", tty, err)
		}
	}
}

// TestFollowedRowsStayInTheirColumns: a row that changes is aligned with the columns above it; if it does not fit, the
// header is printed again.
func TestFollowedRowsStayInTheirColumns(t *testing.T) {
	var out bytes.Buffer
	rows := newFollower(terminal(&out, 80), workspaceView)
	workspace := func(id, name, failure string) *readmodelv1.Workspace {
		return &readmodelv1.Workspace{
			WorkspaceId: id, Tenant: "acme", Name: name,
			State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, LastError: failure,
		}
	}
	for _, err := range []error{
		rows.begin([]*readmodelv1.Workspace{workspace(uuidOne, "one", "")}),
		rows.change(workspace(uuidOne, "one", ""), true),
		rows.change(workspace(uuidTwo, "two", ""), true),
		rows.change(workspace(uuidThree, "a-name-that-is-longer", ""), true),
		rows.change(workspace(uuidOne, "one", longError), true),
		rows.change(workspace(uuidOne, "one", "short"), false),
		rows.change(workspace(uuidOne, "one", "gone"), false),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 80 {
			t.Errorf("a line of %d: %q", width, line)
		}
		got = append(got, strings.Join(strings.Fields(line)[:2], " "))
	}
	want := []string{
		"TENANT NAME", "acme one", "acme two", "TENANT NAME", "acme a-name-that-is-longer", "TENANT NAME",
		"acme one", "acme one",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s\n%s", diff, out.String())
	}
}

// TestWideCharacters: columns are aligned whatever the width of the characters, and a cut text stays within the width.
func TestWideCharacters(t *testing.T) {
	var out bytes.Buffer
	fleet := []*readmodelv1.Node{{Name: "東京-1", Connected: true}, {Name: "n", Connected: true}}
	if err := list(terminal(&out, 80), nodeView, fleet, ""); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		before, _, found := strings.Cut(line, "yes")
		if found && ansi.StringWidth(before) != len("東京-1")-2+len("  ") { // six bytes that are four wide
			t.Errorf("%q begins its second column at %d", line, ansi.StringWidth(before))
		}
	}
	out.Reset()
	failed := &readmodelv1.Workspace{Tenant: "acme", Name: "demo", LastError: strings.Repeat("東京", 60)}
	if err := list(terminal(&out, 80), workspaceView, []*readmodelv1.Workspace{failed}, ""); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 80 {
			t.Errorf("%q is %d wide", line, width)
		}
	}
	if !strings.Contains(out.String(), "...") {
		t.Errorf("nothing was cut:\n%s", out.String())
	}
}
