package client_test

import (
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestADryRunOfAnAuthorityRotationIsData: a script that asks for JSON gets an object from each command that succeeds.
func TestADryRunOfAnAuthorityRotationIsData(t *testing.T) {
	f := mesh(t)
	always(f, "RotateAuthority", &readmodelv1.RotateAuthorityResponse{})
	got := call(t, "ca", "rotate", "--dry-run", "-o", "json").wants(t, 0)
	var object map[string]any
	decode(t, got.out, &object)
	if id, ok := object["rotation_id"]; !ok || id != "" {
		t.Errorf("%v", object)
	}
	got = call(t, "ca", "rotate", "--dry-run").wants(t, 0)
	if got.out != "" || !strings.Contains(got.err, "nothing was changed") {
		t.Errorf("%q %q", got.out, got.err)
	}
}

// TestADryRunNeedsNoReason: a command that requires a reason says that a dry run does not, and the mesh takes its
// request without one.
func TestADryRunNeedsNoReason(t *testing.T) {
	f := mesh(t)
	always(f, "RotateKey", &readmodelv1.RotateKeyResponse{})
	always(f, "ForgetConsumer", &readmodelv1.ForgetConsumerResponse{})
	for _, line := range []string{"keys rotate assertion", "events forget lifecycle/sessions"} {
		got := call(t, strings.Fields(line)...).wants(t, 2)
		if !strings.Contains(got.err, "(or --dry-run, to see what it would do)") {
			t.Errorf("%s: %s", line, got.err)
		}
		call(t, strings.Fields(line+" --dry-run")...).wants(t, 0)
	}
	if req := sent[*readmodelv1.ForgetConsumerRequest](f); len(req) != 1 || !req[0].GetDryRun() {
		t.Errorf("%v", req)
	}
}
