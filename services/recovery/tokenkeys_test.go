package recovery_test

import (
	"context"
	"crypto"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
)

// host is a machine that enrols, renews and recovers over the real ports of any replica.
type host struct {
	ctx      context.Context
	enrol    []recoveryv1connect.EnrollmentServiceClient
	sessions []recoveryv1connect.SessionServiceClient

	key                    crypto.Signer
	public                 []byte
	node, instance, serial string
	session                string
	joinState              []byte
	token                  string
	calls                  int
	last                   *recoveryv1.EnrollRequest // of the last enrolment
}

// request returns a request for a certificate of a new key, with the proof that a recovery token needs.
func (h *host) request(token string) (*recoveryv1.EnrollRequest, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		return nil, err
	}
	req := &recoveryv1.EnrollRequest{Token: token, Csr: csr, RecoveryPublicKey: h.public, JoinState: h.joinState}
	if strings.HasPrefix(token, "grt_") {
		req.RecoveryProof, err = recoverykey.Sign(h.key, token, csr)
	}
	return req, err
}

// enroll enrols with a token and opens a session on what it gets.
func (h *host) enroll(token string) error {
	req, err := h.request(token)
	if err != nil {
		return err
	}
	h.calls, h.last = h.calls+1, req
	answer, err := h.enrol[h.calls%len(h.enrol)].Enroll(h.ctx, req)
	if err != nil {
		return fmt.Errorf("enrol: %w", err)
	}
	h.node, h.instance = answer.GetNodeId(), answer.GetNodeInstanceId()
	return h.opens(answer.GetCertificateChainPem(), answer.GetRecoveryToken())
}

// renew renews over the session and opens the next one on what it gets.
func (h *host) renew() error {
	req, err := h.request("")
	if err != nil {
		return err
	}
	h.calls++
	answer, err := h.sessions[h.calls%len(h.sessions)].RenewCertificate(h.ctx, &recoveryv1.RenewCertificateRequest{
		NodeId: h.node, NodeInstanceId: h.instance, SessionId: h.session, Serial: h.serial, Csr: req.GetCsr(),
		RecoveryPublicKey: h.public,
	})
	if err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	return h.opens(answer.GetCertificateChainPem(), answer.GetRecoveryToken())
}

func (h *host) opens(chain []byte, token string) error {
	certs, err := pki.DecodeCertificates(chain)
	if err != nil || !strings.HasPrefix(token, "grt_") {
		return fmt.Errorf("no certificate or no token: %w", err)
	}
	h.serial, h.token, h.session = pki.SerialString(certs[0].SerialNumber), token, ids.New()
	to := h.sessions[h.calls%len(h.sessions)]
	opened, err := to.OpenSessions(h.ctx, &recoveryv1.OpenSessionsRequest{Sessions: []*recoveryv1.OpenSession{{
		SessionId: h.session, NodeId: h.node, NodeInstanceId: h.instance, Serial: h.serial, JoinState: h.joinState,
	}}})
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	welcome := opened.GetResults()[0]
	if welcome.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
		return fmt.Errorf("open: %v", welcome)
	}
	h.joinState = welcome.GetJoinState()
	confirmed, err := to.ConfirmSessions(h.ctx, &recoveryv1.ConfirmSessionsRequest{
		Sessions: []*recoveryv1.ConfirmSession{{
			SessionId: h.session, NodeId: h.node, NodeInstanceId: h.instance, Generation: welcome.GetGeneration(),
			Serial: h.serial,
		}},
	})
	if err != nil || !confirmed.GetResults()[0].GetAdmitted() {
		return fmt.Errorf("confirm: %v %w", confirmed, err)
	}
	return nil
}

// beside runs another replica on the same directories.
func (m *mesh) beside() *recovery.Service {
	m.t.Helper()
	registry, err := obs.NewRegistry()
	if err != nil {
		m.t.Fatal(err)
	}
	service, err := recovery.New(m.ctx, recovery.Deps{Logger: testkit.Logger(m.t), Registry: registry}, m.cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(m.ctx)
	done := make(chan error, 1)
	go func() { done <- service.Run(ctx) }()
	m.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			m.t.Errorf("the other replica: %v", err)
		}
	})
	return service
}

// hosts returns machines that have enrolled and use all replicas in turn.
func (m *mesh) hosts(count int, replicas ...*recovery.Service) []*host {
	m.t.Helper()
	machine := m.authorities.Client(m.t, "recovery", nil)
	nodeapi, _ := m.client("nodeapi")
	console, url := m.client("readmodel")
	people := recoveryv1connect.NewIdentityServiceClient(console, url,
		calls.Options(calls.Config{Asserter: m.asserter})...)
	out := make([]*host, count)
	for i := range out {
		key, err := pki.NewKey()
		if err != nil {
			m.t.Fatal(err)
		}
		h := &host{ctx: m.ctx, key: key}
		if h.public, err = recoverykey.Public(key); err != nil {
			m.t.Fatal(err)
		}
		for _, r := range replicas {
			h.enrol = append(h.enrol, recoveryv1connect.NewEnrollmentServiceClient(machine, "https://"+r.EnrollAddr(),
				calls.Options(calls.Config{})...))
			h.sessions = append(h.sessions, recoveryv1connect.NewSessionServiceClient(nodeapi, "https://"+r.Addr(),
				calls.Options(calls.Config{})...))
		}
		bundle, err := people.IssueBootstrap(m.asPerson("operator"),
			&recoveryv1.IssueBootstrapRequest{Name: fmt.Sprintf("node-%d", i)})
		if err != nil {
			m.t.Fatal(err)
		}
		if err := h.enroll(bundle.GetToken()); err != nil {
			m.t.Fatal(err)
		}
		out[i] = h
	}
	return out
}

// tokenKeys returns the keys of recovery tokens, the oldest first.
func (m *mesh) tokenKeys(people recoveryv1connect.KeyServiceClient) []*recoveryv1.SigningKey {
	m.t.Helper()
	answer, err := people.ListKeys(m.asPerson("viewer"), &recoveryv1.ListKeysRequest{})
	if err != nil {
		m.t.Fatal(err)
	}
	return slices.DeleteFunc(answer.GetKeys(), func(k *recoveryv1.SigningKey) bool {
		return k.GetKind() != recoveryv1.KeyKind_KEY_KIND_RECOVERY_TOKEN
	})
}

// Scenario: the key of recovery tokens is rotated while machines renew and recover at two replicas. None is refused:
// not by the replica that learns of the new key later, nor one that was away and returns with a token of the former
// key. The former key is retired when no machine needs it, and what it signed is refused from then on.
func TestTheKeyOfRecoveryTokensRotatesUnderLoad(t *testing.T) {
	m := start(t, func(c *recovery.Config) { c.EnrollPerTokenSecond, c.EnrollPerTokenBurst = 1000, 1000 })
	other := m.beside()
	pool := m.db.Pool(pg.RoleRecovery)
	const recoveries = 60
	if err := policyadmin.Apply(m.ctx, pool,
		map[string]string{policy.RecoveryAttemptsPerHour: strconv.Itoa(recoveries)}, "test", "many recoveries"); err != nil {
		t.Fatal(err)
	}
	console, url := m.client("readmodel")
	people := recoveryv1connect.NewKeyServiceClient(console, url, calls.Options(calls.Config{Asserter: m.asserter})...)
	all := m.hosts(4, m.service, other)
	away, busy := all[0], all[1:]
	for _, replica := range away.enrol { // each reads the policy in its own time
		testkit.Eventually(t, testkit.Patience, func() error {
			answer, err := replica.Enroll(m.ctx, away.last)
			if err == nil && answer.GetPolicy().GetRecoveryAttemptsPerHour() != recoveries {
				err = fmt.Errorf("the policy is %v", answer.GetPolicy())
			}
			return err
		})
	}
	var ring string
	if err := pool.QueryRow(m.ctx, `SELECT DISTINCT key_id FROM recovery.recovery_token`).Scan(&ring); err != nil {
		t.Fatalf("one key has signed all tokens: %v", err)
	}
	var stop atomic.Bool
	var done atomic.Int64
	var running sync.WaitGroup
	for _, h := range busy {
		running.Go(func() {
			pace := time.NewTicker(200 * time.Millisecond) // some 15 renewals a second: the processors are left to others
			defer pace.Stop()
			for recovered := 0; !stop.Load(); done.Add(1) {
				<-pace.C
				err := h.renew()
				if recovered < 50 && err == nil {
					recovered++
					err = h.enroll(h.token)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	more := func() {
		t.Helper()
		from := done.Load()
		testkit.Eventually(t, testkit.Patience, func() error {
			if done.Load() < from+int64(4*len(busy)) {
				return fmt.Errorf("%d rounds", done.Load()-from)
			}
			return nil
		})
	}
	wants := func(what string, states ...recoveryv1.KeyState) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			var got []recoveryv1.KeyState
			keys := m.tokenKeys(people)
			for _, k := range keys {
				got = append(got, k.GetState())
			}
			if !slices.Equal(got, states) {
				return fmt.Errorf("%s: the keys are %v", what, keys)
			}
			return nil
		})
	}
	const signing, after, retired = recoveryv1.KeyState_KEY_STATE_SIGNING, recoveryv1.KeyState_KEY_STATE_VERIFYING_AFTER,
		recoveryv1.KeyState_KEY_STATE_RETIRED
	more()
	if _, err := people.RotateKey(m.asPerson("security"), &recoveryv1.RotateKeyRequest{
		Kind: recoveryv1.KeyKind_KEY_KIND_RECOVERY_TOKEN, Reason: "yearly", IdempotencyKey: "r1",
	}); err != nil {
		t.Fatal(err)
	}
	wants("the next key signs", after, signing)
	more()
	passes := func() {
		if _, err := m.db.OwnerPool().Exec(m.ctx, `UPDATE mesh.signing_key SET state_at = state_at - make_interval(secs => $1)
			WHERE kind = 'recovery_token' AND state = 'verifying_after'`, keyset.RecoveryToken.Overlap().Seconds()); err != nil {
			t.Fatal(err)
		}
	}
	passes()
	testkit.Eventually(t, testkit.Patience, func() error {
		if keys := m.tokenKeys(people); !strings.HasSuffix(keys[0].GetNeededBy(), " node-0") {
			return fmt.Errorf("the keys are %v", keys)
		}
		return nil
	})
	old := away.token
	if err := away.enroll(old); err != nil {
		t.Fatalf("a machine that was away: %v", err)
	}
	repeated := away.last
	wants("no machine needs the former key", retired, signing)
	more()
	stop.Store(true)
	running.Wait()
	// A replica answers the repetition as before until it has read that the key is retired.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := away.enrol[0].Enroll(m.ctx, repeated); !fault.Has(err, commonv1.Reason_REASON_TOKEN_EXPIRED) {
			return fmt.Errorf("with a token of the retired key: %w", err)
		}
		return nil
	})
	var left int
	if err := pool.QueryRow(m.ctx, `SELECT count(*) FROM recovery.recovery_token WHERE state = 'issued' AND key_id = $1`,
		ring).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d tokens of the retired key: %v", left, err)
	}
	t.Logf("%d rounds", done.Load())
}
