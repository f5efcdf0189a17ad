package recovery_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/calls"
)

// Scenario: people list recovery tokens, revoke those of a node and extend those of the profile, over the real port.
func TestPeopleDecideAboutRecoveryTokens(t *testing.T) {
	m := start(t)
	console, url := m.client("readmodel")
	people := recoveryv1connect.NewTokenServiceClient(console, url, calls.Options(calls.Config{Asserter: m.asserter})...)
	pool, node := m.db.Pool(pg.RoleRecovery), ids.New()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(m.ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO recovery.identity (node_id, name, state, state_by, state_reason, state_at, created_at, version)
		VALUES ($1, 'node-1', 'pending', 'test', '', mesh.clock(), mesh.clock(), 0)`, node)
	var tokens []string
	for i := range 3 {
		tokens = append(tokens, ids.New())
		exec(`INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
			era, state, serial) VALUES ($1, $2, $2, $2, 'test', sha256('k'), 'k', 0, 'issued', 's' || $3)`, tokens[i], node,
			string(rune('a'+i)))
	}
	exec(`UPDATE recovery.recovery_token SET issued_at = mesh.clock() - interval '25 hours' WHERE token_id = $1`,
		tokens[0])
	first, err := people.ListTokens(m.asPerson("viewer"), &recoveryv1.ListTokensRequest{NodeId: node, PageSize: 2})
	if err != nil || len(first.GetItems()) != 2 || first.GetItems()[0].GetTokenId() != tokens[2] ||
		first.GetItems()[0].GetNodeName() != "node-1" {
		t.Fatalf("%v %v", first, err)
	}
	good := first.GetItems()[0]
	if age := good.GetGoodUntil().AsTime().Sub(good.GetIssuedAt().AsTime()); age != 24*time.Hour {
		t.Errorf("good for %s", age)
	}
	rest, err := people.ListTokens(m.asPerson("viewer"), &recoveryv1.ListTokensRequest{
		PageSize: 2, PageToken: first.GetNextPageToken(),
	})
	if err != nil || len(rest.GetItems()) != 1 || rest.GetNextPageToken() != "" ||
		rest.GetItems()[0].GetState() != commonv1.TokenState_TOKEN_STATE_EXPIRED {
		t.Fatalf("%v %v", rest, err)
	}
	extend := func(role, profile string, ahead time.Duration) error {
		_, err := people.ExtendTokens(m.asPerson(role), &recoveryv1.ExtendTokensRequest{
			Profile: profile, Until: timestamppb.New(time.Now().Add(ahead)), Reason: "the site is moved",
		})
		return err
	}
	for name, tt := range map[string]struct {
		err  error
		want commonv1.Reason
	}{
		"without the role": {extend("security", "test", time.Hour), commonv1.Reason_REASON_PERMISSION_DENIED},
		"other profile":    {extend("operator", "other", time.Hour), commonv1.Reason_REASON_NOT_FOUND},
		"too far":          {extend("operator", "test", 31*24*time.Hour), commonv1.Reason_REASON_INVALID_ARGUMENT},
		"the past":         {extend("operator", "test", -time.Hour), commonv1.Reason_REASON_INVALID_ARGUMENT},
		"in time":          {extend("operator", "test", 48*time.Hour), commonv1.Reason_REASON_UNSPECIFIED},
	} {
		if got := fault.ReasonOf(tt.err); tt.err != nil && got != tt.want || tt.err == nil && tt.want != 0 {
			t.Errorf("%s: %v", name, tt.err)
		}
	}
	after, err := people.ListTokens(m.asPerson("operator"), &recoveryv1.ListTokensRequest{})
	if err != nil || len(after.GetExtensions()) != 1 || len(after.GetItems()) != 3 ||
		after.GetItems()[2].GetState() != commonv1.TokenState_TOKEN_STATE_ISSUED ||
		!after.GetItems()[0].GetGoodUntil().AsTime().After(good.GetGoodUntil().AsTime()) {
		t.Fatalf("%v %v", after, err)
	}
	revoke := func(role string, req *recoveryv1.RevokeTokensRequest) (*recoveryv1.RevokeTokensResponse, error) {
		req.Reason = "lost"
		return people.RevokeTokens(m.asPerson(role), req)
	}
	if _, err := revoke("viewer", &recoveryv1.RevokeTokensRequest{NodeId: node}); !fault.Has(err,
		commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Errorf("a viewer: %v", err)
	}
	one, err := revoke("operator", &recoveryv1.RevokeTokensRequest{TokenId: tokens[0]})
	if err != nil || len(one.GetTokens()) != 1 || one.GetTokens()[0].GetEndedBy() != "operator" || one.GetPos() == "" {
		t.Fatalf("%v %v", one, err)
	}
	if _, err := revoke("operator", &recoveryv1.RevokeTokensRequest{TokenId: tokens[0]}); !fault.Has(err,
		commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("once more: %v", err)
	}
	all, err := revoke("security", &recoveryv1.RevokeTokensRequest{NodeId: node})
	if err != nil || len(all.GetTokens()) != 2 {
		t.Fatalf("%v %v", all, err)
	}
	for _, req := range []*recoveryv1.RevokeTokensRequest{{}, {TokenId: tokens[0], NodeId: node}, {TokenId: "x"}} {
		if _, err := revoke("operator", req); err == nil {
			t.Errorf("%v was accepted", req)
		}
	}
}
