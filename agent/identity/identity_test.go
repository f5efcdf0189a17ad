package identity_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

func enrolledWorld(t *testing.T) (*world, *identity.Store) {
	t.Helper()
	w := newWorld(t)
	s := w.open()
	t.Cleanup(func() { _ = s.Close() })
	must(t, s.InstallBundle(w.read(w.bundle(token))))
	key, err := s.PendingKey()
	must(t, err)
	must(t, s.CommitEnrolment(token, w.answer(key)))
	return w, s
}

func TestSecondAgentIsRefusedWithTheHoldersPid(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	_, err := identity.Open(w.dirs)
	locked, ok := errors.AsType[*identity.LockedError](err)
	if !ok || locked.PID != os.Getpid() {
		t.Fatalf("second open: %v", err)
	}
	w.close(s)
	w.close(w.open())
}

func TestEverythingIsClosedToOthers(t *testing.T) {
	w, s := enrolledWorld(t)
	_, err := s.PendingKey()
	must(t, err)
	_, err = s.StoreJoinState(1, []byte("x"))
	must(t, err)
	for _, dir := range []string{w.dirs.Etc, w.dirs.State} {
		must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			info, err := d.Info()
			if err == nil && info.Mode().Perm() != 0o600 {
				t.Errorf("%s has mode %o", path, info.Mode().Perm())
			}
			return err
		}))
	}
}

func TestOpenTokenFileIsClosedAndReported(t *testing.T) {
	w := newWorld(t)
	must(t, os.MkdirAll(w.dirs.Etc, 0o700))
	path := filepath.Join(w.dirs.Etc, "node-agent.env")
	must(t, os.WriteFile(path, []byte("GPUAAS_API_URL=h:1\nGPUAAS_ENROLLMENT_TOKEN=canary-secret\n"), 0o644))
	s := w.open()
	defer w.close(s)
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o600 || len(s.Problems()) != 1 {
		t.Errorf("mode %o, problems %q", info.Mode().Perm(), s.Problems())
	}
	if strings.Contains(strings.Join(s.Problems(), ""), "canary") {
		t.Error("the token is in a message")
	}
}

func TestJoinStateOnlyGrows(t *testing.T) {
	_, s := enrolledWorld(t)
	for _, step := range []struct {
		generation int64
		stored     bool
	}{{5, true}, {5, false}, {4, false}, {1 << 40, true}, {6, false}} {
		stored, err := s.StoreJoinState(step.generation, []byte{byte(step.generation)})
		if err != nil || stored != step.stored {
			t.Errorf("generation %d: stored %v, %v", step.generation, stored, err)
		}
	}
	if _, generation := s.JoinState(); generation != 1<<40 {
		t.Errorf("generation %d", generation)
	}
}

func TestEnrolmentSpendsItsToken(t *testing.T) {
	w, s := enrolledWorld(t)
	if s.Token() != "" || s.Env().Get(envfile.Token) != "" {
		t.Error("the token is still offered")
	}
	if err := s.InstallBundle(w.read(w.bundle(token))); !errors.Is(err, identity.ErrBundleSpent) {
		t.Errorf("the same bundle again: %v", err)
	}
	// A launcher may write the file again with the token of the launch.
	must(t, os.WriteFile(filepath.Join(w.dirs.Etc, "node-agent.env"),
		[]byte("GPUAAS_API_URL=h:1\nGPUAAS_ENROLLMENT_TOKEN="+token+"\n"), 0o600))
	must(t, s.ReloadEnv())
	if s.Token() != "" {
		t.Error("a spent token is offered again")
	}
	must(t, s.InstallBundle(w.read(w.bundle("gbt_another_token_of_an_operator"))))
	if s.Token() == "" {
		t.Error("a fresh token is not offered")
	}
	if s.Certificate() == nil {
		t.Error("the bundle took the certificate away before another is held")
	}
}

func TestForeignCertificatesAreRefused(t *testing.T) {
	w, s := enrolledWorld(t)
	key, err := s.RenewalKey()
	must(t, err)
	other, err := pki.NewKey()
	must(t, err)
	if err := s.StoreIssued(w.chain(other), ""); !errors.Is(err, identity.ErrNotOurs) {
		t.Errorf("another key: %v", err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	must(t, err)
	chain, err := w.ca.SignCSR(csr, ids.New(), time.Now(), time.Now().Add(time.Hour))
	must(t, err)
	if err := s.StoreIssued(chain, ""); !errors.Is(err, identity.ErrNotOurs) {
		t.Errorf("another node: %v", err)
	}
	if err := s.StoreIssued([]byte("nothing"), ""); err == nil {
		t.Error("no certificate was stored")
	}
	if s.Other() != nil {
		t.Error("a slot was filled")
	}
}

func TestReenrolmentOfAnotherInstanceForgetsJoinState(t *testing.T) {
	w, s := enrolledWorld(t)
	_, err := s.StoreJoinState(9, []byte("old"))
	must(t, err)
	key, err := s.PendingKey()
	must(t, err)
	w.instance = ids.New()
	must(t, s.CommitEnrolment("gbt_other", w.answer(key)))
	if raw, generation := s.JoinState(); len(raw) != 0 || generation != 0 {
		t.Errorf("join state of the instance before: %d", generation)
	}
	w.close(s)
	s = w.open()
	defer w.close(s)
	if _, generation := s.JoinState(); generation != 0 {
		t.Errorf("join state came back: %d", generation)
	}
	if node, ok := s.Node(); !ok || node.InstanceID != w.instance {
		t.Errorf("node %+v", node)
	}
}

func TestBrokenFilesAreReportedAndCountAsLost(t *testing.T) {
	tests := []struct {
		file string
		lost func(s *identity.Store) bool
	}{
		{"etc/key.pem", func(s *identity.Store) bool { return s.Certificate() == nil }},
		{"etc/cert.pem", func(s *identity.Store) bool { return s.Certificate() == nil }},
		{"state/node.json", func(s *identity.Store) bool { _, ok := s.Node(); return !ok }},
		{"state/join-state.json", func(s *identity.Store) bool { _, g := s.JoinState(); return g == 0 }},
	}
	for _, tt := range tests {
		t.Run(tt.file, func(t *testing.T) {
			w, s := enrolledWorld(t)
			_, err := s.StoreJoinState(1, []byte("x"))
			must(t, err)
			w.close(s)
			must(t, os.WriteFile(filepath.Join(filepath.Dir(w.dirs.Etc), tt.file), []byte("\x00garbage"), 0o600))
			s = w.open()
			defer w.close(s)
			if !tt.lost(s) || len(s.Problems()) != 1 {
				t.Errorf("lost %v, problems %q", tt.lost(s), s.Problems())
			}
		})
	}
}

// A journal that cannot be applied must not keep the agent from starting for ever: it is set aside and reported once,
// and nothing of it is applied.
func TestUnreadableJournalIsSetAside(t *testing.T) {
	for name, content := range map[string]string{
		"cut off":   `{"operation":"flip","changes":[{"file":"etc/key.pem","con`,
		"empty":     "",
		"noise":     "\x00garbage",
		"too large": strings.Repeat(" ", 2<<20),
		"names another file": `{"changes":[{"file":"etc/cert.pem","remove":true},` +
			`{"file":"etc/../../passwd","content":"eA=="}]}`,
		"names its own place": `{"changes":[{"file":"state/journal.json","content":"eA=="}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			w, s := enrolledWorld(t)
			before := w.image(s)
			w.close(s)
			path := filepath.Join(w.dirs.State, "journal.json")
			must(t, os.WriteFile(path, []byte(content), 0o600))
			s = w.open()
			if problems := s.Problems(); len(problems) != 1 || !strings.Contains(problems[0], "journal.json") {
				t.Errorf("problems %q", problems)
			}
			kept, err := filepath.Glob(path + ".unreadable-*")
			must(t, err)
			if len(kept) != 1 {
				t.Fatalf("kept as %q", kept)
			}
			data, err := os.ReadFile(kept[0])
			must(t, err)
			if string(data) != content {
				t.Errorf("kept %d bytes of %d", len(data), len(content))
			}
			if diff := cmp.Diff(before, w.image(s)); diff != "" {
				t.Errorf("the identity changed:\n%s", diff)
			}
			_, err = s.StoreJoinState(3, []byte("x"))
			must(t, err)
			w.close(s)
			s = w.open()
			defer w.close(s)
			if problems := s.Problems(); len(problems) != 0 {
				t.Errorf("told again: %q", problems)
			}
		})
	}
}

// A journal that the host fails to read may be whole: it is not set aside.
func TestJournalThatTheHostDoesNotGiveStays(t *testing.T) {
	w := newWorld(t)
	w.close(w.open())
	path := filepath.Join(w.dirs.State, "journal.json")
	must(t, os.Mkdir(path, 0o700))
	if _, err := identity.Open(w.dirs); err == nil {
		t.Error("opened past a journal that was not read")
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

func TestUsable(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	pair, err := w.ca.Pair(pki.NodeID(agenttest.TrustDomain, w.nodeID), now, now.Add(time.Hour))
	must(t, err)
	for at, want := range map[time.Duration]bool{-time.Minute: false, time.Minute: true, time.Hour + time.Second: false} {
		if got := identity.Usable(pair, now.Add(at)); got != want {
			t.Errorf("usable at %v: %v", at, got)
		}
	}
	if identity.Usable(nil, now) {
		t.Error("no certificate is usable")
	}
}
