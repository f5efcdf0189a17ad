package joinstate_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/joinstate"
)

func state() joinstate.State {
	return joinstate.State{NodeID: "node", NodeInstanceID: "instance", Generation: 1 << 41, Serial: "ab12", Era: 2}
}

func load(tb testing.TB, dir string) *joinstate.Keys {
	tb.Helper()
	keys, err := joinstate.LoadOrCreateKeys(dir)
	if err != nil {
		tb.Fatal(err)
	}
	return keys
}

func TestStatesComeBackAndForgedOnesDoNot(t *testing.T) {
	keys := load(t, t.TempDir())
	signed, err := keys.Sign(state())
	if err != nil {
		t.Fatal(err)
	}
	got, err := keys.Verify(signed)
	if err != nil || got != state() {
		t.Fatalf("%+v, %v", got, err)
	}
	peeked, err := joinstate.Peek(signed)
	if err != nil || peeked != state() {
		t.Errorf("peeked %+v, %v", peeked, err)
	}
	const keyIDFrom, keyIDTo = 3, 19 // in the encoding
	for i := range signed {
		want := commonv1.Reason_REASON_JOIN_STATE_LOST
		if i >= keyIDFrom && i < keyIDTo {
			want = commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN
		}
		forged := bytes.Clone(signed)
		forged[i] ^= 1
		if _, err := keys.Verify(forged); !fault.Has(err, want) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
	for name, bad := range map[string][]byte{
		"nothing": nil, "truncated": signed[:len(signed)-1], "appended": append(bytes.Clone(signed), 0), "short": signed[:10],
		"huge": make([]byte, 1<<20),
	} {
		if _, err := keys.Verify(bad); !fault.Has(err, commonv1.Reason_REASON_JOIN_STATE_LOST) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := load(t, t.TempDir()).Verify(signed); !fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN) {
		t.Errorf("by another mesh: %v", err)
	}
}

func private(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestARingSignsWithOneKeyAndVerifiesThoseBefore(t *testing.T) {
	first, second := private(t), private(t)
	old, err := joinstate.NewKeys(first)
	if err != nil {
		t.Fatal(err)
	}
	both, err := joinstate.NewKeys(first, second)
	if err != nil {
		t.Fatal(err)
	}
	var ring joinstate.Ring
	ring.Replace(old)
	firstID := ring.SigningID()
	signed, err := ring.SignWith(firstID, state())
	if err != nil {
		t.Fatal(err)
	}
	ring.Replace(both)
	if got, err := ring.Verify(signed); err != nil || got != state() {
		t.Errorf("a state of the key before: %+v, %v", got, err)
	}
	// A repeated request for the same session gets the same bytes, although another key signs by now.
	if again, err := ring.SignWith(firstID, state()); err != nil || !bytes.Equal(again, signed) {
		t.Errorf("asked again: other bytes, %v", err)
	}
	fresh, err := ring.SignWith(ring.SigningID(), state())
	if err != nil {
		t.Fatal(err)
	}
	if id, err := joinstate.KeyID(fresh); err != nil || id == firstID {
		t.Errorf("the newest key did not sign: %s, %v", id, err)
	}
	// In the end the first key is retired: its states then have an unknown key.
	after, err := joinstate.NewKeys(second)
	if err != nil {
		t.Fatal(err)
	}
	ring.Replace(after)
	if _, err := ring.Verify(signed); !fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN) {
		t.Errorf("by a retired key: %v", err)
	}
}

func TestIncompleteStatesAreNotSigned(t *testing.T) {
	keys := load(t, t.TempDir())
	for name, edit := range map[string]func(*joinstate.State){
		"no node":       func(s *joinstate.State) { s.NodeID = "" },
		"no instance":   func(s *joinstate.State) { s.NodeInstanceID = "" },
		"no serial":     func(s *joinstate.State) { s.Serial = "" },
		"no generation": func(s *joinstate.State) { s.Generation = 0 },
		"negative era":  func(s *joinstate.State) { s.Era = -1 },
	} {
		s := state()
		edit(&s)
		if _, err := keys.Sign(s); err == nil {
			t.Errorf("%s: it was signed", name)
		}
	}
}

func FuzzPeek(f *testing.F) {
	signed, err := load(f, f.TempDir()).Sign(state())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(signed)
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, in []byte) {
		if s, err := joinstate.Peek(in); err == nil && (s.Generation < 1 || s.Era < 0 || s.NodeID == "") {
			t.Errorf("peeked %+v", s)
		}
	})
}
