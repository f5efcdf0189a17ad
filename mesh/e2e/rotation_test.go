package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// TestTheNodeAuthorityRotatesUnderConnectedAgents exchanges the root and the issuer of nodes twice while recovery is
// killed at each point of a rotation, and a replica of nodeapi is killed while the next issuer is announced. The first
// rotation ends when the machines have renewed; the second revokes their certificates, and they recover by themselves.
// Each machine stays the node that it was.
func TestTheNodeAuthorityRotatesUnderConnectedAgents(tt *testing.T) {
	t := beside(tt, 20*time.Minute)
	c := start(t, cluster.Config{
		Nodes:  2,
		Policy: map[string]string{policy.CertificateTTLSeconds: "40"},
		// Both issuers are valid for six leases at least.
		Env: []string{"GPUAAS_FAILPOINTS=recovery.rotation.*=kill", "GPUAAS_RECOVERY_CLAIM_LEASE=2s"},
	})
	before := machines(t, c)
	security, err := c.Person(t.ctx, "", person.Session{Subject: "sam", Roles: []string{"security"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	mesh := database(t, c, pg.DatabaseMesh)
	ask := func(key string) {
		t.Helper()
		t.must("the rotation to be asked for", time.Minute, func(ctx context.Context) error {
			_, err := security.Authority.RotateAuthority(ctx, &readmodelv1.RotateAuthorityRequest{
				WithRoot: true, Reason: "test", IdempotencyKey: key,
			})
			return err
		})
	}
	enter := func(phase recoveryv1.RotationPhase, limit time.Duration) *recoveryv1.GetTrustResponse {
		t.Helper()
		began := time.Now()
		var is *recoveryv1.GetTrustResponse
		t.must("the phase "+names.Of(phase), limit, func(ctx context.Context) error {
			forget(t, c, mesh) // recovery kills itself
			answer, err := c.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
			if is = answer.GetTrust(); err == nil && is.GetRotation().GetPhase() != phase {
				err = fmt.Errorf("the rotation is %v", is.GetRotation())
			}
			return err
		})
		t.Logf("%s after %.1f s", names.Of(phase), time.Since(began).Seconds())
		return is
	}
	ask("first")
	killAll(t, c, mesh, killedOf(c.NodeAPI...)...)
	first := enter(recoveryv1.RotationPhase_ROTATION_PHASE_BOTH_VALID, 3*time.Minute)
	if len(first.GetIssuers()) != 1 {
		t.Errorf("replicas are sent %v", first.GetIssuers())
	}
	// Certificates that the machines get from now on are valid until they are revoked.
	t.must("longer lives", time.Minute, func(ctx context.Context) error {
		_, err := c.Client.Command.SetPolicy(ctx, &readmodelv1.SetPolicyRequest{
			Key: policy.CertificateTTLSeconds, Value: "600", Reason: "test", AcknowledgeWeakening: true,
		})
		return err
	})
	enter(recoveryv1.RotationPhase_ROTATION_PHASE_DONE, 6*time.Minute)
	healed(t, c, before)
	ask("second")
	second := enter(recoveryv1.RotationPhase_ROTATION_PHASE_BOTH_VALID, 3*time.Minute)
	t.must("the former issuer to be retired", time.Minute, func(ctx context.Context) error {
		_, err := security.Authority.RepairTrust(ctx, &readmodelv1.RepairTrustRequest{
			RootFingerprint: second.GetRotation().GetFormerFingerprint(), Reason: "test", Withdraw: true,
		})
		return err
	})
	done := enter(recoveryv1.RotationPhase_ROTATION_PHASE_DONE, 4*time.Minute)
	healed(t, c, before)
	if issuers := done.GetIssuers(); len(issuers) != 1 ||
		!slices.Contains(done.GetAuthority().GetRootFingerprints(), issuers[0].GetFingerprint()) {
		t.Errorf("replicas are sent %v, and the authority is %v", issuers, done.GetAuthority())
	}
	for _, issuer := range column(t, mesh, `SELECT issuer_fingerprint FROM recovery.serial
		WHERE state IN ('current', 'next')`) {
		if issuer != done.GetRotation().GetNextFingerprint() {
			t.Errorf("a certificate of %s counts", issuer)
		}
	}
	states := column(t, mesh, `SELECT DISTINCT state || ' ' || alarm FROM recovery.identity WHERE state <> 'retired'`)
	if !slices.Equal(states, []string{"active "}) {
		t.Errorf("the machines are %q", states)
	}
	points, _ := hits(t, c)
	want := slices.DeleteFunc(slices.Sorted(maps.Keys(elsewhere)),
		func(point string) bool { return !strings.HasPrefix(point, "recovery.rotation.") })
	for _, point := range want {
		if points[point] == 0 {
			t.Errorf("recovery was not killed at %s", point)
		}
	}
	t.Logf("killed at %v", slices.Sorted(maps.Keys(points)))
}
