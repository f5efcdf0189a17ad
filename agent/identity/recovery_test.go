package identity_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	firstRecovery  = "grt_first"
	secondRecovery = "grt_second"
	thirdRecovery  = "grt_third"
)

// enrolled makes the host a node with its first recovery token.
func (w *world) enrolled(s *identity.Store) {
	w.t.Helper()
	_, err := s.RecoveryKey()
	must(w.t, err)
	key, err := s.PendingKey()
	must(w.t, err)
	answer := w.answer(key)
	answer.RecoveryToken = firstRecovery
	must(w.t, s.CommitEnrolment(token, answer))
}

// renewed stores the next certificate, with its token.
func (w *world) renewed(s *identity.Store, token string) {
	w.t.Helper()
	key, err := s.RenewalKey()
	must(w.t, err)
	must(w.t, s.StoreIssued(w.chain(key), token))
}

func (w *world) tokens(s *identity.Store, want ...string) {
	w.t.Helper()
	got, err := s.RecoveryTokens()
	if !slices.Equal(got, want) || (len(want) == 0) != (err != nil) {
		w.t.Errorf("tokens %q (%v), want %q", got, err, want)
	}
}

// inFile fails the test unless node-agent.env has the token.
func (w *world) inFile(token string) {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.dirs.Etc, "node-agent.env"))
	must(w.t, err)
	if !strings.Contains(string(data), envfile.Token+"='"+token+"'\n") {
		w.t.Errorf("node-agent.env has not the token %s", token)
	}
}

// setToken writes a token into node-agent.env, as an operator does.
func (w *world) setToken(token string) {
	w.t.Helper()
	path := filepath.Join(w.dirs.Etc, "node-agent.env")
	data, err := os.ReadFile(path)
	must(w.t, err)
	env, err := envfile.Parse(data)
	must(w.t, err)
	must(w.t, os.WriteFile(path, env.With(envfile.Token, token).Render(), 0o600))
}

// TestTheFormerTokenStaysUntilTheNextCounts: an offered token takes the place of the former once a session is admitted
// on the certificate that it came with, and one that never counted is replaced by the next.
func TestTheFormerTokenStaysUntilTheNextCounts(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.enrolled(s)
	w.tokens(s, firstRecovery)
	must(t, s.Confirm(s.Certificate().Leaf))
	w.tokens(s, firstRecovery)

	w.renewed(s, secondRecovery)
	w.inFile(secondRecovery)
	w.tokens(s, secondRecovery, firstRecovery)
	must(t, s.Confirm(s.Certificate().Leaf)) // a session on the certificate from before
	w.tokens(s, secondRecovery, firstRecovery)

	w.renewed(s, thirdRecovery) // the one between was not taken into use
	w.tokens(s, thirdRecovery, firstRecovery)
	must(t, s.Flip())
	w.close(s)
	s = w.open()
	w.tokens(s, thirdRecovery, firstRecovery)
	must(t, s.Confirm(s.Certificate().Leaf))
	w.tokens(s, thirdRecovery)
	w.close(s)
	s = w.open()
	w.tokens(s, thirdRecovery)
	w.inFile(thirdRecovery)
	if token := s.Token(); token != "" {
		t.Errorf("the operator's token is %q", token)
	}
	w.close(s)
}

// TestAnOperatorsTokenIsNotOverwritten: while it is unused, the recovery token waits beside it.
func TestAnOperatorsTokenIsNotOverwritten(t *testing.T) {
	const other = "gbt_other_token_of_an_operator"
	w := newWorld(t)
	s := w.open()
	w.enrolled(s)
	path := filepath.Join(w.dirs.Etc, "node-agent.env") // behind the back of the running agent
	data, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, append(data, envfile.Token+"="+other+"\n"...), 0o600))
	must(t, s.ReloadEnv())
	w.tokens(s, firstRecovery)
	w.renewed(s, secondRecovery)
	w.inFile(other)
	if s.Token() != other {
		t.Errorf("the operator's token is %q", s.Token())
	}
	w.tokens(s, secondRecovery, firstRecovery)
	must(t, s.Flip())
	must(t, s.Confirm(s.Certificate().Leaf))
	w.inFile(other)
	w.close(s)

	s = w.open()
	w.tokens(s, secondRecovery)
	w.setToken("") // taken back
	must(t, s.ReloadEnv())
	w.renewed(s, thirdRecovery)
	w.inFile(thirdRecovery)
	w.tokens(s, thirdRecovery, secondRecovery)

	must(t, s.InstallBundle(w.read(w.bundle(other))))
	w.inFile(other)
	w.tokens(s, thirdRecovery, secondRecovery)
	key, err := s.PendingKey()
	must(t, err)
	answer := w.answer(key)
	answer.NodeInstanceId, answer.RecoveryToken = ids.New(), "grt_of_the_bundle"
	w.setToken("gbt_still_another_token")
	must(t, s.CommitEnrolment(other, answer))
	w.inFile("gbt_still_another_token")
	w.tokens(s, "grt_of_the_bundle")
	w.close(s)
}

// TestAFileThatCannotBeReadIsLeftAlone: an operator edits it, and the token that comes meanwhile waits beside it.
func TestAFileThatCannotBeReadIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.enrolled(s)
	path := filepath.Join(w.dirs.Etc, "node-agent.env")
	whole, err := os.ReadFile(path)
	must(t, err)
	edit := append(slices.Clone(whole), "GPUAAS_TERMINAL_API_URL='half\n"...)
	must(t, os.WriteFile(path, edit, 0o600))
	w.renewed(s, secondRecovery)
	must(t, s.Flip())
	w.tokens(s, secondRecovery, firstRecovery)
	must(t, s.Confirm(s.Certificate().Leaf))
	w.tokens(s, secondRecovery)
	_, key, err := s.RecoveringKey(secondRecovery)
	must(t, err)
	answer := w.answer(key)
	answer.RecoveryToken = thirdRecovery
	must(t, s.CommitEnrolment(secondRecovery, answer))
	w.tokens(s, thirdRecovery)
	if left, err := os.ReadFile(path); err != nil || !slices.Equal(left, edit) {
		t.Errorf("the file was replaced by %q (%v)", left, err)
	}
	if problems := s.Problems(); len(problems) != 1 || strings.Contains(problems[0], "half") {
		t.Errorf("problems %q", problems)
	}
	w.close(s)

	must(t, os.WriteFile(path, whole, 0o600)) // with the first token
	s = w.open()
	w.tokens(s, thirdRecovery)
	w.renewed(s, "grt_fourth")
	w.inFile("grt_fourth")
	w.tokens(s, "grt_fourth", thirdRecovery)
	w.close(s)
}

// TestAFileWithoutEndpointsGetsThemBack checks that endpoints are written again to a file that lacks them, and that the
// operator's token in it stays.
func TestAFileWithoutEndpointsGetsThemBack(t *testing.T) {
	const other = "gbt_other_token_of_an_operator"
	for name, content := range map[string]string{"empty": "", "a token": envfile.Token + "=" + other + "\n"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.open()
			w.enrolled(s)
			url := s.Env().Get(envfile.APIURL)
			must(t, os.WriteFile(filepath.Join(w.dirs.Etc, "node-agent.env"), []byte(content), 0o600))
			w.renewed(s, secondRecovery)
			w.close(s)
			s = w.open()
			if got := s.Env().Get(envfile.APIURL); got != url || url == "" {
				t.Errorf("the endpoint is %q, was %q", got, url)
			}
			if want := map[bool]string{true: other}[content != ""]; s.Token() != want {
				t.Errorf("the operator's token is %q", s.Token())
			}
			w.tokens(s, secondRecovery, firstRecovery)
			w.close(s)
		})
	}
}

// TestARecoveryKeepsWhatTheNodeRemembers: the same node instance keeps join state and generation, another begins anew.
// The key of the request stays the same until the reply, also after a restart, and no renewal has it.
func TestARecoveryKeepsWhatTheNodeRemembers(t *testing.T) {
	for name, same := range map[string]bool{"same instance": true, "new instance": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.open()
			w.enrolled(s)
			_, err := s.StoreJoinState(7, []byte("seven"))
			must(t, err)
			_, key, err := s.RecoveringKey(firstRecovery)
			must(t, err)
			pending, err := s.PendingKey()
			must(t, err)
			w.close(s)
			s = w.open()
			recovery, again, err := s.RecoveringKey(firstRecovery)
			must(t, err)
			if id, _ := pki.PublicKeyFingerprint(key.Public()); id != fingerprint(again.Public()) ||
				id == fingerprint(pending.Public()) || id == fingerprint(recovery.Public()) {
				t.Error("a request of a recovery changed its key, or has the key of another")
			}
			if !same {
				w.instance = ids.New()
			}
			answer := w.answer(again)
			answer.RecoveryToken = secondRecovery
			must(t, s.CommitEnrolment(firstRecovery, answer))
			w.tokens(s, secondRecovery)
			w.inFile(secondRecovery)
			if _, generation := s.JoinState(); (generation == 7) != same {
				t.Errorf("generation %d", generation)
			}
			must(t, s.Confirm(s.Certificate().Leaf))
			w.setToken(firstRecovery) // an old copy of the file
			must(t, s.ReloadEnv())
			w.tokens(s)
			w.close(s)
		})
	}
}

// TestARecoveryKeepsTheOperatorsTokenSpent: the bundle from which the host was enrolled is not used again.
func TestARecoveryKeepsTheOperatorsTokenSpent(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	_, key, err := s.RecoveringKey(firstRecovery)
	must(t, err)
	answer := w.answer(key)
	answer.RecoveryToken = secondRecovery
	must(t, s.CommitEnrolment(firstRecovery, answer))
	if err := s.InstallBundle(w.read(w.bundle(token))); !errors.Is(err, identity.ErrBundleSpent) {
		t.Errorf("the same bundle again: %v", err)
	}
	w.setToken(token)
	must(t, s.ReloadEnv())
	if s.Token() != "" {
		t.Error("a token that was used is offered again")
	}
}

func fingerprint(key any) string {
	out, _ := pki.PublicKeyFingerprint(key)
	return out
}

// TestALostRecoveryKeyIsNoLoop checks that a token whose key is lost is not sent, since it is of no use, and that the
// next renewal makes another key.
func TestALostRecoveryKeyIsNoLoop(t *testing.T) {
	for name, content := range map[string][]byte{"removed": nil, "broken": []byte("-----BEGIN")} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.open()
			w.enrolled(s)
			w.close(s)
			path := filepath.Join(w.dirs.State, "recovery-key.pem")
			must(t, os.Remove(path))
			if content != nil {
				must(t, os.WriteFile(path, content, 0o600))
			}
			s = w.open()
			if _, err := s.RecoveryTokens(); !errors.Is(err, identity.ErrRecoveryKeyLost) {
				t.Errorf("tokens: %v", err)
			}
			if _, _, err := s.RecoveringKey(firstRecovery); !errors.Is(err, identity.ErrRecoveryKeyLost) {
				t.Errorf("key of a request: %v", err)
			}
			_, err := s.RecoveryKey()
			must(t, err)
			w.close(s)
			s = w.open()
			if problems := s.Problems(); len(problems) > 0 {
				t.Errorf("problems %q", problems)
			}
			w.close(s)
		})
	}
}

// TestATokenIsSentWithOneKeyAlone checks that where a token was sent with a key that is lost, neither that token nor
// the other one is sent with another key, which would look like theft.
func TestATokenIsSentWithOneKeyAlone(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.enrolled(s)
	w.renewed(s, secondRecovery)
	_, _, err := s.RecoveringKey(secondRecovery)
	must(t, err)
	w.close(s)
	must(t, os.Remove(filepath.Join(w.dirs.State, "key-recovering.pem")))
	for range 2 {
		s = w.open()
		w.tokens(s)
		must(t, s.RefuseToken(firstRecovery))
		w.close(s)
	}
}

// TestAKeyThatIsRefusedTakesTheOtherTokens checks that a refused key is dropped together with the other tokens that
// were sent with it, which may have been used with it.
func TestAKeyThatIsRefusedTakesTheOtherTokens(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.enrolled(s)
	w.renewed(s, secondRecovery)
	_, key, err := s.RecoveringKey(secondRecovery)
	must(t, err)
	_, _, err = s.RecoveringKey(firstRecovery)
	must(t, err)
	must(t, s.DropRecoveringKey(firstRecovery))
	w.tokens(s, firstRecovery)
	_, next, err := s.RecoveringKey(firstRecovery)
	must(t, err)
	if fingerprint(next.Public()) == fingerprint(key.Public()) {
		t.Error("the key that was refused is used again")
	}
	w.close(s)
	s = w.open()
	w.tokens(s, firstRecovery)
	w.close(s)
}
