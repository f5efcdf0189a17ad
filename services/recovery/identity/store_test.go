package identity_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
)

// bench is a database with identities in it.
type bench struct {
	t          testing.TB
	ctx        context.Context
	db         *testkit.Database
	pool       *pgxpool.Pool
	keys       *joinstate.Keys
	identities *identity.Identities
	notices    *events.Signal
	wake       *events.Signal // of the sequencer
	changed    *events.Signal // of the readers of the authority view
}

func newBench(t *testing.T) *bench {
	t.Helper()
	testkit.IO(t)
	return makeBench(t)
}

func makeBench(tb testing.TB) *bench {
	tb.Helper()
	db := testkit.DB(tb)
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	keys, err := joinstate.NewKeys(private)
	if err != nil {
		tb.Fatal(err)
	}
	b := &bench{
		t: tb, ctx: testkit.Context(tb), db: db, pool: db.Pool(pg.RoleRecovery), keys: keys,
		notices: &events.Signal{}, wake: &events.Signal{}, changed: &events.Signal{},
	}
	b.identities, err = identity.New(identity.Deps{
		Logger: testkit.Logger(tb), Pool: b.pool, Keys: keys, Notices: b.notices, Wake: b.wake, Changed: b.changed,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// node is an enrolled node with one certificate, as an agent has it.
type node struct {
	id, instance, serial string
	joinState            []byte
}

func (b *bench) tx(fn func(tx pgx.Tx) error) {
	b.t.Helper()
	if err := pg.InTx(b.ctx, b.pool, func(_ context.Context, tx pgx.Tx) error { return fn(tx) }); err != nil {
		b.t.Fatal(err)
	}
}

func certificate(serial string) identity.Serial {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	return identity.Serial{
		Serial: serial, KeySHA256: key, ChainPEM: []byte("chain"), IssuerFingerprint: "issuer",
		NotBefore: time.Now(), NotAfter: time.Now().Add(8 * time.Hour),
	}
}

func (b *bench) enrolled(name string) *node {
	b.t.Helper()
	n := &node{id: ids.New(), instance: ids.New(), serial: fmt.Sprintf("%x", []byte(ids.New()[24:]))}
	b.tx(func(tx pgx.Tx) error {
		r := &identity.Record{NodeID: n.id, Name: name}
		if _, err := identity.Insert(b.ctx, tx, r); err != nil {
			return err
		}
		m, err := identity.ReadMoment(b.ctx, tx)
		if err != nil {
			return err
		}
		if err := identity.Activate(b.ctx, tx, r, n.instance, certificate(n.serial), "test", "enrolled", m); err != nil {
			return err
		}
		_, err = identity.Save(b.ctx, tx, r)
		return err
	})
	return n
}

// offered issues another certificate into the next slot.
func (b *bench) offered(n *node) string {
	b.t.Helper()
	serial := fmt.Sprintf("%x", []byte(ids.New()[24:]))
	b.tx(func(tx pgx.Tx) error {
		r, err := identity.LockOne(b.ctx, tx, n.id)
		if err != nil {
			return err
		}
		if err := identity.Offer(b.ctx, tx, r, certificate(serial)); err != nil {
			return err
		}
		_, err = identity.Save(b.ctx, tx, r)
		return err
	})
	return serial
}

// written returns the transaction that has written the row of a certificate last.
func (b *bench) written(serial string) string {
	b.t.Helper()
	var xmin string
	err := b.pool.QueryRow(b.ctx, `SELECT xmin::text FROM recovery.serial WHERE serial = $1`, serial).Scan(&xmin)
	if err != nil {
		b.t.Fatal(err)
	}
	return xmin
}

func (b *bench) hello(n *node) *recoveryv1.OpenSession {
	return &recoveryv1.OpenSession{
		SessionId: ids.New(), NodeId: n.id, NodeInstanceId: n.instance, Serial: n.serial,
		JoinState: n.joinState,
	}
}

func (b *bench) open(o *recoveryv1.OpenSession) *recoveryv1.OpenResult {
	b.t.Helper()
	results, _, err := b.identities.Open(b.ctx, []*recoveryv1.OpenSession{o})
	if err != nil {
		b.t.Fatal(err)
	}
	return results[0]
}

func (b *bench) confirm(o *recoveryv1.OpenSession, generation int64) *recoveryv1.ConfirmResult {
	b.t.Helper()
	results, _, err := b.identities.Confirm(b.ctx, []*recoveryv1.ConfirmSession{{
		SessionId: o.GetSessionId(), NodeId: o.GetNodeId(), NodeInstanceId: o.GetNodeInstanceId(), Generation: generation,
		Serial: o.GetSerial(),
	}})
	if err != nil {
		b.t.Fatal(err)
	}
	return results[0]
}

// admit opens and confirms, storing the join state as an agent does.
func (b *bench) admit(n *node) *recoveryv1.OpenSession {
	b.t.Helper()
	o := b.hello(n)
	opened := b.open(o)
	if opened.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
		b.t.Fatalf("open: %v", opened)
	}
	n.joinState = opened.GetJoinState()
	if got := b.confirm(o, opened.GetGeneration()); !got.GetAdmitted() {
		b.t.Fatalf("confirm: %v", got)
	}
	return o
}

func (b *bench) get(n *node) *identity.Record {
	b.t.Helper()
	var r *identity.Record
	err := pg.InTx(b.ctx, b.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		r, err = identity.LockOne(ctx, tx, n.id)
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

func TestOpenIsIdempotentOnTheSession(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	o := b.hello(n)
	first := b.open(o)
	second := b.open(o)
	if first.GetGeneration() != 1 || second.GetGeneration() != 1 ||
		string(first.GetJoinState()) != string(second.GetJoinState()) {
		t.Fatalf("the same question got %v and %v", first, second)
	}
	if third := b.open(b.hello(n)); third.GetGeneration() != 2 {
		t.Fatalf("another session got generation %d", third.GetGeneration())
	}
	if got := b.confirm(o, 1); got.GetAdmitted() ||
		got.GetDenial().GetReason() != commonv1.Reason_REASON_SESSION_SUPERSEDED {
		t.Fatalf("an overtaken Ready: %v", got)
	}
}

func TestOneTransactionForABatch(t *testing.T) {
	b := newBench(t)
	var batch []*recoveryv1.OpenSession
	for i := range 20 {
		batch = append(batch, b.hello(b.enrolled(fmt.Sprintf("node-%02d", i))))
	}
	unknown := b.hello(&node{id: ids.New(), instance: ids.New(), serial: "ff"})
	batch = append(batch, unknown, batch[0])
	results, moment, err := b.identities.Open(b.ctx, batch)
	if err != nil {
		t.Fatal(err)
	}
	if moment.Now.IsZero() {
		t.Error("no server time")
	}
	for i, r := range results[:20] {
		if r.GetSessionId() != batch[i].GetSessionId() || r.GetGeneration() != 1 {
			t.Errorf("result %d: %v", i, r)
		}
	}
	if got := results[20].GetDenial().GetReason(); got != commonv1.Reason_REASON_IDENTITY_UNKNOWN {
		t.Errorf("unknown node: %v", got)
	}
	if results[21].GetGeneration() != 1 {
		t.Errorf("the same session twice in a batch: %v", results[21])
	}
}

func TestSerialsPromoteAtReady(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	first := n.serial
	lost := b.offered(n)
	next := b.offered(n)
	if r := b.get(n); r.CurrentSerial != first || r.NextSerial != next {
		t.Fatalf("current %s next %s", r.CurrentSerial, r.NextSerial)
	}
	// Offer and confirm: the present one works until a session is ready on the next. Its row, which has the whole chain,
	// is not written again by each session.
	before := b.written(first)
	b.admit(n)
	if after := b.written(first); after != before {
		t.Errorf("a session on the current certificate wrote its row: transaction %s, then %s", before, after)
	}
	n.serial = lost
	if got := b.open(b.hello(n)).GetDenial().GetReason(); got != commonv1.Reason_REASON_SERIAL_SUPERSEDED {
		t.Fatalf("issued and never used: %v", got)
	}
	n.serial = next
	b.admit(n)
	if r := b.get(n); r.CurrentSerial != next || r.NextSerial != "" {
		t.Fatalf("current %s next %q", r.CurrentSerial, r.NextSerial)
	}
	old := *n
	old.serial = first
	if got := b.open(b.hello(&old)).GetDenial().GetReason(); got != commonv1.Reason_REASON_SERIAL_UNKNOWN &&
		got != commonv1.Reason_REASON_SERIAL_SUPERSEDED {
		t.Fatalf("a replaced certificate: %v", got)
	}
	foreign := *n
	foreign.serial = "0badcafe"
	foreign.joinState = nil
	if got := b.open(b.hello(&foreign)).GetDenial().GetReason(); got != commonv1.Reason_REASON_SERIAL_UNKNOWN {
		t.Fatalf("an orphan certificate: %v", got)
	}
}

func TestCopyIsFound(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	copied := *n
	b.admit(n)
	paused := b.hello(&copied)
	if got := b.open(paused); got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
		t.Fatalf("an old generation: %v", got)
	}
	report := func(o *recoveryv1.OpenSession, answered bool) commonv1.Reason {
		d, err := b.identities.ReportChallenge(b.ctx, &recoveryv1.ReportChallengeRequest{
			SessionId: o.GetSessionId(), NodeId: o.GetNodeId(), NodeInstanceId: o.GetNodeInstanceId(), Answered: answered,
		})
		if err != nil {
			t.Fatal(err)
		}
		return d.GetReason()
	}
	if got := report(paused, false); got != commonv1.Reason_REASON_SESSION_SUPERSEDED || b.get(n).Alarm != "" {
		t.Fatalf("an unanswered challenge: %v, alarm %q", got, b.get(n).Alarm)
	}
	// A second report with another answer changes nothing.
	if got := report(paused, true); got != commonv1.Reason_REASON_SESSION_SUPERSEDED {
		t.Fatalf("told twice: %v", got)
	}
	live := b.hello(&copied)
	b.open(live)
	before := b.get(n)
	if got := report(live, true); got != commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED {
		t.Fatalf("an answered challenge: %v", got)
	}
	r := b.get(n)
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD || r.Alarm != identity.AlarmClone ||
		r.FenceEpoch <= before.FenceEpoch ||
		r.AuthoritySeq <= before.AuthoritySeq || r.ConfirmedSession != "" {
		t.Fatalf("after the alarm: %+v", r)
	}
	if got := b.open(b.hello(n)).GetDenial().GetReason(); got != commonv1.Reason_REASON_IDENTITY_HELD {
		t.Fatalf("the other holder: %v", got)
	}
	// A report about a challenge that was never sent is refused.
	if _, err := b.identities.ReportChallenge(b.ctx, &recoveryv1.ReportChallengeRequest{
		SessionId: ids.New(), NodeId: n.id, NodeInstanceId: n.instance, Answered: true,
	}); fault.ReasonOf(err) != commonv1.Reason_REASON_SESSION_UNKNOWN {
		t.Fatalf("an invented challenge: %v", err)
	}
}

// TestTheWayBackOfACopyIsANewIdentity: only the security role reactivates a node that was copied. Both holders stay out
// from then on, and raise no alarm; an enrolment brings the node back as another node instance, beside which they stay
// out too.
func TestTheWayBackOfACopyIsANewIdentity(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	copied := *n
	b.admit(n)
	spare := b.offered(n)
	late := b.hello(n)
	o := b.hello(&copied)
	b.open(o)
	if _, err := b.identities.ReportChallenge(b.ctx, &recoveryv1.ReportChallengeRequest{
		SessionId: o.GetSessionId(), NodeId: n.id, NodeInstanceId: n.instance, Answered: true,
	}); err != nil {
		t.Fatal(err)
	}
	reactivate := func(roles ...string) error {
		_, _, err := b.identities.Change(b.ctx, n.id, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
			"the copy is destroyed", identity.Actor{Subject: "ada", Roles: roles})
		return err
	}
	before := b.get(n)
	if err := reactivate("operator"); !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Fatalf("an operator lets a copy in: %v", err)
	}
	if r := b.get(n); before.Alarm != identity.AlarmClone || r.Alarm != before.Alarm || r.Version != before.Version {
		t.Fatalf("after the refusal: %+v", r)
	}
	if err := reactivate(verbs.RoleSecurity); err != nil {
		t.Fatal(err)
	}
	r := b.get(n)
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.Alarm != "" || r.CurrentSerial != "" ||
		r.InstanceID == n.instance || r.NextSerial != "" || !r.CertificateEnds.IsZero() || r.FenceEpoch <= before.FenceEpoch {
		t.Fatalf("after the reactivation: %+v", r)
	}
	// A certificate that a restored database has lost would be taken over, if its node instance were still the node's.
	forgotten := node{id: n.id, instance: n.instance, serial: "abcd"}
	var err error
	forgotten.joinState, err = b.keys.Sign(joinstate.State{
		NodeID: n.id, NodeInstanceID: n.instance, Generation: r.Issued, Serial: forgotten.serial,
	})
	if err != nil {
		t.Fatal(err)
	}
	out := func() {
		t.Helper()
		second := *n
		second.serial = spare
		for what, hello := range map[string]*recoveryv1.OpenSession{
			"the copy": b.hello(&copied), "the machine": b.hello(n), "on its next certificate": b.hello(&second),
			"a call from before": late, "on a certificate that was forgotten": b.hello(&forgotten),
		} {
			if got := b.open(hello).GetDenial().GetReason(); got != commonv1.Reason_REASON_SERIAL_UNKNOWN {
				t.Errorf("%s: %v", what, got)
			}
		}
		if alarm := b.get(n).Alarm; alarm != "" {
			t.Errorf("an alarm: %s", alarm)
		}
	}
	out()
	anew := node{id: n.id, instance: ids.New(), serial: newSerial()}
	b.tx(func(tx pgx.Tx) error {
		m, err := identity.ReadMoment(b.ctx, tx)
		if err != nil {
			return err
		}
		r, err := identity.LockOne(b.ctx, tx, n.id)
		if err != nil {
			return err
		}
		if err := identity.Activate(b.ctx, tx, r, anew.instance, certificate(anew.serial), "test", "bundle", m); err != nil {
			return err
		}
		_, err = identity.Save(b.ctx, tx, r)
		return err
	})
	b.admit(&anew)
	out()
	b.admit(&anew)
}

func TestLostJoinState(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	n.joinState = append([]byte(nil), n.joinState...)
	n.joinState[len(n.joinState)-1] ^= 1
	o := b.hello(n)
	if got := b.open(o); got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
		t.Fatalf("badly signed: %v", got)
	}
	d, err := b.identities.ReportChallenge(b.ctx, &recoveryv1.ReportChallengeRequest{
		SessionId: o.GetSessionId(), NodeId: n.id, NodeInstanceId: n.instance, Answered: true,
	})
	if err != nil || d.GetReason() != commonv1.Reason_REASON_JOIN_STATE_LOST {
		t.Fatalf("%v %v", d, err)
	}
	if r := b.get(n); r.Alarm != identity.AlarmJoinState ||
		r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		t.Fatalf("%+v", r)
	}
	if _, _, err := b.identities.Change(b.ctx, n.id, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, "disk replaced",
		identity.Actor{Subject: "ada"}); err != nil {
		t.Fatal(err)
	}
	n.joinState = nil
	b.admit(n)
}

func TestRollbackIsAdopted(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	ahead, err := b.keys.Sign(joinstate.State{
		NodeID: n.id, NodeInstanceID: n.instance, Generation: 41, Serial: "abcd",
		Era: 0,
	})
	if err != nil {
		t.Fatal(err)
	}
	n.joinState, n.serial = ahead, "abcd" // issued in the lost history
	o := b.hello(n)
	if got := b.open(o); got.GetGeneration() != 42 {
		t.Fatalf("ahead of the database: %v", got)
	}
	if got := b.confirm(o, 42); !got.GetAdmitted() {
		t.Fatalf("confirm: %v", got)
	}
	if r := b.get(n); r.Confirmed != 42 || r.CurrentSerial != "abcd" || r.Alarm != "" {
		t.Fatalf("%+v", r)
	}
}

// Scenario: a certificate was issued before the backup and came into use after it. The database is restored, and a
// replica that was paused since before the backup executes a renewal over the session that counts again, which replaces
// the certificate before its node is back.
func TestACertificateReplacedAfterARestoreIsAdopted(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	first := n.serial
	used := b.offered(n)
	late := b.offered(n) // supersedes the one that was used
	n.serial = used
	b.shows(n, 9, 0)
	o := b.hello(n)
	welcome := b.open(o)
	wantWelcome(t, welcome)
	if r := b.get(n); r.CurrentSerial != first || r.NextSerial != used || r.Alarm != "" {
		t.Fatalf("after the open: %+v", r)
	}
	if got := b.confirm(o, welcome.GetGeneration()); !got.GetAdmitted() {
		t.Fatalf("confirm: %v", got)
	}
	if r := b.get(n); r.CurrentSerial != used || r.NextSerial != "" || r.Confirmed != 10 || r.Alarm != "" {
		t.Fatalf("after the ready: %+v", r)
	}
	n.serial, n.joinState = late, welcome.GetJoinState()
	if got := b.open(b.hello(n)).GetDenial().GetReason(); got != commonv1.Reason_REASON_SERIAL_SUPERSEDED {
		t.Fatalf("the certificate of the late renewal: %v", got)
	}
	b.wantMode(true)
}

func TestEraRaisesGenerations(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	if _, err := testkit.RaiseEra(b.ctx, b.db.OwnerPool(), "restored"); err != nil {
		t.Fatal(err)
	}
	b.admit(n)
	r := b.get(n)
	if r.Confirmed != 1<<40 || r.AuthoritySeq < 1<<40 {
		t.Fatalf("generation %d, sequence %d", r.Confirmed, r.AuthoritySeq)
	}
}

// TestAuthorityOrderIsCommitOrder changes many nodes at once while a reader polls: after the reader has read up to a
// number, no decision with a lower number appears.
func TestAuthorityOrderIsCommitOrder(t *testing.T) {
	b := newBench(t)
	nodes := make([]*node, 8)
	for i := range nodes {
		nodes[i] = b.enrolled(fmt.Sprintf("node-%d", i))
	}
	stop := make(chan struct{})
	var reader sync.WaitGroup
	latest := map[string]int64{}
	var last int64
	read := func() {
		rows, err := b.pool.Query(b.ctx,
			`SELECT node_id::text, authority_seq FROM recovery.identity WHERE authority_seq > $1 ORDER BY authority_seq`, last)
		if err != nil {
			t.Error(err)
			return
		}
		defer rows.Close()
		for rows.Next() {
			var id string
			var seq int64
			if err := rows.Scan(&id, &seq); err != nil {
				t.Error(err)
				return
			}
			latest[id], last = seq, seq
		}
	}
	reader.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				read()
			}
		}
	})
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range 25 {
				n := *nodes[(w*7+i)%len(nodes)]
				o := b.hello(&n)
				results, _, err := b.identities.Open(b.ctx, []*recoveryv1.OpenSession{o})
				if err != nil {
					t.Error(err)
					return
				}
				if g := results[0].GetGeneration(); g > 0 {
					b.confirmQuietly(o, g)
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	reader.Wait()
	read()
	for _, n := range nodes {
		if got, want := latest[n.id], b.get(n).AuthoritySeq; got != want {
			t.Errorf("the reader has %d of a node that stands at %d", got, want)
		}
	}
}

func (b *bench) confirmQuietly(o *recoveryv1.OpenSession, generation int64) {
	_, _, err := b.identities.Confirm(b.ctx, []*recoveryv1.ConfirmSession{{
		SessionId: o.GetSessionId(), NodeId: o.GetNodeId(), NodeInstanceId: o.GetNodeInstanceId(), Generation: generation,
		Serial: o.GetSerial(),
	}})
	if err != nil {
		b.t.Error(err)
	}
}
