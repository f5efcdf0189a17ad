package identity

import (
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/pki"
)

// TaskKeys returns the keys by which this node verifies tasks. It returns an error if node-agent.env has none, or a
// value that cannot be parsed as keys.
func (s *Store) TaskKeys() (*pki.KeySet, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taskKeysLocked()
}

func (s *Store) taskKeysLocked() (*pki.KeySet, error) {
	text := s.env.Get(envfile.TaskKeys)
	if text == "" {
		return nil, fmt.Errorf("%s is not set", envfile.TaskKeys)
	}
	set, err := pki.ParseKeySet(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envfile.TaskKeys, err)
	}
	return set, nil
}

// TakeTaskKeys makes the keys durable that follow from those held by a list of the control plane (see pki.Advance), and
// returns the resulting set and the ids of listed keys that are not believed. With an error it returns the previous
// set, which stays on disk.
func (s *Store) TakeTaskKeys(links []pki.Link) (*pki.KeySet, []string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		held, _ := s.taskKeysLocked() // the first error is returned
		return held, nil, err
	}
	held, err := s.taskKeysLocked()
	if err != nil {
		return nil, nil, err
	}
	next, unbelieved, err := pki.Advance(pki.TaskKind, held, links)
	if err != nil {
		return held, unbelieved, err
	}
	if next.String() == held.String() {
		return held, unbelieved, nil
	}
	env := s.freshEnvLocked().With(envfile.TaskKeys, next.String())
	if env.Unread {
		return held, unbelieved, errors.New("store task keys: node-agent.env cannot be read and is left as it is")
	}
	if err := s.write("task_keys", fileEnv, env.Render()); err != nil {
		return held, unbelieved, fmt.Errorf("store task keys: %w", err)
	}
	s.env = env
	return next, unbelieved, nil
}
