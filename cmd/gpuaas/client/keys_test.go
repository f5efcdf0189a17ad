package client_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func TestKeys(t *testing.T) {
	f := mesh(t)
	always(f, "ListKeys", &readmodelv1.ListKeysResponse{
		Keys: []*recoveryv1.SigningKey{
			{
				Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, KeyId: "0123456789abcdef",
				State: recoveryv1.KeyState_KEY_STATE_VERIFYING_AFTER, Since: at(1), MadeAt: at(1), File: "join-000001.pem",
				NeededBy: "join states of nodes: n1",
				HeldBy:   []string{"recovery a", "recovery b", "nodeapi c"},
			},
			{
				Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, KeyId: "fedcba9876543210",
				State: recoveryv1.KeyState_KEY_STATE_SIGNING, Since: at(2), MadeAt: at(2), File: "join-000002-fedcba98.pem",
				HeldBy: []string{"recovery a"},
			},
		},
		Problems: []*recoveryv1.KeyProblem{{
			Service: "recovery", ReplicaId: "b",
			Problem: "join_state: join-000002-fedcba98.pem: its mode is 0644",
		}},
	})
	got := call(t, "keys", "list").wants(t, 0)
	for _, want := range []string{
		"join_state", "0123456789abcdef", "verifying_after", "recovery 2, nodeapi 1", "join states of nodes: n1", "signing",
		"recovery b", "mode is 0644",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if wide := call(t, "keys", "list", "-o", "wide").wants(t, 0); !strings.Contains(wide.out, "join-000002-fedcba98.pem") {
		t.Errorf("no file in\n%s", wide.out)
	}
	if got := call(t, "keys", "list", "-o", "json").wants(t, 0); !strings.Contains(got.out, `"replica_id": "b"`) ||
		!strings.Contains(got.out, `"held_by"`) {
		t.Errorf("JSON:\n%s", got.out)
	}
	always(f, "ListKeys", &readmodelv1.ListKeysResponse{})
	if got := call(t, "keys", "list", "-o", "json").wants(t, 0); !strings.Contains(got.out, `"problems": []`) {
		t.Errorf("without problems:\n%s", got.out)
	}
	call(t, "keys", "rotate", "join_state").wants(t, 2)              // no reason
	call(t, "keys", "rotate", "hinges", "--reason", "r").wants(t, 2) // no such kind
	always(f, "RotateKey", &readmodelv1.RotateKeyResponse{Rotation: &recoveryv1.RotateKeyResponse{
		Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, RotationId: claimID, RequestedAt: at(3),
	}})
	got = call(t, "keys", "rotate", "join_state", "--reason", "yearly", "--idempotency-key", "k1").wants(t, 0)
	if req := sent[*readmodelv1.RotateKeyRequest](f); len(req) != 1 || req[0].GetReason() != "yearly" ||
		req[0].GetIdempotencyKey() != "k1" ||
		req[0].GetKind() != recoveryv1.KeyKind_KEY_KIND_JOIN_STATE || !strings.Contains(got.out, claimID) {
		t.Errorf("%v\n%s", req, got.out)
	}
	call(t, "keys", "rotate", "assertion", "--reason", "yearly", "--dry-run").wants(t, 0)
	if req := sent[*readmodelv1.RotateKeyRequest](f); len(req) != 2 || !req[1].GetDryRun() ||
		req[1].GetIdempotencyKey() == "" {
		t.Errorf("%v", req)
	}
	got = call(t, "keys", "rotate", "services", "--reason", "yearly").wants(t, 0)
	if !strings.Contains(got.err, "cross certificate") ||
		!strings.Contains(got.err, "tls.ca_file of each replica of lifecycle") {
		t.Errorf("the steps for an issuer are not printed:\n%s", got.err)
	}
	refuse(f, "RotateKey", fault.New(commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY, "key fedc does not sign yet"))
	if got := call(t, "keys", "rotate", "join_state", "--reason", "again"); got.code == 0 ||
		!strings.Contains(got.err, "key_rotation_under_way") {
		t.Errorf("%+v", got)
	}
}
