package envelope_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
)

func task() envelope.Task {
	return envelope.Task{
		TaskID: "0192f0c1-0000-7000-8000-000000000001", Type: "workload.deploy", NodeID: "node-a", WorkspaceID: "ws",
		Epoch: 1 << 41, OpSeq: 7, NotBefore: time.UnixMicro(1_700_000_000_000_001).UTC(),
		ExpiresAt: time.UnixMicro(1_700_000_060_000_000).UTC(), Attempt: 2, Payload: []byte("payload"),
	}
}

func key(tb testing.TB) envelope.Key {
	tb.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return envelope.NewKey(private)
}

func set(tb testing.TB, keys ...envelope.Key) *envelope.VerifierSet {
	tb.Helper()
	public := make([]ed25519.PublicKey, 0, len(keys))
	for _, k := range keys {
		public = append(public, k.Public())
	}
	out, err := envelope.NewVerifierSet(public...)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

func sign(tb testing.TB, k envelope.Key, task envelope.Task) envelope.Signed {
	tb.Helper()
	signed, err := envelope.Sign(k, task)
	if err != nil {
		tb.Fatal(err)
	}
	return signed
}

func TestSignedTaskComesBackWhole(t *testing.T) {
	k := key(t)
	noPayload := task()
	noPayload.Payload, noPayload.WorkspaceID = nil, ""
	for _, want := range []envelope.Task{task(), noPayload} {
		signed := sign(t, k, want)
		got, err := envelope.Verify(set(t, k), signed.Bytes, signed.Signature, signed.KeyID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if again := sign(t, k, want); !bytes.Equal(again.Bytes, signed.Bytes) {
			t.Error("the encoding is not canonical")
		}
	}
}

// Scenario: C01.
func TestForgedTasksAreRefused(t *testing.T) {
	good, other := key(t), key(t)
	verifiers := set(t, good)
	signed := sign(t, good, task())
	foreign := sign(t, other, task())
	private := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))
	seven := envelope.NewKey(private)
	flip := func(b []byte, i int) []byte {
		out := bytes.Clone(b)
		out[i] ^= 1
		return out
	}
	tests := []struct {
		name      string
		set       *envelope.VerifierSet
		bytes     []byte
		signature []byte
		keyID     string
	}{
		{"payload changed", verifiers, flip(signed.Bytes, len(signed.Bytes)-1), signed.Signature, signed.KeyID},
		{"epoch changed", verifiers, flip(signed.Bytes, 90), signed.Signature, signed.KeyID},
		{"signature changed", verifiers, signed.Bytes, flip(signed.Signature, 3), signed.KeyID},
		{"signature stripped", verifiers, signed.Bytes, nil, signed.KeyID},
		{"signature truncated", verifiers, signed.Bytes, signed.Signature[:32], signed.KeyID},
		{"bytes truncated", verifiers, signed.Bytes[:20], signed.Signature, signed.KeyID},
		{"bytes appended", verifiers, append(bytes.Clone(signed.Bytes), 0), signed.Signature, signed.KeyID},
		{"nothing", verifiers, nil, nil, ""},
		{"key retired", verifiers, foreign.Bytes, foreign.Signature, foreign.KeyID},
		{"another key under a known name", verifiers, foreign.Bytes, foreign.Signature, signed.KeyID},
		{"no verifiers", nil, signed.Bytes, signed.Signature, signed.KeyID},
		{"signed without the domain", set(t, seven), signed.Bytes, ed25519.Sign(private, signed.Bytes), seven.ID()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := envelope.Verify(tt.set, tt.bytes, tt.signature, tt.keyID)
			if !fault.Has(err, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID) || got.TaskID != "" {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// Scenario: C05. Even a good signature over another version is refused.
func TestOtherVersionsAreRefused(t *testing.T) {
	private := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))
	k := envelope.NewKey(private)
	signed := sign(t, k, task())
	for _, version := range []byte{0, 2, 255} {
		altered := bytes.Clone(signed.Bytes)
		altered[0] = version
		signature := ed25519.Sign(private, append([]byte("gpuaas.mesh/task-envelope\x00"), altered...))
		if _, err := envelope.Verify(set(t, k), altered, signature, k.ID()); !fault.Has(err,
			commonv1.Reason_REASON_TASK_SIGNATURE_INVALID) {
			t.Errorf("version %d: %v", version, err)
		}
	}
}

func TestOldAndNewKeysOverlap(t *testing.T) {
	old, next := key(t), key(t)
	overlap, err := envelope.ParseVerifierSet(set(t, old, next).String())
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []envelope.Key{old, next} {
		signed := sign(t, k, task())
		if _, err := envelope.Verify(overlap, signed.Bytes, signed.Signature, signed.KeyID); err != nil {
			t.Error(err)
		}
	}
}

// Scenario: C02.
func TestTasksAreForOneNodeAndOneWindow(t *testing.T) {
	v := task()
	tests := []struct {
		name   string
		node   string
		now    time.Time
		reason commonv1.Reason
	}{
		{"at its beginning", "node-a", v.NotBefore, commonv1.Reason_REASON_UNSPECIFIED},
		{"at its end", "node-a", v.ExpiresAt, commonv1.Reason_REASON_UNSPECIFIED},
		{"too early", "node-a", v.NotBefore.Add(-time.Microsecond), commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW},
		{"too late", "node-a", v.ExpiresAt.Add(time.Microsecond), commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW},
		{"another node", "node-b", v.NotBefore, commonv1.Reason_REASON_TASK_WRONG_NODE},
		{"no node", "", v.NotBefore, commonv1.Reason_REASON_TASK_WRONG_NODE},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := fault.ReasonOf(v.Check(tt.node, tt.now)); got != tt.reason {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestWhatCannotBeSigned(t *testing.T) {
	tests := map[string]func(*envelope.Task){
		"no id":             func(v *envelope.Task) { v.TaskID = "" },
		"no type":           func(v *envelope.Task) { v.Type = "" },
		"no node":           func(v *envelope.Task) { v.NodeID = "" },
		"negative epoch":    func(v *envelope.Task) { v.Epoch = -1 },
		"negative op_seq":   func(v *envelope.Task) { v.OpSeq = -1 },
		"negative attempt":  func(v *envelope.Task) { v.Attempt = -1 },
		"empty window":      func(v *envelope.Task) { v.ExpiresAt = v.NotBefore },
		"a long id":         func(v *envelope.Task) { v.WorkspaceID = string(make([]byte, 300)) },
		"an id of no text":  func(v *envelope.Task) { v.WorkspaceID = "\xff" },
		"too large payload": func(v *envelope.Task) { v.Payload = make([]byte, envelope.MaxPayload+1) },
	}
	for name, edit := range tests {
		t.Run(name, func(t *testing.T) {
			v := task()
			edit(&v)
			if _, err := envelope.Sign(key(t), v); err == nil {
				t.Error("it was signed")
			}
		})
	}
}

func TestKeyFilesArePrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "task.pem")
	first, err := envelope.LoadOrCreateKey(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := envelope.LoadOrCreateKey(path)
	if err != nil {
		t.Fatal(err)
	}
	if first.ID() != again.ID() {
		t.Error("a second key was made")
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
}
