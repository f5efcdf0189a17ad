package client_test

import (
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

func TestTokens(t *testing.T) {
	f := mesh(t)
	row := &recoveryv1.RecoveryToken{
		TokenId: claimID, NodeId: nodeID, NodeName: "node-1", Profile: "default",
		State: commonv1.TokenState_TOKEN_STATE_REVOKED, EndedBy: "operator", IssuedAt: at(1), Serial: "0a0b",
	}
	always(f, "ListTokens", &readmodelv1.ListTokensResponse{Items: []*recoveryv1.RecoveryToken{row}})
	got := call(t, "tokens", "list").wants(t, 0)
	for _, want := range []string{"node-1", "revoked", "operator", "default"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if got := call(t, "tokens", "list", "-o", "json").wants(t, 0); !strings.Contains(got.out, `"token_id": "`+claimID) {
		t.Errorf("JSON:\n%s", got.out)
	}
	call(t, "tokens", "revoke", "--reason", "r").wants(t, 2)                                      // neither
	call(t, "tokens", "revoke", claimID, "--node", nodeID, "--reason", "r").wants(t, 2)           // both
	call(t, "tokens", "revoke", "--node", nodeID).wants(t, 2)                                     // no reason
	call(t, "tokens", "extend", "--profile", "p", "--reason", "r").wants(t, 2)                    // no time
	call(t, "tokens", "extend", "--profile", "p", "--until", "soon", "--reason", "r").wants(t, 2) // no such time
	always(f, "RevokeTokens", &readmodelv1.RevokeTokensResponse{Tokens: []*recoveryv1.RecoveryToken{row}, Pos: "p1"})
	call(t, "tokens", "revoke", "--node", nodeID, "--reason", "lost").wants(t, 0)
	call(t, "tokens", "revoke", claimID, "--reason", "lost").wants(t, 0)
	if req := sent[*readmodelv1.RevokeTokensRequest](f); len(req) != 2 || req[0].GetNodeId() != nodeID ||
		req[1].GetTokenId() != claimID || req[0].GetReason() != "lost" {
		t.Errorf("%v", req)
	}
	always(f, "ExtendTokens", &readmodelv1.ExtendTokensResponse{Extension: &recoveryv1.TokenExtension{
		ExtensionId: claimID, Profile: "default", Until: at(5), Reason: "moved", By: "ada", At: at(1),
	}})
	call(t, "tokens", "extend", "--profile", "default", "--until", "36h", "--reason", "moved").wants(t, 0)
	if req := sent[*readmodelv1.ExtendTokensRequest](f); len(req) != 1 ||
		time.Until(req[0].GetUntil().AsTime()) < 35*time.Hour {
		t.Errorf("%v", req)
	}
}

// TestATokenIsFoundByAPartOfItsID: tokens revoke takes what other commands take for an id, and says of a name that it
// is none of a token.
func TestATokenIsFoundByAPartOfItsID(t *testing.T) {
	f := mesh(t)
	other := "0192f0c1-0000-7000-8000-0000000000ff"
	always(f, "ListTokens", &readmodelv1.ListTokensResponse{Items: []*recoveryv1.RecoveryToken{
		{TokenId: claimID}, {TokenId: other},
	}})
	always(f, "RevokeTokens", &readmodelv1.RevokeTokensResponse{})
	call(t, "tokens", "revoke", claimID[len(claimID)-8:], "--reason", "r").wants(t, 0)
	if req := sent[*readmodelv1.RevokeTokensRequest](f); len(req) != 1 || req[0].GetTokenId() != claimID {
		t.Errorf("%v", req)
	}
	got := call(t, "tokens", "revoke", "0192f0", "--reason", "r").wants(t, 2)
	if !strings.Contains(got.err, "ambiguous") || !strings.Contains(got.err, other) {
		t.Errorf("a part of two ids: %s", got.err)
	}
	for _, ref := range []string{"node-1", "00ff", "abcdef01"} {
		got := call(t, "tokens", "revoke", ref, "--reason", "r").wants(t, 3)
		if !strings.Contains(got.err, "--node NODE") || !strings.Contains(got.err, ref) {
			t.Errorf("%s: %s", ref, got.err)
		}
	}
}
