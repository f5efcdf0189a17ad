package tokens_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// One of two tokens is in a state that this build does not know: it is shown without one, the other one as it is.
func TestAnUnknownStateStopsNoOtherToken(t *testing.T) {
	s := newScene(t)
	reported := testkit.SetAside(t, "recovery_token")
	odd, plain := ids.New(), ids.New()
	for id, state := range map[string]string{odd: "revoked", plain: "used"} {
		for _, sql := range []string{
			`INSERT INTO recovery.identity (node_id, name, node_instance_id, state, state_at)
				VALUES ($1, $1::uuid::text || $2, $1, 'active', mesh.clock())`,
			`INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
					era, state, state_at, serial)
				VALUES ($1, $1, $1, $1, '', sha256('k'), 'k', 0, $2, mesh.clock(), $1::uuid::text)`,
		} {
			if _, err := s.pool.Exec(s.ctx, sql, id, state); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
		}
	}
	testkit.WithoutValue(t, commonv1.TokenState_TOKEN_STATE_REVOKED)
	server, err := tokens.NewServer(tokens.Deps{
		Logger: testkit.Logger(t), Pool: s.pool, Policy: policy.Fixed{Set: policy.Defaults()},
		Profiles: func() []string { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	res, err := server.ListTokens(s.ctx, &recoveryv1.ListTokensRequest{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]commonv1.TokenState{}
	for _, token := range res.GetItems() {
		got[token.GetTokenId()] = token.GetState()
	}
	if len(got) != 2 || got[odd] != commonv1.TokenState_TOKEN_STATE_UNSPECIFIED ||
		got[plain] != commonv1.TokenState_TOKEN_STATE_USED || reported() != 1 {
		t.Errorf("%d were reported, shown are %v", reported(), got)
	}
}
