package keys_test

import (
	"testing"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/keys"
)

// One of two keys has a state that this build does not know: it is shown without one, the other one as it is.
func TestAnUnknownStateStopsNoOtherKey(t *testing.T) {
	k := newKit(t)
	reported := testkit.SetAside(t, "key")
	if _, err := k.db.OwnerPool().Exec(t.Context(), `
		INSERT INTO mesh.signing_key (kind, key_id, public_key, state, file, made_by, made_at, state_at)
		SELECT 'assertion', n.id, sha256(n.id::bytea), n.state, '', '', mesh.clock(), mesh.clock()
		FROM (VALUES ('odd', 'verifying_after'), ('plain', 'signing')) AS n (id, state)`); err != nil {
		t.Fatal(err)
	}
	testkit.WithoutValue(t, recoveryv1.KeyState_KEY_STATE_VERIFYING_AFTER)
	server, err := keys.NewServer(keys.Deps{Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery)})
	if err != nil {
		t.Fatal(err)
	}
	res, err := server.ListKeys(t.Context(), &recoveryv1.ListKeysRequest{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]recoveryv1.KeyState{}
	for _, key := range res.GetKeys() {
		got[key.GetKeyId()] = key.GetState()
	}
	if len(got) != 2 || got["odd"] != recoveryv1.KeyState_KEY_STATE_UNSPECIFIED ||
		got["plain"] != recoveryv1.KeyState_KEY_STATE_SIGNING || reported() != 1 {
		t.Errorf("%d were reported, shown are %v", reported(), got)
	}
}
