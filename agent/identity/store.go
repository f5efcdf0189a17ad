package identity

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

// Dirs are the two directories of an agent.
type Dirs struct {
	Etc   string
	State string
}

// Node is the identity of this host, from the reply to its enrolment.
type Node struct {
	NodeID             string `json:"node_id"`
	InstanceID         string `json:"node_instance_id"`
	Name               string `json:"node_name,omitempty"`
	TrustDomain        string `json:"trust_domain"`
	WorkspaceID        string `json:"workspace_id,omitempty"` // of a launched instance
	Epoch              int64  `json:"epoch,omitempty"`
	ProfileName        string `json:"profile_name,omitempty"`
	ProfileVersion     int64  `json:"profile_version,omitempty"`
	ProfileFingerprint string `json:"profile_fingerprint,omitempty"`
	// ProfileAPI is the address of the node API in the profile whose fingerprint is ProfileAPIOf. If that is not
	// ProfileFingerprint, the address of the present profile is not known.
	ProfileAPI   string `json:"profile_api,omitempty"`
	ProfileAPIOf string `json:"profile_api_of,omitempty"`
	AutoRecovery bool   `json:"auto_recovery"`
	// TokenHash is that of the operator's token it enrolled with last, so that the token is never sent again with another
	// key.
	TokenHash string `json:"token_sha256,omitempty"`
}

// joinState is the content of join-state.json.
type joinState struct {
	InstanceID string `json:"node_instance_id"`
	Generation int64  `json:"generation"`
	Signed     []byte `json:"join_state"`
}

// Store is the identity on disk. It is safe for concurrent use; one process at a time may have it open.
type Store struct {
	dirs Dirs
	lock *os.File
	hook func(point string) error
	room *room.Reserve

	mu       sync.Mutex
	env      envfile.Env
	node     Node
	enrolled bool
	current  *tls.Certificate
	other    *tls.Certificate
	pending  crypto.Signer // of a request with an operator's token
	renewing crypto.Signer // of a renewal
	// recovery is the key to which this node's recovery tokens are bound, recovering that of the request of a recovery.
	recovery, recovering crypto.Signer
	tokens               recoveryTokens
	join                 joinState
	listed               listedBundles
	former               *formerProfile // nil: the present profile is confirmed
	beforeBundle         beforeBundle
	problems             []string
	// unfinished is set when a change failed half way (a full disk, say): the files may be ahead of memory, and there may
	// be an intent log whose changes are decided.
	unfinished bool
}

// Option changes how Open works.
type Option func(*Store)

// WithStep has hook called with the name of every point between two effects on the disk, before the failpoint of that
// name. An error of hook ends the operation there, as a crash would.
func WithStep(hook func(point string) error) Option {
	return func(s *Store) { s.hook = hook }
}

// WithRoom has files written on a full disk with the room of a reserve.
func WithRoom(reserve *room.Reserve) Option {
	return func(s *Store) { s.room = reserve }
}

// Open makes the directories if they are missing, locks them, finishes a change that a crash interrupted and reads all
// files. A *LockedError means that another agent runs here. Unreadable certificates, keys, join state and intent log
// are no error: Problems returns them, and they count as lost.
func Open(dirs Dirs, opts ...Option) (*Store, error) {
	s := &Store{dirs: dirs}
	for _, opt := range opts {
		opt(s)
	}
	for _, dir := range []string{dirs.Etc, dirs.State} {
		if dir == "" {
			return nil, errors.New("open identity: a directory is not named")
		}
		if err := os.MkdirAll(dir, dirMode); err != nil {
			return nil, fmt.Errorf("make directory: %w", err)
		}
	}
	lock, err := lockDir(s.path(fileLock), dirs.State)
	if err != nil {
		return nil, err
	}
	s.lock = lock
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.loadLocked(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return s, nil
}

// Close releases the lock of the directory.
func (s *Store) Close() error {
	if err := s.lock.Close(); err != nil {
		return fmt.Errorf("release state directory: %w", err)
	}
	return nil
}

func (s *Store) loadLocked() error {
	s.problems = nil
	if err := s.replayLocked(); err != nil {
		return err
	}
	if err := s.sweep(); err != nil {
		return err
	}
	s.unfinished = false
	if err := s.loadEnvLocked(); err != nil {
		return err
	}
	s.node = load[Node](s, fileNode)
	s.enrolled = ids.Valid(s.node.NodeID) && s.node.InstanceID != ""
	s.current = s.loadSlotLocked(fileCert, fileKey)
	s.other = s.loadSlotLocked(fileNextCert, fileNextKey)
	s.join = load[joinState](s, fileJoinState)
	if s.join.InstanceID != s.node.InstanceID {
		s.join = joinState{}
	}
	s.listed = load[listedBundles](s, fileServiceRoots)
	s.former = load[*formerProfile](s, fileFormerProfile)
	s.beforeBundle = load[beforeBundle](s, fileBeforeBundle)
	var err error
	s.pending, err = readKey(s.path(filePendingKey))
	if err != nil {
		s.problemLocked("key-pending.pem", err)
	}
	s.renewing, err = readKey(s.path(fileRenewingKey))
	if err != nil {
		s.problemLocked("key-renewing.pem", err)
	}
	s.loadRecoveryLocked()
	s.checkProfileLocked()
	return nil
}

// checkProfileLocked adds a problem for each trust bundle that is broken and, on a node, for an unusable
// node-agent.env: the node needs them to reach its control plane, and an operator's bundle brings them back.
func (s *Store) checkProfileLocked() {
	for _, f := range []file{fileBundle, fileRecoveryBundle} {
		data, err := pki.ReadFile(s.path(f))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = pki.DecodeCertificates(data)
		}
		if err != nil {
			s.problemLocked(filepath.Base(string(f)), fmt.Errorf("%w; an operator's bundle brings it back", err))
		}
	}
	if !s.enrolled {
		return
	}
	err := s.env.Validate()
	if err == nil && s.env.Get(envfile.TaskKeys) == "" {
		err = fmt.Errorf("%s is not set", envfile.TaskKeys)
	}
	if err != nil {
		s.problems = append(s.problems,
			fmt.Sprintf("node-agent.env is not whole: %v; an operator's bundle brings it back", err))
	}
}

func (s *Store) loadEnvLocked() error {
	path := s.path(fileEnv)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		s.env = envfile.Env{}
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at node-agent.env: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(path, fileMode); err != nil {
			return fmt.Errorf("close node-agent.env to others: %w", err)
		}
		s.problems = append(s.problems, "node-agent.env was readable by others: its mode is now 0600, its token may be known")
	}
	data, err := pki.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read node-agent.env: %w", err)
	}
	env, err := envfile.Parse(data)
	if err != nil {
		return &envfile.Error{Problems: err}
	}
	s.env = env
	return nil
}

// finishChangeLocked finishes a change that an earlier call began and could not end. Every call that changes something
// begins with it, since a new intent log must never replace an unfinished one.
func (s *Store) finishChangeLocked() error {
	if !s.unfinished {
		return nil
	}
	return s.loadLocked()
}

// loadSlotLocked returns the certificate of a slot; nil if the slot is empty or broken.
func (s *Store) loadSlotLocked(cert, key file) *tls.Certificate {
	certPEM, certErr := pki.ReadFile(s.path(cert))
	keyPEM, keyErr := pki.ReadFile(s.path(key))
	if errors.Is(certErr, fs.ErrNotExist) && errors.Is(keyErr, fs.ErrNotExist) {
		return nil
	}
	if err := errors.Join(certErr, keyErr); err != nil {
		s.problemLocked(string(cert)+" with "+string(key), err)
		return nil
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		s.problemLocked(string(cert)+" with "+string(key), err)
		return nil
	}
	if _, err := nodeOf(pair.Leaf); err != nil {
		s.problemLocked(string(cert), err)
		return nil
	}
	return &pair
}

func (s *Store) problemLocked(what string, err error) {
	s.problems = append(s.problems, fmt.Sprintf("%s is lost: %v", what, err))
}

// Problems returns a text for people, without secrets, for each thing that was found broken when the files were read
// last.
func (s *Store) Problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.problems)
}

// Env returns node-agent.env as last read or written.
func (s *Store) Env() envfile.Env {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.env
}

// ReloadEnv reads node-agent.env again: an operator may have put a fresh token or endpoint there.
func (s *Store) ReloadEnv() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loadEnvLocked()
}

// Node returns who this host is; false before its first enrolment, or if node.json is lost.
func (s *Store) Node() (Node, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node, s.enrolled
}

// Certificate returns the certificate to open sessions with; nil if there is none.
func (s *Store) Certificate() *tls.Certificate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Other returns the certificate of the other slot; nil if there is none.
func (s *Store) Other() *tls.Certificate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.other
}

// JoinState returns the signed join state with its generation; empty before the first session of this node instance.
func (s *Store) JoinState() ([]byte, int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.join.Signed), s.join.Generation
}

// StoreJoinState makes the join state durable if its generation is larger than that of the present one, and returns
// whether it did.
func (s *Store) StoreJoinState(generation int64, signed []byte) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return false, err
	}
	if !s.enrolled {
		return false, errors.New("store join state: this host is no node yet")
	}
	if generation <= s.join.Generation {
		return false, nil
	}
	next := joinState{InstanceID: s.node.InstanceID, Generation: generation, Signed: bytes.Clone(signed)}
	data, _ := json.Marshal(next) // texts and bytes are always encoded
	if err := s.write("join_state", fileJoinState, data); err != nil {
		return false, fmt.Errorf("store join state: %w", err)
	}
	s.join = next
	return true, nil
}

// step calls the hook and the failpoint of a point between two effects on the disk, at which a crash may end the
// process.
func (s *Store) step(operation string, f file, where string) error {
	name := strings.TrimSuffix(filepath.Base(string(f)), filepath.Ext(string(f)))
	point := "agent.identity." + operation + "." + name + "." + where
	if s.hook != nil {
		if err := s.hook(point); err != nil {
			return err
		}
	}
	return failpoint.Hit(point)
}

// load returns the content of a file as a T, and the zero T where there is no file, or with a problem one that cannot
// be read.
func load[T any](s *Store, f file) T {
	var out, none T
	data, err := pki.ReadFile(s.path(f))
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	if err == nil {
		err = json.Unmarshal(data, &out)
	}
	if err != nil {
		s.problemLocked(filepath.Base(string(f)), err)
		return none
	}
	return out
}

func readKey(path string) (crypto.Signer, error) {
	data, err := pki.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return pki.DecodeKey(data)
}
