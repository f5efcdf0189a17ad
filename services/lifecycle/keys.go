package lifecycle

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// signingKeys are the keys that this service signs and verifies with.
type signingKeys struct {
	tasks   *envelope.Ring
	join    *joinstate.Verifier
	persons *assertion.Verifier
}

func (k *signingKeys) open(ctx context.Context, base *service.Base, cfg Config) error {
	k.tasks = &envelope.Ring{}
	k.join, k.persons = &joinstate.Verifier{}, assertion.NewVerifier(nil, nil)
	_, err := base.OpenKeys(ctx, nil,
		keyset.Part{
			// An agent's report of an attempt that the database lost also counts with an envelope signed by a former key: the
			// agents' file has those keys.
			Kind: keyset.TaskSigning, Signs: true, Files: keyset.FilesOf(cfg.TaskSigningKeyFile),
			Pinned: cfg.TaskSigningPubkeysFile,
			Distributed: func(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
				return gate.Distributed(ctx, q, key.KeyID, key.Returned)
			},
			Outstanding: task.NeedKey,
			Changed: func(v keyset.View) error {
				k.tasks.Replace(envelope.RingState{
					Signing: envelope.NewKey(v.Signing), Former: v.Privates, Verifiers: v.Verify, Confirmed: v.Confirmed,
				})
				return nil
			},
		},
		keyset.Part{Kind: keyset.JoinState, Pinned: cfg.JoinStatePubkeysFile, Changed: func(v keyset.View) error {
			return k.join.Replace(v.Verify)
		}},
		keyset.Part{Kind: keyset.Assertion, Pinned: cfg.AssertionPubkeysFile, Changed: func(v keyset.View) error {
			k.persons.Replace(v.Verify)
			return nil
		}})
	if err != nil {
		return fmt.Errorf("open signing keys: %w", err)
	}
	return nil
}
