package enrol_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/recovery/identity/keyowner"
)

// TestAKeyCertifiesOneNode enrols a second node with the key of the first: an enrolled one, one that was replaced
// since, and one that is retired. The token is not used up: with a key of its own the node enrols.
func TestAKeyCertifiesOneNode(t *testing.T) {
	k := newKit(t)
	first := k.bootstrap("node-1")
	csr := k.csr()
	k.mustEnroll(first.Token, csr)
	second := k.bootstrap("node-2")
	for _, life := range []string{"active", "revoked", "retired"} {
		switch life {
		case "revoked":
			k.exec(`UPDATE recovery.serial SET state = 'revoked' WHERE node_id = $1`, first.NodeID)
		case "retired":
			k.exec(`UPDATE recovery.identity SET state = 'retired' WHERE node_id = $1`, first.NodeID)
		}
		_, err := k.enroll(second.Token, csr)
		if !fault.Has(err, commonv1.Reason_REASON_KEY_REUSE) || fault.ActionOf(err) != commonv1.Action_ACTION_RECOVER {
			t.Fatalf("the key of a node that is %s: %v", life, err)
		}
		var foreign *keyowner.OtherNodeError
		if !errors.As(err, &foreign) || foreign.NodeID != first.NodeID {
			t.Errorf("the record does not name the node: %v", err)
		}
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial`); n != 1 {
		t.Errorf("%d certificates", n)
	}
	if n := k.ca.signed.Load(); n != 1 {
		t.Errorf("%d signings", n)
	}
	k.mustEnroll(second.Token, k.csr())
}

// TestAnInstanceHasAKeyOfItsOwn registers a launched instance with the key of a node.
func TestAnInstanceHasAKeyOfItsOwn(t *testing.T) {
	k := newKit(t)
	csr := k.csr()
	k.mustEnroll(k.bootstrap("node-1").Token, csr)
	boxed := k.prepare(ids.New(), 1)
	_, err := k.enroll(boxed.secret, csr)
	k.refused(err, commonv1.Reason_REASON_KEY_REUSE)
	k.mustEnroll(boxed.secret, k.csr())
}

// TestARenewalHasAKeyOfItsOwn renews one node's certificate with the key of another.
func TestARenewalHasAKeyOfItsOwn(t *testing.T) {
	k := newKit(t)
	theirs := k.csr()
	k.mustEnroll(k.bootstrap("node-1").Token, theirs)
	resp := k.mustEnroll(k.bootstrap("node-2").Token, k.csr())
	session := ids.New()
	k.exec(`UPDATE recovery.serial SET state = 'current', ready_at = mesh.clock() WHERE node_id = $1`, resp.GetNodeId())
	k.exec(`UPDATE recovery.identity
		SET current_serial = next_serial, next_serial = '', issued = 1, confirmed = 1, confirmed_session_id = $2
		WHERE node_id = $1`, resp.GetNodeId(), session)
	req := &recoveryv1.RenewCertificateRequest{
		NodeId: resp.GetNodeId(), NodeInstanceId: resp.GetNodeInstanceId(), SessionId: session, Serial: k.serialOf(resp),
		Csr: theirs,
	}
	_, err := k.enroller.Renew(k.ctx, req)
	k.refused(err, commonv1.Reason_REASON_KEY_REUSE)
	req.Csr = k.csr()
	if _, err := k.enroller.Renew(k.ctx, req); err != nil {
		t.Errorf("with a key of its own: %v", err)
	}
}

// TestOneKeyForManyAtOnce enrols several nodes with one key at the same time: one of them gets a certificate.
func TestOneKeyForManyAtOnce(t *testing.T) {
	k := newKit(t)
	csr := k.csr()
	const nodes = 6
	errs := make([]error, nodes)
	var wg sync.WaitGroup
	for i := range nodes {
		token := k.bootstrap("node-" + string(rune('a'+i))).Token
		wg.Go(func() {
			_, errs[i] = k.replica().Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: token, Csr: csr})
		})
	}
	wg.Wait()
	enrolled := 0
	for _, err := range errs {
		switch {
		case err == nil:
			enrolled++
		case !fault.Has(err, commonv1.Reason_REASON_KEY_REUSE):
			t.Errorf("refused with %v", err)
		}
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial`); enrolled != 1 || n != 1 {
		t.Errorf("%d nodes enrolled, %d certificates", enrolled, n)
	}
}

// TestTheKeyIsFoundByItsIndex plans the look-up over many certificates.
func TestTheKeyIsFoundByItsIndex(t *testing.T) {
	k := newKit(t)
	resp := k.mustEnroll(k.bootstrap("node-1").Token, k.csr())
	k.exec(`INSERT INTO recovery.serial (serial, node_id, node_instance_id, csr_key_sha256, chain_pem, issuer_fingerprint,
		state, not_before, not_after)
		SELECT 'many-' || n, $1, $2, sha256(n::text::bytea), '', '', 'revoked', mesh.clock(), mesh.clock()
			FROM generate_series(1, 5000) n`,
		resp.GetNodeId(), resp.GetNodeInstanceId())
	if _, err := k.db.OwnerPool().Exec(k.ctx, `ANALYZE recovery.serial`); err != nil {
		t.Fatal(err)
	}
	rows, err := k.pool.Query(k.ctx,
		`EXPLAIN SELECT node_id FROM recovery.serial WHERE csr_key_sha256 = sha256('7') AND node_id <> $1`, ids.New())
	if err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.Join(plan, "\n"), "serial_key") {
		t.Errorf("plan %q", plan)
	}
}
