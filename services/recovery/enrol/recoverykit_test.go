package enrol_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/sha256"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// machine is a node as its host has it: its recovery key, the recovery token that it holds, and its join state.
type machine struct {
	k         *kit
	key       crypto.Signer
	public    []byte
	node      string
	instance  string
	serial    string
	token     string
	joinState []byte
	session   string
	// correlation is what recovery told when the session was confirmed.
	correlation string
}

// enrolled returns a machine that has enrolled with an operator's token and was admitted on its certificate.
func (k *kit) enrolled(name string) *machine {
	k.t.Helper()
	m := k.machine()
	m.took(m.mustEnroll(k.bootstrap(name).Token, k.csr()))
	m.admit()
	return m
}

// machine returns a machine that has not enrolled yet.
func (k *kit) machine() *machine {
	k.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		k.t.Fatal(err)
	}
	public, err := recoverykey.Public(key)
	if err != nil {
		k.t.Fatal(err)
	}
	return &machine{k: k, key: key, public: public}
}

func (m *machine) mustEnroll(token string, csr []byte) *recoveryv1.EnrollResponse {
	m.k.t.Helper()
	resp, err := m.k.enroller.Enroll(m.k.ctx, "192.0.2.1", m.request(token, csr))
	if err != nil {
		m.k.t.Fatal(err)
	}
	return resp
}

// request returns a request with a proof of the machine's recovery key.
func (m *machine) request(token string, csr []byte) *recoveryv1.EnrollRequest {
	m.k.t.Helper()
	req := &recoveryv1.EnrollRequest{
		Token: token, Csr: csr, RecoveryPublicKey: m.public, JoinState: m.joinState, CorrelationId: "attempt-0001",
	}
	if strings.HasPrefix(token, "grt_") {
		proof, err := recoverykey.Sign(m.key, token, csr)
		if err != nil {
			m.k.t.Fatal(err)
		}
		req.RecoveryProof = proof
	}
	return req
}

// recover enrols with the machine's recovery token.
func (m *machine) recover(csr []byte) (*recoveryv1.EnrollResponse, error) {
	m.k.t.Helper()
	return m.k.enroller.Enroll(m.k.ctx, "192.0.2.1", m.request(m.token, csr))
}

// mustRecover recovers, and keeps what the answer has.
func (m *machine) mustRecover(csr []byte) *recoveryv1.EnrollResponse {
	m.k.t.Helper()
	resp, err := m.recover(csr)
	if err != nil {
		m.k.t.Fatal(err)
	}
	m.took(resp)
	return resp
}

// took keeps what an answer has.
func (m *machine) took(resp *recoveryv1.EnrollResponse) {
	m.node, m.instance, m.serial = resp.GetNodeId(), resp.GetNodeInstanceId(), m.k.serialOf(resp)
	m.token = resp.GetRecoveryToken()
}

// admit opens a session on the machine's certificate and has it admitted.
func (m *machine) admit() {
	m.k.t.Helper()
	m.session = ids.New()
	identities, err := identity.New(identity.Deps{Logger: testkit.Logger(m.k.t), Pool: m.k.pool, Keys: m.k.keys})
	if err != nil {
		m.k.t.Fatal(err)
	}
	results, _, err := identities.Open(m.k.ctx, []*recoveryv1.OpenSession{{
		SessionId: m.session, NodeId: m.node, NodeInstanceId: m.instance, Serial: m.serial, JoinState: m.joinState,
	}})
	if err != nil || results[0].GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
		m.k.t.Fatalf("open: %v %v", results, err)
	}
	m.joinState = results[0].GetJoinState()
	confirmed, _, err := identities.Confirm(m.k.ctx, []*recoveryv1.ConfirmSession{{
		SessionId: m.session, NodeId: m.node, NodeInstanceId: m.instance, Generation: results[0].GetGeneration(),
		Serial: m.serial,
	}})
	if err != nil || !confirmed[0].GetAdmitted() {
		m.k.t.Fatalf("confirm: %v %v", confirmed, err)
	}
	m.correlation = confirmed[0].GetCorrelationId()
}

// renewal returns a request for the next certificate over the machine's session.
func (m *machine) renewal(csr []byte) *recoveryv1.RenewCertificateRequest {
	return &recoveryv1.RenewCertificateRequest{
		NodeId: m.node, NodeInstanceId: m.instance, SessionId: m.session, Serial: m.serial, Csr: csr,
		RecoveryPublicKey: m.public,
	}
}

// states returns the machine's tokens with their states, as text, in the order of their issue.
func (m *machine) states() string {
	m.k.t.Helper()
	var out string
	err := m.k.pool.QueryRow(m.k.ctx, `SELECT COALESCE(string_agg(t.state ||
			CASE WHEN t.ended_by <> '' THEN ':' || t.ended_by ELSE '' END ||
			CASE WHEN t.counted_since IS NULL THEN '' ELSE '+' END, ' ' ORDER BY t.token_id), '')
		FROM recovery.recovery_token t WHERE t.node_id = $1`, m.node).Scan(&out)
	if err != nil {
		m.k.t.Fatal(err)
	}
	return out
}

// rows returns, as text, all rows of tokens, nodes and enrolments.
func (k *kit) rows() string {
	k.t.Helper()
	var out string
	err := k.pool.QueryRow(k.ctx, `SELECT
		(SELECT COALESCE(jsonb_agg(to_jsonb(t) ORDER BY t.token_id), '[]')::text FROM recovery.recovery_token t) ||
		(SELECT COALESCE(jsonb_agg(to_jsonb(i) ORDER BY i.node_id), '[]')::text FROM recovery.identity i) ||
		(SELECT COALESCE(jsonb_agg(to_jsonb(e) ORDER BY e.enrollment_id), '[]')::text FROM recovery.enrollment e)`).Scan(&out)
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

// recoveries returns how many enrolments by a recovery token are complete.
func (k *kit) recoveries() int {
	k.t.Helper()
	return k.count(`SELECT count(*) FROM recovery.enrollment WHERE state = 'done' AND recovery_token_id IS NOT NULL`)
}

// claims returns the contents of the machine's token.
func (k *kit) claims(m *machine) ca.RecoveryClaims {
	k.t.Helper()
	tokens, err := ca.NewRecoveryTokens(k.provisioner(), "mesh.test")
	if err != nil {
		k.t.Fatal(err)
	}
	claims, err := tokens.Verify(m.token)
	if err != nil {
		k.t.Fatal(err)
	}
	return claims
}

func sha(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}

// provisioner returns the key of the authority's provisioner.
func (k *kit) provisioner() *ecdsa.PrivateKey {
	k.t.Helper()
	key, ok := k.ca.ProvisionerKey().(*ecdsa.PrivateKey)
	if !ok {
		k.t.Fatal("the provisioner's key is no ECDSA key")
	}
	return key
}

// stopped records a stop of issuance between two offsets from the database's present time.
func (k *kit) stopped(from, until time.Duration) {
	k.t.Helper()
	k.exec(`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at)
		VALUES ($1, 'test', mesh.clock() + $2::interval, mesh.clock() + $3::interval)`, ids.New(), from, until)
}

// hold puts a node on hold for an alarm.
func (k *kit) hold(nodeID, alarm string) {
	k.t.Helper()
	err := pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
		r, err := identity.LockOne(ctx, tx, nodeID)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		r.Hold(alarm, "in a test", m.Now, m.Era)
		_, err = identity.Save(ctx, tx, r)
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
}
