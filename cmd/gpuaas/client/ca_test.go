package client_test

import (
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

func TestCA(t *testing.T) {
	f := mesh(t)
	preflight := &recoveryv1.CaPreflight{
		State: recoveryv1.PreflightState_PREFLIGHT_STATE_MISMATCH, Since: at(1),
		FailingSide: recoveryv1.TrustSide_TRUST_SIDE_INGRESS, Summary: "ingress: it does not trust the issuer",
		NextAction: "repair the ingress", IncidentId: claimID,
	}
	ingress := []*recoveryv1.IngressTrust{{
		ReplicaId: "r1", Address: "127.0.0.1:9000", ClientCaFingerprints: []string{strings.Repeat("ab", 32)},
		Handshake: recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_REFUSED, Detail: "unknown certificate authority",
	}}
	always(f, "GetTrust", &readmodelv1.GetTrustResponse{Trust: &recoveryv1.GetTrustResponse{
		Preflight: preflight, Ingress: ingress,
		Authority: &recoveryv1.AuthorityTrust{IssuerFingerprint: strings.Repeat("cd", 32), IssuerName: "mesh intermediate"},
	}})
	got := call(t, "ca", "status").wants(t, 0)
	for _, want := range []string{
		"mismatch", "ingress", "repair the ingress", "mesh intermediate", strings.Repeat("cd", 32), "r1", "127.0.0.1:9000",
		strings.Repeat("ab", 8), "no",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if got := call(t, "ca", "status", "-o", "json").wants(t, 0); !strings.Contains(got.out, `"failing_side": "ingress"`) {
		t.Errorf("JSON:\n%s", got.out)
	}
	rotation := &recoveryv1.AuthorityRotation{
		RotationId: claimID, Phase: recoveryv1.RotationPhase_ROTATION_PHASE_BOTH_VALID, WithRoot: true,
		FormerFingerprint: strings.Repeat("11", 32), NextFingerprint: strings.Repeat("22", 32),
		WaitsFor: "certificates of the former issuer",
	}
	issuers := []*recoveryv1.TrustedIssuer{{
		Fingerprint: strings.Repeat("33", 32), Name: "mesh root", Origin: "rotation", Reason: "yearly", By: "ada",
	}}
	always(f, "GetTrust", &readmodelv1.GetTrustResponse{Trust: &recoveryv1.GetTrustResponse{
		Preflight: preflight, Rotation: rotation, Issuers: issuers,
	}})
	got = call(t, "ca", "status").wants(t, 0)
	for _, want := range []string{
		"both_valid", "certificates of the former issuer", "mesh root", strings.Repeat("33", 32),
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	always(f, "RotateAuthority", &readmodelv1.RotateAuthorityResponse{Rotation: rotation})
	got = call(t, "ca", "rotate", "--with-root", "--reason", "yearly").wants(t, 0)
	if !strings.Contains(got.out, claimID) {
		t.Errorf("%s", got.out)
	}
	if req := sent[*readmodelv1.RotateAuthorityRequest](f); len(req) != 1 || !req[0].GetWithRoot() ||
		req[0].GetIdempotencyKey() == "" {
		t.Errorf("asked for %v", req)
	}
	always(f, "RepairTrust", &readmodelv1.RepairTrustResponse{Issuers: issuers})
	call(t, "ca", "rotate", "--retire", "--reason", "copied").wants(t, 0)
	got = call(t, "ca", "repair", "--root", strings.Repeat("33", 32), "--reason", "swapped").wants(t, 0)
	if req := sent[*readmodelv1.RepairTrustRequest](f); len(req) != 2 || !req[0].GetWithdraw() ||
		req[0].GetRootFingerprint() != rotation.GetFormerFingerprint() || req[1].GetWithdraw() ||
		!strings.Contains(got.out, "mesh root") {
		t.Errorf("asked for %v\n%s", req, got.out)
	}
	always(f, "RunPreflight", &readmodelv1.RunPreflightResponse{Check: &recoveryv1.RunPreflightResponse{
		Result: recoveryv1.PreflightState_PREFLIGHT_STATE_MISMATCH, Ingress: ingress, Preflight: preflight,
	}})
	got = call(t, "ca", "preflight").wants(t, 0)
	if !strings.Contains(got.out, "refused") || !strings.Contains(got.out, "unknown certificate authority") {
		t.Errorf("%s", got.out)
	}
}
