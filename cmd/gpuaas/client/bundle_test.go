package client_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
)

// TestBundle: the archive is in a file of mode 0600 and its digest is printed; a refusal leaves no file, and a file
// that is there is never overwritten.
func TestBundle(t *testing.T) {
	f := mesh(t)
	a := rpctest.NewAuthorities(t)
	node := ids.New()
	const secret = "gnb_0192_secret"
	env, err := bundle.RenderEnv(bundle.Variable{Name: bundle.EnvToken, Value: secret})
	if err != nil {
		t.Fatal(err)
	}
	archive, err := bundle.Write(bundle.Manifest{NodeID: node, NodeName: "rack1", TrustDomain: rpctest.TrustDomain},
		bundle.Files{Env: env, CA: a.ServiceRoots.PEM(), RecoveryCA: a.ServiceRoots.PEM()},
		a.Service(t, "recovery").Certificate())
	if err != nil {
		t.Fatal(err)
	}
	answer := &readmodelv1.IssueBundleResponse{
		Archive: archive, Digest: bundle.DigestOf(archive), TokenId: ids.New(), ExpiresAt: at(9), NodeId: node,
		NodeName: "rack1", Profile: "default", Pos: "1",
	}
	always(f, "IssueBundle", answer)
	dir := t.TempDir()
	for _, form := range []string{"table", "json"} {
		out := filepath.Join(dir, form+bundle.Extension)
		got := call(t, "nodes", "bundle", node, "--reason", "its disk was lost", "--out", out, "-o", form).wants(t, 0)
		if strings.Contains(got.out+got.err, secret) || strings.Contains(got.out, "H4sI") {
			t.Errorf("the token or the archive was shown: %s %s", got.out, got.err)
		}
		if !strings.Contains(got.err, "enroll --bundle "+filepath.Base(out)+" --digest "+answer.GetDigest()) {
			t.Errorf("stderr: %s", got.err)
		}
		written, err := os.ReadFile(out)
		if err != nil || !bytes.Equal(written, archive) {
			t.Errorf("the file has %d bytes, want %d: %v", len(written), len(archive), err)
		}
		if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the file: %v, %v", info, err)
		}
		again := call(t, "nodes", "bundle", node, "--reason", "r", "--out", out).wants(t, 2)
		if !strings.Contains(again.err, "never overwritten") {
			t.Errorf("stderr: %s", again.err)
		}
	}
	if n := len(sent[*readmodelv1.IssueBundleRequest](f)); n != 2 {
		t.Errorf("%d bundles were asked for, two of them written", n)
	}
	place := t.TempDir()
	call(t, "nodes", "bundle", node, "--reason", "r", "--out", place).wants(t, 0)
	written, err := os.ReadFile(filepath.Join(place, node+bundle.Extension))
	if err != nil || !bytes.Equal(written, archive) {
		t.Errorf("in a directory: %d bytes, want %d: %v", len(written), len(archive), err)
	}
	out := filepath.Join(dir, "none")
	refuse(f, "IssueBundle", fault.New(commonv1.Reason_REASON_IDENTITY_RETIRED, ""))
	if got := call(t, "nodes", "bundle", node, "--reason", "r", "--out", out); got.code == 0 {
		t.Errorf("a refusal ended with %d", got.code)
	}
	always(f, "IssueBundle", &readmodelv1.IssueBundleResponse{Archive: archive[:100], Digest: answer.GetDigest()})
	if got := call(t, "nodes", "bundle", node, "--reason", "r", "--out", out); got.code == 0 {
		t.Error("an archive that is cut was taken")
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("a file is left: %v", err)
	}
}
