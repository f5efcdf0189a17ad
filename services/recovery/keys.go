package recovery

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
	"github.com/gpuaas/mesh/services/recovery/keys"
)

// signingKeys are the keys with which this service signs and verifies, and the public keys that it sends to agents.
type signingKeys struct {
	join    joinstate.Ring
	persons *assertion.Verifier
	tasks   atomic.Pointer[pki.KeySet]
	tokens  *ca.RecoveryRing
}

// taskKeys returns the public keys of tasks in the form that agents read.
func (k *signingKeys) taskKeys() (string, error) {
	set := k.tasks.Load()
	if set == nil {
		return "", errors.New("read task signing keys: there are none")
	}
	return set.String(), nil
}

func (s *Service) openKeys(ctx context.Context) error {
	k := &s.keys
	k.persons = assertion.NewVerifier(nil, nil)
	var err error
	if k.tokens, err = ca.NewRecoveryRing(s.signer.ProvisionerKey(), s.base.Config.TrustDomain); err != nil {
		return fmt.Errorf("open signing keys: %w", err)
	}
	parts := []keyset.Part{
		{
			Kind: keyset.JoinState, Signs: true, Files: keyset.DirFiles(s.cfg.JoinStateKeys, "join-"),
			Outstanding: joinkeys.Outstanding,
			Changed: func(v keyset.View) error {
				k.join.Replace(joinstate.NewKeysOf(v.Signing, v.Privates, v.Verify))
				k.join.Guard(v.Confirmed)
				return nil
			},
		},
		{Kind: keyset.TaskSigning, Pinned: s.cfg.TaskSigningPubkeysFile, Changed: func(v keyset.View) error {
			k.tasks.Store(v.Verify)
			return nil
		}},
		{Kind: keyset.Assertion, Pinned: s.cfg.AssertionPubkeysFile, Changed: func(v keyset.View) error {
			k.persons.Replace(v.Verify)
			return nil
		}},
	}
	rotates, err := s.recoveryTokensRotate(ctx)
	if err != nil {
		return fmt.Errorf("open signing keys: %w", err)
	}
	if rotates {
		parts = append(parts, s.recoveryTokenPart())
	}
	if _, err := s.base.OpenKeys(ctx, nil, parts...); err != nil {
		return fmt.Errorf("open signing keys: %w", err)
	}
	return nil
}

// addKeys mounts the verbs of keys.
func (s *Service) addKeys(context.Context) error {
	b := s.base
	server, err := keys.NewServer(keys.Deps{Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit})
	if err != nil {
		return err
	}
	return s.internal.Mount(recoveryv1connect.NewKeyServiceHandler(server, s.internal.HandlerOptions()...))
}
