package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// ErrBundleSpent means that this identity was made with the bundle's token already.
var ErrBundleSpent = errors.New("the bundle's token was used for the identity held here")

// ErrNothingBefore means that no operator's bundle has replaced endpoints or trust that could be put back.
var ErrNothingBefore = errors.New("no endpoints and no trust from before a bundle are kept here")

// profileVariables are the variables that an archive sets as a whole: those that it lacks are removed.
var profileVariables = []string{
	envfile.APIURL, envfile.RecoveryURL, envfile.RecoveryBundle, envfile.TerminalURL, envfile.TrustDomain,
	envfile.NodeName,
}

// archiveVariables are all variables that an archive may set.
var archiveVariables = append(slices.Clone(profileVariables), envfile.Token)

// Bundle is what an operator brings to a host: variables of node-agent.env with a token, and the two trust bundles.
type Bundle struct {
	nodeID, trustDomain string // of an archive
	archive             bool
	env                 envfile.Env
	ca, recoveryCA      []byte // nil: not in it
}

// ReadBundle reads the directory of a bundle for a new machine: node-agent.env is needed, the two trust bundles are
// read where they are in it.
func ReadBundle(dir string) (*Bundle, error) {
	data, err := pki.ReadFile(filepath.Join(dir, filepath.Base(string(fileEnv))))
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	b := &Bundle{}
	if b.env, err = envfile.Parse(data); err != nil {
		return nil, fmt.Errorf("read bundle: %w", &envfile.Error{Problems: err})
	}
	for _, f := range []struct {
		file file
		into *[]byte
	}{{fileBundle, &b.ca}, {fileRecoveryBundle, &b.recoveryCA}} {
		content, err := pki.ReadFile(filepath.Join(dir, filepath.Base(string(f.file))))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = pki.DecodeCertificates(content)
		}
		if err != nil {
			return nil, fmt.Errorf("read bundle: %s: %w", filepath.Base(string(f.file)), err)
		}
		*f.into = content
	}
	return b, b.check()
}

// BundleOf returns the bundle of an archive whose origin the caller has verified. An archive whose environment file has
// what none has is fault bundle_invalid.
func BundleOf(archive *bundle.Archive) (*Bundle, error) {
	env, err := envfile.Parse(archive.Files.Env)
	if err != nil {
		return nil, bundle.Invalid((&envfile.Error{Problems: err}).Error())
	}
	b := &Bundle{
		nodeID: archive.Manifest.NodeID, trustDomain: archive.Manifest.TrustDomain, archive: true, env: env,
		ca: archive.Files.CA, recoveryCA: archive.Files.RecoveryCA,
	}
	for _, name := range env.Names() {
		if !slices.Contains(archiveVariables, name) {
			return nil, bundle.Invalid("its environment file sets " + name + ", which no bundle does")
		}
	}
	switch {
	case env.Get(envfile.TrustDomain) != b.trustDomain:
		return nil, bundle.Invalid("its environment file names another trust domain than its manifest")
	case env.Get(envfile.RecoveryBundle) != bundle.FileRecoveryCA:
		return nil, bundle.Invalid("its environment file names another file of trust than it has")
	case envfile.IsRecoveryToken(env.Get(envfile.Token)):
		return nil, bundle.Invalid("its token is no operator's")
	}
	if err := b.check(); err != nil {
		return nil, bundle.Invalid(err.Error())
	}
	return b, nil
}

func (b *Bundle) check() error {
	if b.env.Get(envfile.Token) == "" {
		return fmt.Errorf("read bundle: %s is not set", envfile.Token)
	}
	return nil
}

// Archive reports whether the bundle is a signed archive for a node that exists.
func (b *Bundle) Archive() bool { return b.archive }

// TrustDomain returns the trust domain that an archive is of; empty for a directory.
func (b *Bundle) TrustDomain() string { return b.trustDomain }

// over returns env with what the bundle sets.
func (b *Bundle) over(env envfile.Env) envfile.Env {
	if b.archive {
		for _, name := range archiveVariables { // also those that are set again, so that they stand in the same order
			env = env.With(name, "")
		}
	}
	for _, name := range b.env.Names() {
		env = env.With(name, b.env.Get(name))
	}
	return env
}

// CheckBundle returns what InstallBundle would refuse a bundle with, and the profile that the host would have with it.
// Nothing is changed.
func (s *Store) CheckBundle(b *Bundle) (*commonv1.Profile, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return nil, err
	}
	env, err := s.checkBundleLocked(b)
	if err != nil {
		return nil, err
	}
	out := &commonv1.Profile{
		ApiUrl: env.Get(envfile.APIURL), RecoveryUrl: env.RecoveryURL(), TerminalUrl: env.Get(envfile.TerminalURL),
		CaBundlePem: b.ca, RecoveryCaBundlePem: b.recoveryCA,
	}
	if out.CaBundlePem == nil {
		if out.CaBundlePem, err = readIfThere(s.path(fileBundle)); err != nil {
			return nil, fmt.Errorf("read trust bundle: %w", err)
		}
	}
	if out.RecoveryCaBundlePem == nil {
		if out.RecoveryCaBundlePem, err = readIfThere(s.path(fileRecoveryBundle)); err != nil {
			return nil, fmt.Errorf("read trust bundle: %w", err)
		}
	}
	return out, nil
}

// checkBundleLocked returns node-agent.env as it would be with a bundle, or why the bundle is refused.
func (s *Store) checkBundleLocked(b *Bundle) (envfile.Env, error) {
	if s.enrolled {
		switch domain := b.env.Get(envfile.TrustDomain); { // an archive has it, a directory may
		case (b.archive || domain != "") && domain != s.node.TrustDomain:
			return envfile.Env{}, fault.New(commonv1.Reason_REASON_BUNDLE_INVALID, "the bundle is refused as a whole: it is of "+
				"trust domain "+domain+", and this node is of "+s.node.TrustDomain, fault.Remedy(Transfer))
		case b.archive && b.nodeID != s.node.NodeID:
			return envfile.Env{}, bundle.Invalid("it is for node " + b.nodeID + ", and this host is node " + s.node.NodeID)
		}
	}
	if s.spentLocked(b.env.Get(envfile.Token)) {
		return envfile.Env{}, ErrBundleSpent
	}
	env := s.freshEnvLocked()
	env.Unread = false // what cannot be read is what the bundle is to replace
	env = b.over(env)
	if err := env.Validate(); err != nil {
		return envfile.Env{}, fmt.Errorf("read bundle: %w", err)
	}
	return env, nil
}

// Transfer is what an operator does to give a node's host to another mesh.
const Transfer = "to give the host to another mesh, retire the node in its own, remove the agent's directories on " +
	"the host, and enrol it there then"

// InstallBundle puts an operator's bundle in place, all of it or nothing. Variables that the bundle does not set keep
// their values, except that an archive sets all endpoints. The next enrolment uses the bundle's token with a key of its
// own. The endpoints and the trust from before are kept for RestoreFormer. An archive for another node is fault
// bundle_invalid; ErrBundleSpent means that nothing was done, since the host was enrolled with this bundle's token.
func (s *Store) InstallBundle(b *Bundle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	env, err := s.checkBundleLocked(b)
	if err != nil {
		return err
	}
	before, kept, err := s.beforeLocked(b)
	if err != nil {
		return err
	}
	token, tokens := b.env.Get(envfile.Token), s.tokens
	if envfile.IsRecoveryToken(token) {
		tokens.Waiting = ""
	} else {
		tokens.Waiting = tokens.newest(s.freshEnvLocked()) // until the bundle's token is used
	}
	var changes []change
	var brought []file
	for _, f := range []struct {
		file    file
		content []byte
	}{{fileBundle, b.ca}, {fileRecoveryBundle, b.recoveryCA}} {
		if f.content != nil {
			changes, brought = append(changes, change{File: f.file, Content: f.content}), append(brought, f.file)
		}
	}
	listed, record := s.givenLocked(brought...)
	if s.former != nil { // the bundle takes the place of an offered profile that is not confirmed
		changes = append(changes, change{File: fileFormerProfile, Remove: true})
	}
	node := s.node
	if s.enrolled && env.Get(envfile.APIURL) != s.env.Get(envfile.APIURL) {
		// The address is the operator's from now on: that it is not the profile's says nothing until the next enrolment.
		node.ProfileAPI, node.ProfileAPIOf = "", ""
		changes = append(changes, node.change())
	}
	changes = slices.Concat(kept, changes, record, []change{tokens.change(), {File: fileEnv, Content: env.Render()}})
	fresh := s.env.Get(envfile.Token) != token
	if fresh {
		// A request with the same token must have the same key: else the retry after a lost reply would look like a stolen
		// token.
		changes = append(changes, change{File: filePendingKey, Remove: true})
	}
	if err := s.commit("bundle", changes); err != nil {
		return err
	}
	s.env, s.node, s.tokens, s.listed, s.beforeBundle, s.former = env, node, tokens, listed, before, nil
	if fresh {
		s.pending = nil
	}
	return nil
}

// beforeBundle is the content of before-bundle.json: what a bundle has replaced.
type beforeBundle struct {
	Variables map[string]string `json:"variables"`             // those of profileVariables that were set
	CA        []byte            `json:"ca,omitempty"`          // nil: there was none
	Recovery  []byte            `json:"recovery_ca,omitempty"` // nil: there was none
	TokenHash string            `json:"token_sha256"`          // of the bundle's token
	Profile   heldProfile       `json:"profile"`               // whose endpoints and trust these are
}

// heldProfile is what node.json has of a profile.
type heldProfile struct {
	Name        string `json:"name,omitempty"`
	Version     int64  `json:"version,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
	API         string `json:"api,omitempty"`    // Node.ProfileAPI
	APIOf       string `json:"api_of,omitempty"` // Node.ProfileAPIOf
}

func (n Node) profile() heldProfile {
	return heldProfile{n.ProfileName, n.ProfileVersion, n.ProfileFingerprint, n.ProfileAPI, n.ProfileAPIOf}
}

func (n Node) withProfile(p heldProfile) Node {
	n.ProfileName, n.ProfileVersion, n.ProfileFingerprint, n.ProfileAPI, n.ProfileAPIOf = p.Name, p.Version, p.Fingerprint,
		p.API, p.APIOf
	return n
}

// beforeLocked returns what a bundle replaces, with the changes that make it durable: in place of an offered profile
// that is not confirmed, the one before that. A host that had no endpoints has nothing to keep, and a bundle that is
// installed again does not replace itself.
func (s *Store) beforeLocked(b *Bundle) (beforeBundle, []change, error) {
	hash := hashToken(b.env.Get(envfile.Token))
	if s.beforeBundle.TokenHash == hash || s.env.Get(envfile.Token) == b.env.Get(envfile.Token) {
		return s.beforeBundle, nil, nil
	}
	if !s.env.Reaches() {
		return beforeBundle{}, []change{{File: fileBeforeBundle, Remove: true}}, nil
	}
	out := beforeBundle{Variables: map[string]string{}, TokenHash: hash, Profile: s.node.profile()}
	env, former := s.env, s.unconfirmedLocked()
	if former != nil {
		env = former.over(env)
		out.Profile = heldProfile{former.Name, former.Version, former.Fingerprint, former.API, former.APIOf}
	}
	for _, name := range profileVariables {
		if value := env.Get(name); value != "" {
			out.Variables[name] = value
		}
	}
	var err error
	if out.CA, err = readIfThere(s.path(fileBundle)); err == nil {
		out.Recovery, err = readIfThere(s.path(fileRecoveryBundle))
	}
	if err != nil {
		return beforeBundle{}, nil, fmt.Errorf("read trust bundle: %w", err)
	}
	if former != nil {
		out.CA, out.Recovery = former.Trust[fileBundle], former.Trust[fileRecoveryBundle]
	}
	data, _ := json.Marshal(out) // texts and bytes are always encoded
	return out, []change{{File: fileBeforeBundle, Content: data}}, nil
}

// RestoreFormer puts the endpoints and the trust from before the last bundle back, all or none, and forgets them. The
// bundle's token is removed unless it was used. ErrNothingBefore means that there are none.
func (s *Store) RestoreFormer() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	if s.beforeBundle.TokenHash == "" {
		return ErrNothingBefore
	}
	env, tokens := s.freshEnvLocked(), s.tokens
	env.Unread = false
	for _, name := range profileVariables {
		env = env.With(name, s.beforeBundle.Variables[name])
	}
	unused := s.operatorTokenLocked(env) != "" && hashToken(env.Get(envfile.Token)) == s.beforeBundle.TokenHash
	if unused {
		newest := tokens.newest(env)
		env, tokens = s.putLocked(env.With(envfile.Token, ""), tokens, newest)
	}
	var changes []change
	for _, f := range []struct {
		file    file
		content []byte
	}{{fileBundle, s.beforeBundle.CA}, {fileRecoveryBundle, s.beforeBundle.Recovery}} {
		changes = append(changes, change{File: f.file, Content: f.content, Remove: f.content == nil})
	}
	listed, record := s.givenLocked(fileBundle, fileRecoveryBundle)
	node := s.node
	if s.enrolled { // an enrolment with the bundle has told another profile
		node = node.withProfile(s.beforeBundle.Profile)
		record = append(record, node.change())
	}
	changes = slices.Concat(changes, record,
		[]change{tokens.change(), {File: fileEnv, Content: env.Render()}, {File: fileBeforeBundle, Remove: true}})
	if unused {
		changes = append(changes, change{File: filePendingKey, Remove: true})
	}
	if s.former != nil {
		changes = append(changes, change{File: fileFormerProfile, Remove: true})
	}
	if err := s.commit("restore_former", changes); err != nil {
		return err
	}
	s.env, s.tokens, s.listed, s.node, s.beforeBundle, s.former = env, tokens, listed, node, beforeBundle{}, nil
	if unused {
		s.pending = nil
	}
	return nil
}

// readIfThere returns the content of a file, nil if there is none.
func readIfThere(path string) ([]byte, error) {
	data, err := pki.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}
