package readmodel

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
)

// asserter returns the signer of the assertions that name the person on whose behalf this service calls. It uses the
// key that signs at the time of the call, which also signs checkpoints of the audit log.
func (s *Service) asserter(ctx context.Context) (*assertion.Signer, error) {
	var asserter *assertion.Signer
	_, err := s.base.OpenKeys(ctx, nil, keyset.Part{
		Kind: keyset.Assertion, Signs: true, Files: keyset.FilesOf(s.cfg.AssertionKeyFile),
		Outstanding: func(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
			return s.audit.NeedKey(ctx, q, key.KeyID, key.PublicKey)
		},
		Changed: func(v keyset.View) error {
			if asserter == nil {
				asserter = assertion.NewSigner(v.Signing, nil)
			}
			asserter.Replace(v.Signing)
			asserter.Guard(v.Confirmed)
			s.audit.UseKeys(auditlog.CheckpointKeys{Signing: v.Signing, Verify: v.Verify, Confirmed: v.Confirmed})
			return nil
		},
	})
	if err != nil {
		return nil, fmt.Errorf("open assertion keys: %w", err)
	}
	return asserter, nil
}
