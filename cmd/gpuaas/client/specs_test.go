package client_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// TestSpecs: the specs that flags and files result in.
func TestSpecs(t *testing.T) {
	f := mesh(t)
	stock(f)
	process := commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
	file := filepath.Join(t.TempDir(), "spec.yaml")
	write(t, file, "gpus: 1\nstorage: 10Gi\nworkloads:\n- name: web\n  command: [python3]\n  ports: [{name: http, "+
		"port: 80}]\n", 0o600)
	tests := []struct {
		name  string
		args  []string
		stdin string
		want  *lifecyclev1.WorkspaceSpec
	}{
		{"nothing", nil, "", &lifecyclev1.WorkspaceSpec{}},
		{
			"flags", strings.Fields("--command python3 --command -m --arg http.server --port 8080 --port admin=0 --env A=b=c " +
				"--ready-path / --gpus 2 --storage 1.5Gi --placement process"), "",
			&lifecyclev1.WorkspaceSpec{Gpus: 2, StorageBytes: 3 << 29, Placement: process, Workloads: []*nodev1.Workload{{
				Name: "main", Command: []string{"python3", "-m"}, Args: []string{"http.server"}, Env: map[string]string{"A": "b=c"},
				Ports: []*nodev1.Port{{Name: "http", Port: 8080}, {Name: "admin"}}, Readiness: &nodev1.Readiness{HttpPath: "/"},
			}}},
		},
		{
			"least uptime", strings.Fields("--command job --min-uptime 10s"), "",
			&lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{
				Name: "main", Command: []string{"job"}, Readiness: &nodev1.Readiness{MinUptime: durationpb.New(10 * time.Second)},
			}}},
		},
		{
			"no least uptime", strings.Fields("--command job --port 80 --min-uptime 0s"), "",
			&lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{
				Name: "main", Command: []string{"job"}, Ports: []*nodev1.Port{{Name: "http", Port: 80}},
				Readiness: &nodev1.Readiness{Tcp: true, MinUptime: durationpb.New(0)},
			}}},
		},
		{
			"file",
			[]string{"--spec", file, "--gpus", "0", "--placement", "process"},
			"",
			&lifecyclev1.WorkspaceSpec{StorageBytes: 10 << 30, Placement: process, Workloads: []*nodev1.Workload{{
				Name: "web", Command: []string{"python3"}, Ports: []*nodev1.Port{{Name: "http", Port: 80}},
			}}},
		},
		{
			"standard input",
			[]string{"--spec", "-"},
			`{"plan": "local", "placement": "process", "storage_bytes": 5}`,
			&lifecyclev1.WorkspaceSpec{Plan: "local", Placement: process, StorageBytes: 5},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := callIn(t.Context(), []byte(tt.stdin),
				append([]string{"workspaces", "create", "d", "--tenant", "acme", "--idempotency-key", "k"}, tt.args...)...)
			got.wants(t, 0)
			reqs := sent[*readmodelv1.CreateWorkspaceRequest](f)
			want := &readmodelv1.CreateWorkspaceRequest{Tenant: "acme", Name: "d", IdempotencyKey: "k", Spec: tt.want}
			if diff := cmp.Diff(want, reqs[len(reqs)-1], protocmp.Transform()); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
		})
	}
	for _, bad := range []string{
		"gpu: 1", "gpus: one", "- a", "storage: 1Gi\nstorage_bytes: 1", "placement: moon",
		"storage: much", "gpus: 1\ngpus: 2",
	} {
		if got := callIn(t.Context(), []byte(bad), "workspaces", "create", "d", "--tenant", "acme", "--spec",
			"-"); got.code != 2 {
			t.Errorf("%q: exit %d: %s", bad, got.code, got.err)
		}
	}
	call(t, "workspaces", "create", "d", "--tenant", "acme", "--spec", file, "--image", "x").wants(t, 2)
	for _, bad := range []string{"--command x --min-uptime 301s", "--command x --min-uptime -1s", "--min-uptime 1s"} {
		call(t, append(strings.Fields("workspaces create d --tenant acme"), strings.Fields(bad)...)...).wants(t, 2)
	}
}

// TestNamesResolve: a filter takes a workspace's name where the API takes an id.
func TestNamesResolve(t *testing.T) {
	f := mesh(t)
	stock(f)
	for _, noun := range []string{"instances", "claims", "allocations", "tasks"} {
		call(t, noun, "list", "--workspace", "acme/demo2").wants(t, 0)
	}
	tasks, claims := sent[*readmodelv1.ListTasksRequest](f)[0], sent[*readmodelv1.ListClaimsRequest](f)[0]
	if got := tasks.GetWorkspaceId() + claims.GetWorkspaceId(); got != workspaceID+workspaceID {
		t.Errorf("asked for %q", got)
	}
	if n := len(sent[*readmodelv1.ResolveRequest](f)); n != 4 {
		t.Errorf("%d names were resolved", n)
	}
}

// TestCompletion: the shell gets the names that the mesh has, where they fit, and none if the mesh does not answer.
func TestCompletion(t *testing.T) {
	f := mesh(t)
	stock(f)
	for line, want := range map[string]string{
		"nodes get |n":                                    "node-1",
		"nodes get node-1 |":                              "",
		"workspaces get |":                                "acme/demo2",
		"workspaces create demo --tenant |":               "acme",
		"workspaces create demo --placement |p":           "process",
		"tasks list --workspace |":                        "acme/demo2",
		"tasks list --node |":                             "node-1",
		"config use-context |":                            "test",
		"nodes list --output |":                           "jsonl",
		"explain reason |quota":                           "quota_exceeded",
		"explain reason |workload_s":                      "workload_stopped",
		"policy set |":                                    "node.heartbeat_stale_after_seconds",
		"policy get |":                                    "saga.retry_limit",
		"policy set saga.retry_limit |":                   "3",
		"policy set saga.retry_limit 3 |":                 "",
		"workspaces wait demo2 --for |":                   "state=",
		"workspaces wait demo2 --for |state=":             "state=active",
		"workspaces wait demo2 --for |user_state=normal,": "user_state=normal,temporary",
		"tasks get |":                                     "",
		"tenants create |":                                "",
		"workspaces decommission d --reason |":            "",
	} {
		done, begun, _ := strings.Cut(line, "|")
		got := call(t, append(append([]string{"__complete"}, strings.Fields(done)...), begun)...)
		offered := strings.Split(got.out, "\n")
		if want == "" && offered[0] != ":4" || want != "" && !slices.Contains(offered, want) {
			t.Errorf("%q is offered %q", line, got.out)
		}
	}
	refuse(f, "ListNodes", fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""))
	if got := call(t, "__complete", "nodes", "get", ""); !strings.HasPrefix(got.out, ":4") {
		t.Errorf("offered %q", got.out)
	}
}

// TestEveryPrintedReasonIsExplained: the reasons that nodes, workspaces, runs and allocations print are explained as
// the reasons of refusals are, without a mesh.
func TestEveryPrintedReasonIsExplained(t *testing.T) {
	isolate(t, filepath.Join(t.TempDir(), "contexts.yaml"))
	all := call(t, "explain", "reason", "-o", "name").wants(t, 0).out
	codes := slices.Concat(codesOf[commonv1.Reason](), codesOf[commonv1.DriftReason](), codesOf[commonv1.DiagnosticCode](),
		codesOf[commonv1.FindingKind](), codesOf[commonv1.IncidentKind]())
	if len(codes) < 150 {
		t.Errorf("only %d codes", len(codes))
	}
	codes = append(codes,
		"driver_silent", "undo_exhausted", "run_stalled", "workload_stopped",
		"workload_crash_loop", "agent_down", "disconnected", "control_plane_outage", "token_reuse",
		"register_failing", "step_stalled", "cloned_identity_detected", "join_state_lost", "identity_held",
		"identity_revoked_or_fenced", "node_not_admitted", "node_disk_full", "operation_joined", "release_failed",
	)
	for _, code := range codes {
		if got := call(t, "explain", "reason", code); got.code != 0 || !strings.Contains(got.out, "CODE\t"+code+"\n") {
			t.Errorf("%s: exit %d\n%s%s", code, got.code, got.out, got.err)
		}
		if !strings.Contains("\n"+all, "\n"+code+"\n") {
			t.Errorf("%s is not listed", code)
		}
	}
}

// codesOf returns the spelled values of an enum that is shown as a reason.
func codesOf[E protoreflect.Enum]() []string {
	var out []string
	for _, value := range names.All[E]() {
		out = append(out, names.Of(value))
	}
	return out
}

// TestAReasonThatIsMisspelledIsSuggested: the error for an unknown code names those that are like it.
func TestAReasonThatIsMisspelledIsSuggested(t *testing.T) {
	isolate(t, filepath.Join(t.TempDir(), "contexts.yaml"))
	got := call(t, "explain", "reason", "agent-dwn").wants(t, 3)
	if !strings.Contains(got.err, `there is no reason "agent-dwn"`) ||
		!strings.Contains(got.err, "did you mean agent_down") {
		t.Error(got.err)
	}
}

var _ readmodelv1connect.QueryServiceHandler = (*fake)(nil)
