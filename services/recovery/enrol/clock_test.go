package enrol_test

import (
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestCertificatesHaveTheDatabasesClock: the clock of the replica that requests a certificate may differ from the
// database's, by which nodeapi checks the certificate (R11). The certificate must neither begin later nor end at
// another time.
func TestCertificatesHaveTheDatabasesClock(t *testing.T) {
	const life = 8 * time.Hour
	k := newKit(t)
	now := func() time.Time {
		at, _, err := testkit.Clock(k.ctx, k.pool)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	for name, ahead := range map[string]time.Duration{"behind": -45 * time.Minute, "ahead": 45 * time.Minute} {
		testkit.SetClockOffset(k.db, ahead)
		from := now()
		node := k.mustEnroll(k.bootstrap("node-"+name).Token, k.csr())
		chains := map[string][]byte{"enrolment": node.GetCertificateChainPem()}
		session := ids.New()
		k.exec(`UPDATE recovery.serial SET state = 'current', ready_at = mesh.clock() WHERE node_id = $1`, node.GetNodeId())
		k.exec(`UPDATE recovery.identity
			SET current_serial = next_serial, next_serial = '', issued = 1, confirmed = 1, confirmed_session_id = $2
			WHERE node_id = $1`, node.GetNodeId(), session)
		renewed, err := k.enroller.Renew(k.ctx, &recoveryv1.RenewCertificateRequest{
			SessionId: session, NodeId: node.GetNodeId(), NodeInstanceId: node.GetNodeInstanceId(), Serial: k.serialOf(node),
			Csr: k.csr(),
		})
		if err != nil {
			t.Fatal(err)
		}
		chains["renewal"] = renewed.ChainPEM
		to := now()
		for what, chain := range chains {
			leaf := k.leaf(chain)
			begins, ends := leaf.NotBefore.Add(pki.Backdate), leaf.NotAfter.Add(-life)
			for edge, at := range map[string]time.Time{"begins": begins, "ends": ends} {
				if at.Before(from.Add(-time.Second)) || at.After(to.Add(time.Second)) {
					t.Errorf("%s with the database's clock %s ahead: the certificate %s by a clock that is %s from it", what, ahead,
						edge, at.Sub(to))
				}
			}
		}
	}
}
