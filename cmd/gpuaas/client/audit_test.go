package client_test

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Escalate returns the bundle of the test's choice.
func (f *fake) Escalate(_ context.Context, req *readmodelv1.EscalateRequest,
	stream *connect.ServerStream[readmodelv1.EscalateResponse],
) error {
	f.mu.Lock()
	bundle := f.bundle
	f.mu.Unlock()
	if bundle == nil || req.GetWorkspace() != "acme/demo2" {
		return fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such workspace")
	}
	return bundle(stream.Send)
}

func (f *fake) bundles(fn func(send func(*readmodelv1.EscalateResponse) error) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bundle = fn
}

// zipped returns a bundle whose manifest declares for each file the content that declared returns.
func zipped(t *testing.T, declared func(string) string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	manifest := map[string]any{"workspace_id": workspaceID}
	var lines []map[string]any
	add := func(name, text string) {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range [][2]string{
		{"runs.json", `{"items":[]}`},
		{"missing.json", `{"items":[{"what":"version of nodeapi","why":"not asked"}]}`},
	} {
		add(f[0], f[1])
		sum := sha256.Sum256([]byte(declared(f[1])))
		lines = append(lines, map[string]any{"name": f[0], "size": len(f[1]), "sha256": hex.EncodeToString(sum[:])})
	}
	manifest["files"] = lines
	raw, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	add("manifest.json", string(raw))
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func inParts(raw []byte) func(send func(*readmodelv1.EscalateResponse) error) error {
	return func(send func(*readmodelv1.EscalateResponse) error) error {
		for part := range slices.Chunk(raw, 100) {
			if err := send(&readmodelv1.EscalateResponse{Chunk: part}); err != nil {
				return err
			}
		}
		return nil
	}
}

func same(s string) string { return s }

func TestEscalate(t *testing.T) {
	f := mesh(t)
	raw := zipped(t, same)
	f.bundles(inParts(raw))
	dir := t.TempDir()
	out := filepath.Join(dir, "demo2.zip")
	got := call(t, "workspaces", "escalate", "acme/demo2", "--out", out).wants(t, 0)
	if !strings.Contains(got.out, "runs.json") || !strings.Contains(got.err, "missing: version of nodeapi: not asked") {
		t.Errorf("out: %s\nerr: %s", got.out, got.err)
	}
	written, err := os.ReadFile(out)
	if err != nil || !bytes.Equal(written, raw) {
		t.Errorf("the file is not what was sent (%v)", err)
	}
	if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v (%v)", info.Mode(), err)
	}
	// An existing file is never replaced.
	call(t, "workspaces", "escalate", "acme/demo2", "--out", out).wants(t, 2)
	call(t, "workspaces", "escalate", "acme/demo2").wants(t, 2)

	second := filepath.Join(dir, "second.zip")
	var report struct {
		Out         string `json:"out"`
		WorkspaceID string `json:"workspace_id"`
		Files       []struct{ Name, SHA256 string }
		Missing     []struct{ What string }
	}
	decode(t, call(t, "-o", "json", "ws", "escalate", "acme/demo2", "--out", second).wants(t, 0).out, &report)
	if report.Out != second || report.WorkspaceID != workspaceID || len(report.Files) != 2 || len(report.Missing) != 1 {
		t.Errorf("%+v", report)
	}
}

// No file is left, and none looks like a bundle, if the stream breaks off, does not match its manifest, or is refused.
func TestEscalateLeavesNothingHalf(t *testing.T) {
	f := mesh(t)
	raw := zipped(t, same)
	dir := t.TempDir()
	out := filepath.Join(dir, "demo2.zip")
	for name, c := range map[string]struct {
		bundle func(send func(*readmodelv1.EscalateResponse) error) error
		code   int
	}{
		"cut short": {inParts(raw[:len(raw)-20]), 1},
		"broken off": {func(send func(*readmodelv1.EscalateResponse) error) error {
			if err := inParts(raw[:200])(send); err != nil {
				return err
			}
			return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "")
		}, 1},
		"not what the manifest says": {inParts(zipped(t, func(s string) string { return s + "x" })), 1},
		"unknown":                    {nil, 3},
	} {
		f.bundles(c.bundle)
		call(t, "workspaces", "escalate", "acme/demo2", "--out", out).wants(t, c.code)
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s left %v (%v)", name, left, err)
		}
	}
}

func TestAudit(t *testing.T) {
	f := mesh(t)
	row := &readmodelv1.AuditRow{
		Number: 7, Source: "lifecycle", Hash: "ab", PreviousHash: "cd",
		Entry: &commonv1.AuditEntry{
			Action: "workspace.cancel", Actor: "ana", Outcome: "refused", Reason: "not now",
			SubjectType: "workspace", SubjectId: workspaceID, Count: 3, At: at(1),
		},
	}
	answer(f, "ListAudit", func(req *readmodelv1.ListAuditRequest) (*readmodelv1.ListAuditResponse, error) {
		if req.GetAction() != "workspace." || req.GetWorkspace() != "acme/demo2" {
			t.Errorf("asked %v", req)
		}
		return &readmodelv1.ListAuditResponse{Items: []*readmodelv1.AuditRow{row}}, nil
	})
	got := call(t, "audit", "list", "--action", "workspace.", "--workspace", "acme/demo2").wants(t, 0)
	for _, text := range []string{"workspace.cancel", "refused", "ana", "not now", "3"} {
		if !strings.Contains(got.out, text) {
			t.Errorf("no %q in %s", text, got.out)
		}
	}
	always(f, "VerifyAudit", &readmodelv1.VerifyAuditResponse{
		Intact: true, Rows: 7, HeadHash: "abc", From: 3, Signed: 4,
		SignedAt: at(1), Unsigned: 1, UnsignedBecause: "row 4: its signature is wrong",
	})
	if got := call(t, "audit", "verify").wants(t, 0); !strings.Contains(got.out, "abc") ||
		!strings.Contains(got.out, "signed checkpoint at row 3") || !strings.Contains(got.out, "row 4: its") {
		t.Errorf("verify: %s", got.out)
	}
	always(f, "VerifyAudit", &readmodelv1.VerifyAuditResponse{Rows: 3, BrokenAt: 4, BrokenBecause: "its event is gone"})
	got = call(t, "-o", "json", "audit", "verify").wants(t, 5)
	var verdict struct {
		Intact   bool  `json:"intact"`
		BrokenAt int64 `json:"broken_at"`
	}
	decode(t, got.out, &verdict)
	if verdict.Intact || verdict.BrokenAt != 4 || !strings.Contains(got.err, "its event is gone") {
		t.Errorf("out: %s\nerr: %s", got.out, got.err)
	}
}
