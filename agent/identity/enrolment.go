package identity

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// Token returns the token of an operator, or of a launch, to enrol with: empty if there is none, or if this identity
// was made with it: such a token must never be sent again with another key. Recovery tokens are those of
// RecoveryTokens.
func (s *Store) Token() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.operatorTokenLocked(s.env)
}

func (s *Store) spentLocked(token string) bool {
	return s.enrolled && subtle.ConstantTimeCompare([]byte(s.node.TokenHash), []byte(hashToken(token))) == 1
}

func hashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// CommitEnrolment stores the reply to an enrolment with token as the identity of this host, all of it or nothing:
// certificate and key, node and instance id, endpoints, trust, task verifiers and the next token. A trust bundle that
// it replaces is kept beside the new one with the ending `.old`. The join state stays if the reply keeps the node
// instance. The recovery tokens from before are removed: they have ended with the enrolment. If a recovery keeps the
// node instance the certificate in use goes to the other slot, since it counts until a session opens with the new
// one.
func (s *Store) CommitEnrolment(token string, answer *recoveryv1.EnrollResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	chain := answer.GetCertificateChainPem()
	if s.enrolled && isOfChain(s.current, chain) {
		return nil
	}
	pair, keyPEM, err := s.pairLocked(chain, s.pending, s.recovering)
	if err != nil {
		return err
	}
	id, err := nodeOf(pair.Leaf)
	if err != nil {
		return fmt.Errorf("enrolment's answer: %w", err)
	}
	if id.Name != answer.GetNodeId() || answer.GetNodeInstanceId() == "" {
		return fmt.Errorf("enrolment's answer: %w", ErrNotOurs)
	}
	node := Node{
		NodeID: id.Name, InstanceID: answer.GetNodeInstanceId(), Name: answer.GetNodeName(), TrustDomain: id.TrustDomain,
		WorkspaceID: answer.GetWorkspaceId(), Epoch: answer.GetEpoch(), ProfileName: answer.GetProfile().GetName(),
		ProfileVersion: answer.GetProfile().GetVersion(), ProfileFingerprint: answer.GetProfile().GetFingerprint(),
		AutoRecovery: answer.GetPolicy().GetAutoRecovery(), TokenHash: hashToken(token),
	}
	node = node.withAPI(answer.GetProfile())
	if envfile.IsRecoveryToken(token) {
		node.TokenHash = s.node.TokenHash // what the operator's bundle was used for stays known
	}
	former := s.former
	if node.ProfileFingerprint == "" { // the profile was not taken
		node.ProfileName, node.ProfileVersion, node.ProfileFingerprint = s.node.ProfileName, s.node.ProfileVersion,
			s.node.ProfileFingerprint
	} else {
		former = nil
	}
	env, tokens, err := s.envAfter(token, answer)
	if err != nil {
		return err
	}
	changes := []change{
		{File: fileKey, Content: keyPEM},
		{File: fileCert, Content: chain},
		node.change(),
	}
	var kept *tls.Certificate
	if envfile.IsRecoveryToken(token) && s.node.InstanceID == node.InstanceID {
		kept = s.current
	}
	slot, err := slotChanges(kept, fileNextCert, fileNextKey)
	if err != nil {
		return err
	}
	changes = append(changes, slot...)
	if former == nil {
		changes = append(changes, change{File: fileFormerProfile, Remove: true})
	}
	if s.node.InstanceID != node.InstanceID {
		changes = append(changes, change{File: fileJoinState, Remove: true})
	}
	trust, given, err := s.trustChanges(answer.GetProfile())
	if err != nil {
		return err
	}
	changes = append(changes, trust...)
	listed, record := s.givenLocked(given...)
	changes = slices.Concat(changes, record, []change{tokens.change()}, changesOf(env), []change{
		{File: filePendingKey, Remove: true},
		{File: fileRenewingKey, Remove: true},
		{File: fileRecoveringKey, Remove: true},
	})
	if err := s.commit("enrol", changes); err != nil {
		return err
	}
	if s.node.InstanceID != node.InstanceID {
		s.join = joinState{}
	}
	s.current, s.other, s.node, s.enrolled, s.env = pair, kept, node, true, env
	s.pending, s.renewing, s.recovering, s.tokens, s.listed, s.former = nil, nil, nil, tokens, listed, former
	return nil
}

// envAfter returns node-agent.env and the recovery tokens after an enrolment with token.
func (s *Store) envAfter(token string, answer *recoveryv1.EnrollResponse) (envfile.Env, recoveryTokens, error) {
	env := s.freshEnvLocked()
	profile := answer.GetProfile()
	for _, v := range []struct{ name, value string }{
		{envfile.APIURL, profile.GetApiUrl()},
		{envfile.TerminalURL, profile.GetTerminalUrl()},
		{envfile.RecoveryURL, profile.GetRecoveryUrl()},
		{envfile.TaskKeys, answer.GetTaskSigningPubkeys()},
	} {
		if v.value == "" {
			continue
		}
		if !envfile.Clean(v.value) {
			return envfile.Env{}, recoveryTokens{}, fmt.Errorf("enrolment's answer: %s cannot be kept", v.name)
		}
		env = env.With(v.name, v.value)
	}
	if !envfile.Clean(answer.GetRecoveryToken()) {
		return envfile.Env{}, recoveryTokens{}, errors.New("enrolment's answer: the recovery token cannot be kept")
	}
	tokens := recoveryTokens{Refused: s.tokens.Refused}
	if envfile.IsRecoveryToken(token) {
		tokens = tokens.refuse(token)
	}
	if env.Get(envfile.Token) == token || envfile.IsRecoveryToken(env.Get(envfile.Token)) {
		env = env.With(envfile.Token, "")
	}
	env, tokens = s.putLocked(env, tokens, answer.GetRecoveryToken())
	return env, tokens, env.Validate()
}

// trustChanges returns the changes that make the trust of a profile durable, and the bundles that the profile gives.
func (s *Store) trustChanges(profile *commonv1.Profile) ([]change, []file, error) {
	pinned := fileRecoveryBundle
	if path := s.env.Get(envfile.RecoveryBundle); path != "" &&
		filepath.Base(path) != filepath.Base(s.path(fileRecoveryBundle)) {
		pinned = "" // pinned by the operator in a file of its own, which this package must not replace
	}
	var changes []change
	var given []file
	for _, t := range []struct {
		file, old file
		bundle    []byte
	}{{fileBundle, fileBundleOld, profile.GetCaBundlePem()}, {pinned, fileRecoveryOld, profile.GetRecoveryCaBundlePem()}} {
		if len(t.bundle) == 0 || t.file == "" {
			continue
		}
		if _, err := pki.DecodeCertificates(t.bundle); err != nil {
			return nil, nil, fmt.Errorf("trust bundle of the profile: %w", err)
		}
		given = append(given, t.file)
		old, err := pki.ReadFile(s.path(t.file))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, nil, fmt.Errorf("read trust bundle: %w", err)
		case bytes.Equal(old, t.bundle):
			continue
		default:
			changes = append(changes, change{File: t.old, Content: old})
		}
		changes = append(changes, change{File: t.file, Content: t.bundle})
	}
	return changes, given, nil
}
