package nodeapi

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/services/nodeapi/session"
)

// openKeys opens the public keys of join states, which prove sessions, and those of tasks. Agents are sent the keys of
// tasks from list and the roots of services from roots. Without a file of join state keys the verifier is nil.
func (s *Service) openKeys(
	ctx context.Context, list *session.KeyList, roots *session.RootList,
) (*joinstate.Verifier, error) {
	parts := []keyset.Part{{Kind: keyset.TaskSigning, Relays: true, Changed: func(v keyset.View) error {
		list.Replace(keyset.Links(keyset.TaskSigning, v.Rows))
		return nil
	}}}
	s.base.OnIssuers = roots.Replace
	var verifier *joinstate.Verifier
	if s.cfg.JoinStatePubkeysFile != "" {
		verifier = &joinstate.Verifier{}
		parts = append(parts, keyset.Part{
			Kind: keyset.JoinState, Pinned: s.cfg.JoinStatePubkeysFile,
			Changed: func(v keyset.View) error { return verifier.Replace(v.Verify) },
		})
	}
	if _, err := s.base.OpenKeys(ctx, nil, parts...); err != nil {
		return nil, fmt.Errorf("open keys: %w", err)
	}
	return verifier, nil
}
