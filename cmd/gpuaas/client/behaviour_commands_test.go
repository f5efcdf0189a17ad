package client_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func TestEnroll(t *testing.T) {
	f := mesh(t)
	const secret = "gbt_0192_secret"
	pem := "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
	always(f, "EnrollNode", &readmodelv1.EnrollNodeResponse{
		NodeId: nodeID, Token: secret, ExpiresAt: at(9), Pos: "1",
		Profile: &commonv1.Profile{
			Name: "default", ApiUrl: "10.0.0.1:7443", RecoveryUrl: "https://10.0.0.1:7444", TerminalUrl: "https://10.0.0.1:7445",
			CaBundlePem: []byte(pem), RecoveryCaBundlePem: []byte(pem + pem),
		},
	})
	dir := filepath.Join(t.TempDir(), "bundle")
	for _, form := range []string{"table", "json"} {
		out := filepath.Join(dir, form)
		got := call(t, "nodes", "enroll", "--name", "rack1", "--out", out, "--gpus", "2", "-o", form).wants(t, 0)
		if strings.Contains(got.out+got.err, secret) {
			t.Errorf("the token was shown: %s %s", got.out, got.err)
		}
		if !strings.Contains(got.err, "gpuaas-node-agent enroll --bundle "+out+" --gpus 2") {
			t.Errorf("stderr: %s", got.err)
		}
		if again := call(t, "nodes", "enroll", "--name", "rack1", "--out", out).wants(t, 2); !strings.Contains(again.err,
			"never overwritten") {
			t.Errorf("stderr: %s", again.err)
		}
	}
	if n := len(sent[*readmodelv1.EnrollNodeRequest](f)); n != 2 {
		t.Errorf("%d tokens were issued, two of them used", n)
	}
	out := filepath.Join(dir, "table")
	data, err := os.ReadFile(filepath.Join(out, "node-agent.env"))
	if err != nil {
		t.Fatal(err)
	}
	env, err := envfile.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		envfile.APIURL: "10.0.0.1:7443", envfile.RecoveryURL: "https://10.0.0.1:7444",
		envfile.TerminalURL: "https://10.0.0.1:7445", envfile.Token: secret,
		envfile.RecoveryBundle: "recovery-ca-bundle.crt", envfile.NodeName: "rack1",
	} {
		if env.Get(name) != want {
			t.Errorf("%s is %q, want %q", name, env.Get(name), want)
		}
	}
	if len(env.Unknown()) > 0 {
		t.Errorf("the agent does not read %v", env.Unknown())
	}
	for file, want := range map[string]string{"ca-bundle.crt": pem, "recovery-ca-bundle.crt": pem + pem} {
		if got, err := os.ReadFile(filepath.Join(out, file)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", file, got, err)
		}
	}
	if info, err := os.Stat(filepath.Join(out, "node-agent.env")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if got := call(t, "nodes", "enroll", "--name", "rack1", "-o", "json", "--jq", ".token").wants(t, 0); got.out != secret+
		"\n" {
		t.Errorf("as data: %q", got.out)
	}
}

// TestReadsAfterCommands: a read after a command is not older than the command; a view that is behind is no failure of
// the command.
func TestReadsAfterCommands(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(f, "ChangeNodeIdentity", &readmodelv1.ChangeNodeIdentityResponse{
		Node: &recoveryv1.NodeIdentity{
			NodeId: nodeID, Name: "node-1",
			State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD,
		}, Pos: "5",
	})
	always(f, "SetCordon", &readmodelv1.SetCordonResponse{Gate: &lifecyclev1.NodeGate{
		NodeId: nodeID, Name: "node-1",
		Cordoned: true,
	}, Pos: "5"})
	always(f, "ChangeTask", &readmodelv1.ChangeTaskResponse{Task: &lifecyclev1.Task{
		TaskId: taskID,
		State:  commonv1.TaskState_TASK_STATE_CANCELLED,
	}, Pos: "5"})
	lines := [][]string{
		{"nodes", "hold", "node-1", "--reason", "r"},
		{"nodes", "quarantine", "node-1", "--reason", "r"},
		{"nodes", "fence", "node-1", "--reason", "r"},
		{"nodes", "reactivate", "node-1", "--reason", "r"},
		{"nodes", "retire", "node-1", "--reason", "r"},
		{"nodes", "cordon", "node-1", "--reason", "r"},
		{"nodes", "uncordon", "node-1", "--reason", "r"},
		{"tasks", "cancel", taskID, "--reason", "r"},
		{"tasks", "requeue", taskID, "--reason", "r"},
		{"tasks", "close", taskID, "--reason", "r"},
	}
	for _, line := range lines {
		if line[1] == "fence" || line[1] == "retire" {
			line = append(line, "--yes")
		}
		call(t, line...).wants(t, 0)
	}
	reads := 0
	for _, req := range sent[*readmodelv1.GetNodeRequest](f) {
		reads++
		if req.GetMinPos() != "5" {
			t.Errorf("read %v", req)
		}
	}
	for _, req := range sent[*readmodelv1.GetTaskRequest](f) {
		reads++
		if req.GetMinPos() != "5" {
			t.Errorf("read %v", req)
		}
	}
	if reads != len(lines) {
		t.Errorf("%d reads after %d commands", reads, len(lines))
	}
	verbs := []string{}
	for _, req := range sent[*readmodelv1.ChangeNodeIdentityRequest](f) {
		verbs = append(verbs, req.GetVerb().String())
	}
	if want := "IDENTITY_VERB_HOLD IDENTITY_VERB_QUARANTINE IDENTITY_VERB_FENCE IDENTITY_VERB_REACTIVATE " +
		"IDENTITY_VERB_RETIRE"; strings.Join(verbs, " ") != want {
		t.Errorf("verbs %v", verbs)
	}
	refuse(f, "GetNode", fault.New(commonv1.Reason_REASON_POSITION_NOT_REACHED, ""))
	got := call(t, "nodes", "hold", "node-1", "--reason", "r", "-o", "json", "--jq", ".identity.state").wants(t, 0)
	if got.out != "held\n" || !strings.Contains(got.err, "position_not_reached") {
		t.Errorf("stdout %q, stderr %q", got.out, got.err)
	}
}

func TestOperate(t *testing.T) {
	f := mesh(t)
	stock(f)
	for verb, kind := range map[string]commonv1.OperationKind{
		"cancel": commonv1.OperationKind_OPERATION_KIND_CANCEL, "reset": commonv1.OperationKind_OPERATION_KIND_RESET,
		"retry": commonv1.OperationKind_OPERATION_KIND_RETRY, "retry-undo": commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO,
		"skip-undo":    commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO,
		"recreate":     commonv1.OperationKind_OPERATION_KIND_RECREATE,
		"decommission": commonv1.OperationKind_OPERATION_KIND_DECOMMISSION,
	} {
		line := []string{"workspaces", verb, "acme/demo2", "--reason", "r", "--override", "--idempotency-key", "k"}
		if verb == "skip-undo" || verb == "recreate" || verb == "decommission" {
			line = append(line, "--yes")
		}
		call(t, line...).wants(t, 0)
		call(t, "workspaces", verb, "acme/demo2", "--dry-run").wants(t, 0)
		reqs := sent[*readmodelv1.OperateWorkspaceRequest](f)
		want := &readmodelv1.OperateWorkspaceRequest{
			Workspace: "acme/demo2", Kind: kind, Reason: "r", Override: true,
			IdempotencyKey: "k",
		}
		if diff := cmp.Diff(want, reqs[len(reqs)-2], protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", verb, diff)
		}
		if last := reqs[len(reqs)-1]; !last.GetDryRun() {
			t.Errorf("%s: %v", verb, last)
		}
	}
	call(t, "workspaces", "recreate", "acme/demo2", "--reason", "a fresh start", "--yes").wants(t, 0)
	call(t, "workspaces", "recreate", "acme/demo2", "--fenced-proof", "powered_off", "--reason", "the rack is dark",
		"--yes").wants(t, 0)
	reqs := sent[*readmodelv1.OperateWorkspaceRequest](f)
	if last := reqs[len(reqs)-1]; last.GetFencedProof() != commonv1.FencedProof_FENCED_PROOF_POWERED_OFF ||
		reqs[len(reqs)-2].GetFencedProof() != 0 {
		t.Errorf("the proof is told as %v", last)
	}
}
