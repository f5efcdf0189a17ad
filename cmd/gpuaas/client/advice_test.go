package client_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// A mistake gets similar names as suggestions, and missing values are listed by the names of the flags; no request is
// sent.
func TestMistakesAreAnsweredWithWhatWasMeant(t *testing.T) {
	f := mesh(t)
	stock(f)
	for line, want := range map[string]string{
		"workspaces lst":           `unknown command "lst" of "gpuaas workspaces": did you mean list`,
		"workspaces nothinglikeit": `unknown command "nothinglikeit" of "gpuaas workspaces"`,
		"workspaces create x":      "--tenant T, or $GPUAAS_TENANT",
		"allocations force-release A": "needs --expected-fence F, --fenced-proof P, --reason TEXT: `gpuaas " +
			"allocations get A`",
		"allocations force-release A --reason x --expected-fence 3": "needs --fenced-proof P:",
		"instances end I": "instances end needs --reason TEXT",
	} {
		if got := call(t, strings.Fields(line)...).wants(t, 2); !strings.Contains(got.err, want) {
			t.Errorf("%s: %s", line, got.err)
		}
	}
	if sent := sent[*readmodelv1.ForceReleaseRequest](f); len(sent) != 0 {
		t.Errorf("sent %v", sent)
	}
}

// An instance is ended only after an explicit confirmation; a dry run prints what it would do.
func TestAnInstanceIsEndedOnAClearWord(t *testing.T) {
	f := mesh(t)
	stock(f)
	lost := &lifecyclev1.Instance{
		InstanceId: instanceID, WorkspaceId: workspaceID, Unaccounted: true, ProviderId: "process:1",
		State: commonv1.InstanceState_INSTANCE_STATE_ENDED,
	}
	always(f, "EndInstance", &readmodelv1.EndInstanceResponse{Response: &lifecyclev1.EndInstanceResponse{
		Instance:    lost,
		Consequence: "ends the instance", Pos: "p",
	}})
	if got := call(t, "instances", "end", "process:1", "--reason", "late").wants(t, 2); !strings.Contains(got.err,
		"add --yes to go ahead, or --dry-run to see") {
		t.Errorf("printed %s", got.err)
	}
	if got := call(t, "instances", "end", "process:1", "--reason", "late", "--dry-run").wants(t,
		0); !strings.Contains(got.err, "dry run, nothing was changed: it ends the instance") {
		t.Errorf("printed %s", got.err)
	}
	got := call(t, "instances", "end", "process:1", "--reason", "late", "--yes").wants(t, 0)
	if !strings.Contains(got.out, "unknown ("+workspaceID+")") || !strings.Contains(got.out, "ended") {
		t.Errorf("printed %s", got.out)
	}
	requests := sent[*readmodelv1.EndInstanceRequest](f)
	if len(requests) != 2 || !requests[0].GetRequest().GetDryRun() || requests[1].GetRequest().GetDryRun() ||
		requests[1].GetRequest().GetInstance() != "process:1" {
		t.Errorf("sent %v", requests)
	}
}

// A message with several problems is printed with one line for each.
func TestAListOfProblemsKeepsItsLines(t *testing.T) {
	var out bytes.Buffer
	exit.Report(&out, exit.Usage(errors.New("2 problems:\nfirst \x1b[31m\nsecond")), false)
	if got := out.String(); got != "error: invalid_argument: 2 problems:\n  first  [31m\n  second\n" {
		t.Errorf("%q", got)
	}
}

// The advice for an operation that has begun differs from the text about what one would do.
func TestAdviceIsNoForecast(t *testing.T) {
	f := mesh(t)
	stock(f)
	op := operation()
	op.Advice = "it failed twice"
	always(f, "OperateWorkspace", &readmodelv1.OperateWorkspaceResponse{Operation: op})
	if got := call(t, "workspaces", "retry", "acme/demo2").wants(t, 0); !strings.Contains(got.out,
		"ADVICE\tit failed twice") || strings.Contains(got.out, "WOULD DO") {
		t.Errorf("printed %s", got.out)
	}
	op = operation()
	op.DryRun, op.Consequence = true, "begins anew"
	always(f, "OperateWorkspace", &readmodelv1.OperateWorkspaceResponse{Operation: op})
	if got := call(t, "workspaces", "retry", "acme/demo2", "--dry-run").wants(t, 0); !strings.Contains(got.out,
		"WOULD DO\tbegins anew") || strings.Contains(got.out, "ADVICE") {
		t.Errorf("printed %s", got.out)
	}
}

// A port without a path is ready when it takes a connection: that the process runs does not mean that its port accepts
// connections.
func TestAPortIsProbed(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(f, "CreateWorkspace", &readmodelv1.CreateWorkspaceResponse{Operation: &lifecyclev1.Operation{}})
	for line, tcp := range map[string]bool{
		"--command /bin/x --port 80": true, "--command /bin/x --port 80 --ready-path /": false, "--command /bin/x": false,
	} {
		call(t, append(strings.Fields("workspaces create w --tenant acme"), strings.Fields(line)...)...).wants(t, 0)
		requests := sent[*readmodelv1.CreateWorkspaceRequest](f)
		if got := requests[len(requests)-1].GetSpec().GetWorkloads()[0].GetReadiness().GetTcp(); got != tcp {
			t.Errorf("%s: probed by a connection: %v", line, got)
		}
	}
}
