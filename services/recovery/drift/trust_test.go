package drift_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
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
	k.pass(time.Second)
	k.beat()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	k.wantReasons(theFleet, untrusted, untrusted, unspecified, untrusted)
}

// TestAMismatchThatLastsLocksNothing checks that a round while the verdict on the control plane stays does not wait for
// a transaction that has locked it.
func TestAMismatchThatLastsLocksNothing(t *testing.T) {
	k := newKit(t)
	k.preflight("mismatch", "ingress: replica r does not trust i", ids.New())
	k.round()
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT FROM recovery.verdict WHERE node_id = $1 FOR UPDATE`, theFleet)
		if err != nil {
			return err
		}
		round, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = k.judge.RunOnce(round)
		return err
	}))
}

// TestTwoBuildsDoNotTakeTurns checks that a mismatch which a replica of the build before ends in each of its rounds,
// for it does not know the preflight, is a verdict again after a while and not at once.
func TestTwoBuildsDoNotTakeTurns(t *testing.T) {
	const untrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	k := newKit(t)
	incident := ids.New()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	k.pass(time.Second)
	k.beat()
	since := `UPDATE recovery.ca_preflight SET state = $1, since = $2`
	var began time.Time
	k.must(k.db.OwnerPool().QueryRow(k.ctx, `SELECT since FROM recovery.ca_preflight`).Scan(&began))
	_, err := k.db.OwnerPool().Exec(k.ctx, since, "unknown", nil) // what the build before sees
	k.must(err)
	k.round()
	_, err = k.db.OwnerPool().Exec(k.ctx, since, "mismatch", began)
	k.must(err)
	for range 6 {
		k.round()
		k.wantReasons(theFleet, untrusted, unspecified)
		k.listen(5*time.Second - time.Millisecond)
	}
	k.pass(time.Second)
	k.beat()
	k.round()
	k.wantReasons(theFleet, untrusted, unspecified, untrusted)
}
