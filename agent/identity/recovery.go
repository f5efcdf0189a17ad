package identity

import (
	"cmp"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/pki"
)

// ErrRecoveryKeyLost means that a recovery token is held and the key that proves it is not: the token is of no use, and
// an operator must issue a bundle.
var ErrRecoveryKeyLost = errors.New("the recovery key is lost, without which the recovery token proves nothing")

// ErrNoRecoveryToken means that no recovery token is held that may be sent.
var ErrNoRecoveryToken = errors.New("no recovery token is held")

// recoveryTokens is the content of recovery-tokens.json. The newest token itself is in node-agent.env, unless an
// operator's is there.
type recoveryTokens struct {
	// Serial is that of the certificate that the newest token came with; empty: a session was admitted on it, or it is the
	// token of an enrolment.
	Serial string `json:"serial,omitempty"`
	// Waiting is the newest token where node-agent.env has an operator's token that was not used yet, or cannot be read.
	Waiting string `json:"waiting_token,omitempty"`
	// Former is the token before the newest, until a session is admitted on the certificate that the newest came with.
	Former string `json:"former_token,omitempty"`
	// Sent are hashes of the tokens that were sent with the key of key-recovering.pem: each may be sent with no other.
	Sent []string `json:"sent_sha256,omitempty"`
	// Refused are hashes of tokens that were used or refused for good, newest last.
	Refused []string `json:"refused_sha256,omitempty"`
}

// mostRefused bounds the hashes that are kept. Two tokens are held at a time.
const mostRefused = 8

func (t recoveryTokens) change() change {
	if t.Serial == "" && t.Waiting == "" && t.Former == "" && len(t.Sent)+len(t.Refused) == 0 {
		return change{File: fileTokens, Remove: true}
	}
	data, _ := json.MarshalIndent(t, "", "  ") // texts are always encoded
	return change{File: fileTokens, Content: data}
}

// refuse returns t with a token among those that are never sent again.
func (t recoveryTokens) refuse(token string) recoveryTokens {
	return t.refuseHash(hashToken(token))
}

func (t recoveryTokens) refuseHash(hash string) recoveryTokens {
	if slices.Contains(t.Refused, hash) {
		return t
	}
	refused := append(slices.Clone(t.Refused), hash)
	t.Refused = refused[max(len(refused)-mostRefused, 0):]
	return t
}

// newest returns the recovery token that came last; empty: there is none. One that waits is newer than those in
// node-agent.env, since it waits no more once it is written there.
func (t recoveryTokens) newest(env envfile.Env) string { return cmp.Or(t.Waiting, env.RecoveryToken()) }

// operatorTokenLocked returns the operator's token in env that was not used yet.
func (s *Store) operatorTokenLocked(env envfile.Env) string {
	token := env.Get(envfile.Token)
	if token == "" || envfile.IsRecoveryToken(token) || s.spentLocked(token) {
		return ""
	}
	return token
}

// putLocked returns env and tokens with token as the newest one. An operator's token that was not used stays where it
// is, and so does a file that cannot be read.
func (s *Store) putLocked(env envfile.Env, tokens recoveryTokens, token string) (envfile.Env, recoveryTokens) {
	if env.Unread || s.operatorTokenLocked(env) != "" {
		env.Replaced, tokens.Waiting = "", token
		return env, tokens
	}
	tokens.Waiting = ""
	return env.With(envfile.Token, token), tokens
}

// offeredLocked returns env and tokens after a token came with the certificate of a serial. The token before it stays
// until a session is admitted on that certificate.
func (s *Store) offeredLocked(env envfile.Env, token, serial string) (envfile.Env, recoveryTokens) {
	tokens := s.tokens
	if held := tokens.newest(env); held != "" && held != token && (tokens.Serial == "" || tokens.Former == "") {
		tokens.Former = held // one that was never confirmed does not take the place of one that counts
	}
	tokens.Serial = serial
	return s.putLocked(env, tokens, token)
}

// freshEnvLocked returns node-agent.env as it is on disk now: an operator may have put a token there since it was read.
// If there is no file, or it lacks the endpoints, it returns the content that was read or written last, with the
// operator's token in the file. If the file cannot be read, it returns that content as unread, with a problem.
func (s *Store) freshEnvLocked() envfile.Env {
	held := s.env
	held.Unread = false
	data, err := pki.ReadFile(s.path(fileEnv))
	if errors.Is(err, fs.ErrNotExist) {
		return held
	}
	var env envfile.Env
	if err == nil {
		env, err = envfile.Parse(data)
	}
	if err != nil {
		problem := fmt.Sprintf("node-agent.env cannot be read and is left as it is: %v", err)
		if !slices.Contains(s.problems, problem) {
			s.problems = append(s.problems, problem)
		}
		held.Unread = true
		return held
	}
	if env.Validate() == nil || held.Validate() != nil {
		return env
	}
	if token := s.operatorTokenLocked(env); token != "" {
		recovery := held.RecoveryToken()
		held = held.With(envfile.Token, token)
		held.Replaced = recovery
	}
	return held
}

// changesOf returns the change that writes env to its file, and none if the file must not be replaced.
func changesOf(e envfile.Env) []change {
	if e.Unread {
		return nil
	}
	return []change{{File: fileEnv, Content: e.Render()}}
}

// RecoveryKey returns the key to which this node's recovery tokens are bound. It makes one where there is none, and
// writes it to disk first.
func (s *Store) RecoveryKey() (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return nil, err
	}
	if s.recovery != nil {
		return s.recovery, nil
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	encoded, err := pki.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	if err := s.write("recovery_key", fileRecoveryKey, encoded); err != nil {
		return nil, fmt.Errorf("store recovery key: %w", err)
	}
	s.recovery = key
	return key, nil
}

// RecoveryTokens returns the recovery tokens that may be sent, the newest first. If there are none it returns
// ErrNoRecoveryToken or ErrRecoveryKeyLost.
func (s *Store) RecoveryTokens() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.recoveryTokensLocked()
}

func (s *Store) recoveryTokensLocked() ([]string, error) {
	var out []string
	for _, token := range []string{s.tokens.newest(s.env), s.tokens.Former} {
		if token == "" || slices.Contains(out, token) || s.spentLocked(token) ||
			slices.Contains(s.tokens.Refused, hashToken(token)) {
			continue
		}
		out = append(out, token)
	}
	switch {
	case len(out) == 0:
		return nil, ErrNoRecoveryToken
	case s.recovery == nil:
		return nil, ErrRecoveryKeyLost
	}
	return out, nil
}

// RecoveringKey returns the recovery key and the key for the certificate request that goes with a recovery token. The
// latter, and that it goes with this token, is on disk before RecoveringKey returns; it stays the same until the
// certificate is stored or the key is dropped, and no renewal uses it. The token is one of RecoveryTokens.
func (s *Store) RecoveringKey(token string) (crypto.Signer, crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return nil, nil, err
	}
	held, err := s.recoveryTokensLocked()
	if err != nil {
		return nil, nil, err
	}
	if !slices.Contains(held, token) { // settling has finished the change that used it
		return nil, nil, ErrNoRecoveryToken
	}
	hash := hashToken(token)
	if s.recovering != nil && slices.Contains(s.tokens.Sent, hash) {
		return s.recovery, s.recovering, nil
	}
	tokens, key := s.tokens, s.recovering
	if key == nil {
		var err error
		if key, err = pki.NewKey(); err != nil {
			return nil, nil, err
		}
		tokens.Sent = nil
	}
	encoded, err := pki.EncodeKey(key)
	if err != nil {
		return nil, nil, err
	}
	tokens.Sent = append(slices.Clone(tokens.Sent), hash)
	if err := s.commit("recovering_key", []change{
		{File: fileRecoveringKey, Content: encoded}, tokens.change(),
	}); err != nil {
		return nil, nil, fmt.Errorf("store key of a recovery: %w", err)
	}
	s.recovering, s.tokens = key, tokens
	return s.recovery, key, nil
}

// DropRecoveringKey gives up the key of a recovery with token that was refused for its key. The other tokens that were
// sent with the key may have been used with it, and are never sent again.
func (s *Store) DropRecoveringKey(token string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	tokens := s.tokens
	for _, hash := range tokens.Sent {
		if hash != hashToken(token) {
			tokens = tokens.refuseHash(hash)
		}
	}
	tokens.Sent = nil
	if err := s.commit("drop_recovering_key", []change{
		{File: fileRecoveringKey, Remove: true}, tokens.change(),
	}); err != nil {
		return err
	}
	s.recovering, s.tokens = nil, tokens
	return nil
}

// RefuseToken makes a recovery token one that is never sent again: it was used by another, or was given up.
func (s *Store) RefuseToken(token string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	tokens := s.tokens.refuse(token)
	if err := s.writeTokens("refuse_token", tokens); err != nil {
		return err
	}
	s.tokens = tokens
	return nil
}

// Confirm is called when a session is admitted with a certificate: the recovery token that came with it counts from
// then on, and the one before it is removed.
func (s *Store) Confirm(leaf *x509.Certificate) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tokens.Serial == "" || leaf == nil || s.tokens.Serial != pki.SerialString(leaf.SerialNumber) {
		return nil
	}
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	env, tokens := s.freshEnvLocked(), s.tokens
	tokens.Serial, tokens.Former = "", ""
	var changes []change
	if waiting := tokens.Waiting; waiting != "" && s.operatorTokenLocked(env) == "" {
		env, tokens = s.putLocked(env, tokens, waiting)
		changes = append(changes, changesOf(env)...)
	}
	recovering := s.recovering
	if recovering != nil && !slices.Contains(tokens.Sent, hashToken(tokens.newest(env))) {
		// It was sent with tokens that have ended alone, and may have been certified with one of them.
		recovering, tokens.Sent = nil, nil
		changes = append(changes, change{File: fileRecoveringKey, Remove: true})
	}
	if err := s.commit("confirm", append(changes, tokens.change())); err != nil {
		return fmt.Errorf("store that a recovery token counts: %w", err)
	}
	s.env, s.tokens, s.recovering = env, tokens, recovering
	return nil
}

func (s *Store) writeTokens(operation string, tokens recoveryTokens) error {
	c := tokens.change()
	if c.Remove {
		return s.remove(operation, c.File)
	}
	if err := s.write(operation, c.File, c.Content); err != nil {
		return fmt.Errorf("write %s: %w", c.File, err)
	}
	return nil
}

// loadRecoveryLocked reads what belongs to automatic recovery. A broken file counts as lost.
func (s *Store) loadRecoveryLocked() {
	s.tokens = load[recoveryTokens](s, fileTokens)
	for _, key := range []struct {
		file file
		into *crypto.Signer
	}{{fileRecoveryKey, &s.recovery}, {fileRecoveringKey, &s.recovering}} {
		path := s.path(key.file)
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			*key.into = nil
			continue
		}
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			err = os.Chmod(path, fileMode)
		}
		if err == nil {
			*key.into, err = readKey(path)
		}
		if err != nil {
			*key.into = nil
			s.problemLocked(string(key.file), err)
		}
	}
	if s.recovering == nil && len(s.tokens.Sent) > 0 {
		// The key is lost. If a request with it was granted, the control plane counts all tokens of the node as used with it:
		// sent with another, they would look stolen.
		for _, token := range []string{s.tokens.newest(s.env), s.tokens.Former} {
			if token != "" {
				s.tokens = s.tokens.refuse(token)
			}
		}
		for _, hash := range s.tokens.Sent {
			s.tokens = s.tokens.refuseHash(hash)
		}
		s.tokens.Sent = nil
	}
}
