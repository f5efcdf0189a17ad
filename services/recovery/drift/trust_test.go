package drift_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// preflight writes the row of the preflight.
func (k *kit) preflight(state, summary, incident string) {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.ca_preflight
		SET state = $1, summary = $2, incident_id = $3, since = mesh.clock(), version = version + 1`,
		state, summary, incident)
	k.must(err)
}

// TestAnUntrustedIssuerIsAVerdict checks the verdict on the control plane while the ingress refuses the authority's
// certificates: it names the side that has changed, and follows when that changes. No node gets a verdict.
func TestAnUntrustedIssuerIsAVerdict(t *testing.T) {
	const untrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	k := newKit(t)
	n := k.up()
	incident := ids.New()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	v := k.wantReasons(theFleet, untrusted)
	if v.GetSeverity() != commonv1.Severity_SEVERITY_P0 || v.GetOwner() != "control plane" ||
		!strings.HasPrefix(v.GetNextAction(), "repair the ingress") || v.GetCorrelationId() != incident ||
		len(v.GetEvidence()) != 1 || v.GetEvidence()[0].GetPart() != commonv1.DriftPart_DRIFT_PART_AUTHORITY {
		t.Errorf("%v", v)
	}
	if changed := k.round(); changed != 0 {
		t.Errorf("%d verdicts changed though nothing did", changed)
	}
	k.preflight("mismatch", "authority: it signs with another", incident)
	k.round()
	v = k.wantReasons(theFleet, untrusted, untrusted)
	if !strings.HasPrefix(v.GetNextAction(), "repair the authority") {
		t.Errorf("%v", v)
	}
	k.preflight("unknown", "", "")
	k.round()
	k.wantReasons(theFleet, untrusted, untrusted, unspecified)
	k.wantReasons(n.id())
}
