package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// formerProfile is the content of former-profile.json: the profile before an offered one, until the offered one is
// confirmed.
type formerProfile struct {
	Name        string `json:"name,omitempty"`
	Version     int64  `json:"version,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
	API         string `json:"api,omitempty"`    // Node.ProfileAPI
	APIOf       string `json:"api_of,omitempty"` // Node.ProfileAPIOf
	// Env has the variables of the endpoints. One that is not in it was not set.
	Env map[string]string `json:"env"`
	// Trust has the content of the trust bundles, and Listed their records of roots. A file that is not in Trust was not
	// there.
	Trust  map[file][]byte `json:"trust"`
	Listed listedBundles   `json:"listed,omitempty"`

	// Stored is the fingerprint of the profile that took its place, StoredEnv its endpoints, StoredTrust the digests of
	// its bundles.
	Stored      string            `json:"stored"`
	StoredEnv   map[string]string `json:"stored_env"`
	StoredTrust map[file]string   `json:"stored_trust"`
}

var endpointVariables = []string{envfile.APIURL, envfile.TerminalURL, envfile.RecoveryURL}

func endpointsOf(env envfile.Env) map[string]string {
	out := map[string]string{}
	for _, name := range endpointVariables {
		if value := env.Get(name); value != "" {
			out[name] = value
		}
	}
	return out
}

// ErrProfileIncomplete means that a profile cannot be stored as it is.
var ErrProfileIncomplete = errors.New("the profile cannot be kept")

// Replacing returns a profile with the trust that this host would use for it: where an operator has pinned the trust
// for enrolment in a file of its own, that file's.
func (s *Store) Replacing(profile *commonv1.Profile) (*commonv1.Profile, error) {
	out := proto.CloneOf(profile)
	if s.ownsRecoveryBundle() {
		return out, nil
	}
	pinned, err := pki.ReadFile(s.RecoveryBundlePath())
	if err != nil {
		return nil, fmt.Errorf("read the pinned trust for enrolment: %w", err)
	}
	out.RecoveryCaBundlePem = pinned
	return out, nil
}

// ownsRecoveryBundle reports whether the trust for enrolment is in this package's file, or defaults to that for the
// node API.
func (s *Store) ownsRecoveryBundle() bool {
	path := s.Env().Get(envfile.RecoveryBundle)
	return path == "" || filepath.Base(path) == filepath.Base(s.path(fileRecoveryBundle))
}

// StoreProfile makes a profile that was verified the one of this host, all of it or nothing: endpoints, trust, name,
// version and fingerprint. Endpoints and bundles that it lacks are removed; a bundle for enrolment that an operator
// pinned in a file of its own stays. The profile before it is kept until ConfirmProfile, for RevertProfile.
// StoreProfile reports whether the node API has another endpoint or other trust than before.
func (s *Store) StoreProfile(profile *commonv1.Profile) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return false, err
	}
	if !s.enrolled {
		return false, errors.New("store profile: this host is no node yet")
	}
	fingerprint := profile.GetFingerprint()
	if fingerprint == "" || len(profile.GetCaBundlePem()) == 0 {
		return false, fmt.Errorf("store profile: %w: it has no fingerprint, or no trust bundle", ErrProfileIncomplete)
	}
	if fingerprint == s.node.ProfileFingerprint {
		return s.former != nil && s.former.Stored == fingerprint, nil // stored by an earlier call that had an error
	}
	before := s.freshEnvLocked()
	if before.Unread {
		return false, errors.New("store profile: node-agent.env cannot be read and is left as it is")
	}
	env := before
	for i, value := range []string{profile.GetApiUrl(), profile.GetTerminalUrl(), profile.GetRecoveryUrl()} {
		if !envfile.Clean(value) {
			return false, fmt.Errorf("store profile: %w: %s", ErrProfileIncomplete, endpointVariables[i])
		}
		env = env.With(endpointVariables[i], value)
	}
	if err := env.Validate(); err != nil || env.Get(envfile.APIURL) == "" {
		return false, fmt.Errorf("store profile: %w", errors.Join(ErrProfileIncomplete, err))
	}
	former, err := s.formerLocked(before)
	if err != nil {
		return false, err
	}
	trust, given, err := s.trustChanges(profile)
	if err != nil {
		return false, err
	}
	pinned := env.Get(envfile.RecoveryBundle) != "" &&
		filepath.Base(env.Get(envfile.RecoveryBundle)) != filepath.Base(s.path(fileRecoveryBundle))
	if len(profile.GetRecoveryCaBundlePem()) == 0 && !pinned {
		if old, ok := former.Trust[fileRecoveryBundle]; ok {
			trust = append(trust, change{File: fileRecoveryOld, Content: old})
		}
		trust, given = append(trust, change{File: fileRecoveryBundle, Remove: true}), append(given, fileRecoveryBundle)
	}
	former.Stored, former.StoredEnv, former.StoredTrust = fingerprint, endpointsOf(env), map[file]string{}
	former.StoredTrust[fileBundle] = digest(profile.GetCaBundlePem())
	if slices.Contains(given, fileRecoveryBundle) && len(profile.GetRecoveryCaBundlePem()) > 0 {
		former.StoredTrust[fileRecoveryBundle] = digest(profile.GetRecoveryCaBundlePem())
	}
	listed, record := s.givenLocked(given...)
	node := s.node
	node.ProfileName, node.ProfileVersion, node.ProfileFingerprint = profile.GetName(), profile.GetVersion(), fingerprint
	node = node.withAPI(profile)
	changes := slices.Concat(trust, record, []change{former.change(), node.change()}, changesOf(env))
	if s.beforeBundle.TokenHash != "" { // what is from before a bundle is older than this profile
		changes = append(changes, change{File: fileBeforeBundle, Remove: true})
	}
	if err := s.commit("profile", changes); err != nil {
		return false, fmt.Errorf("store profile: %w", err)
	}
	anew := env.Get(envfile.APIURL) != before.Get(envfile.APIURL) ||
		slices.ContainsFunc(trust, func(c change) bool { return c.File == fileBundle })
	s.env, s.node, s.listed, s.former, s.beforeBundle = env, node, listed, former, beforeBundle{}
	return anew, nil
}

// formerLocked returns the present profile as the one to go back to: or, while that is not confirmed, the one before.
func (s *Store) formerLocked(env envfile.Env) (*formerProfile, error) {
	if former := s.unconfirmedLocked(); former != nil {
		out := *former
		return &out, nil
	}
	out := &formerProfile{
		Name: s.node.ProfileName, Version: s.node.ProfileVersion, Fingerprint: s.node.ProfileFingerprint,
		API: s.node.ProfileAPI, APIOf: s.node.ProfileAPIOf,
		Env: endpointsOf(env), Trust: map[file][]byte{}, Listed: maps.Clone(s.listed),
	}
	for _, f := range []file{fileBundle, fileRecoveryBundle} {
		content, err := pki.ReadFile(s.path(f))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("read trust bundle: %w", err)
		default:
			out.Trust[f] = content
		}
	}
	return out, nil
}

// unconfirmedLocked returns the profile before the present one while that is not confirmed, nil otherwise.
func (s *Store) unconfirmedLocked() *formerProfile {
	if s.former == nil || s.former.Stored != s.node.ProfileFingerprint {
		return nil
	}
	return s.former
}

// over returns env with the endpoints of f.
func (f *formerProfile) over(env envfile.Env) envfile.Env {
	for _, name := range endpointVariables {
		env = env.With(name, f.Env[name])
	}
	return env
}

func (f *formerProfile) change() change {
	data, _ := json.Marshal(f) // texts, bytes and numbers are always encoded
	return change{File: fileFormerProfile, Content: data}
}

// withAPI returns n with the address of the node API that a profile has, if it has one that can be used.
func (n Node) withAPI(profile *commonv1.Profile) Node {
	if address, err := envfile.HostPort(profile.GetApiUrl()); err == nil {
		n.ProfileAPI, n.ProfileAPIOf = address, profile.GetFingerprint()
	}
	return n
}

func (n Node) change() change {
	data, _ := json.MarshalIndent(n, "", "  ") // texts and numbers are always encoded
	return change{File: fileNode, Content: data}
}

// UnconfirmedProfile returns the fingerprint of the present profile while no session was admitted over it and the one
// before is kept; empty: it is confirmed. A change that had an error is finished first, if that can be done: its
// profile may be the present one.
func (s *Store) UnconfirmedProfile() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.finishChangeLocked() // the next change has the error
	if s.former == nil || s.former.Stored != s.node.ProfileFingerprint {
		return ""
	}
	return s.former.Stored
}

// ConfirmProfile is called when a session is admitted over the profile of a fingerprint, or is not needed: the one
// before it is no longer kept.
func (s *Store) ConfirmProfile(fingerprint string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	if s.former == nil || s.former.Stored != fingerprint {
		return nil
	}
	if err := s.remove("profile_confirmed", fileFormerProfile); err != nil {
		return err
	}
	s.former = nil
	return nil
}

// RevertProfile makes the profile before the present one that of this host again, all of it, while the present one is
// not confirmed. It reports whether it did. Where an operator has changed an endpoint or a trust bundle since, what is
// on the disk stays, and counts as confirmed.
func (s *Store) RevertProfile() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return false, err
	}
	former := s.former
	if former == nil || former.Stored != s.node.ProfileFingerprint {
		return false, nil
	}
	env := s.freshEnvLocked()
	if env.Unread || !maps.Equal(endpointsOf(env), former.StoredEnv) || !s.trustsLocked(former.StoredTrust) {
		if err := s.remove("profile_kept", fileFormerProfile); err != nil {
			return false, err
		}
		s.former = nil
		return false, nil
	}
	env = former.over(env)
	node, listed := s.node, maps.Clone(former.Listed)
	node.ProfileName, node.ProfileVersion, node.ProfileFingerprint = former.Name, former.Version, former.Fingerprint
	node.ProfileAPI, node.ProfileAPIOf = former.API, former.APIOf
	var changes []change
	for _, f := range []file{fileBundle, fileRecoveryBundle} {
		content, ok := former.Trust[f]
		changes = append(changes, change{File: f, Content: content, Remove: !ok})
	}
	changes = append(changes, listed.change(), node.change())
	changes = slices.Concat(changes, changesOf(env), []change{{File: fileFormerProfile, Remove: true}})
	if err := s.commit("profile_back", changes); err != nil {
		return false, fmt.Errorf("go back to the former profile: %w", err)
	}
	s.env, s.node, s.listed, s.former = env, node, listed, nil
	return true, nil
}

// trustsLocked reports whether the trust bundles are those of the digests, or follow from them by a list of roots.
func (s *Store) trustsLocked(stored map[file]string) bool {
	for f, sum := range stored {
		content, err := pki.ReadFile(s.path(f))
		if err != nil {
			return false
		}
		if now := digest(content); now != sum && s.listed[f].SHA256 != now {
			return false
		}
	}
	return true
}
