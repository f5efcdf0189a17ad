package watchdog_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// member is a node with the state that its agent has.
type member struct {
	id, instance, serial string
	joinState            []byte
}

// members has the identities of a mesh beside its watchdog.
type members struct {
	*kit
	identities *identity.Identities
}

func newMembers(t *testing.T) *members {
	t.Helper()
	k := newKit(t)
	_, private, err := ed25519.GenerateKey(rand.Reader)
	k.must(err)
	keys, err := joinstate.NewKeys(private)
	k.must(err)
	m := &members{kit: k}
	m.identities, err = identity.New(identity.Deps{
		Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery),
		Keys: keys,
	})
	k.must(err)
	return m
}

// enrol makes nodes that have a certificate, and admits each once.
func (m *members) enrol(count int) []*member {
	m.t.Helper()
	out := make([]*member, count)
	for i := range out {
		out[i] = &member{id: ids.New(), instance: ids.New(), serial: fmt.Sprintf("%x", []byte(ids.New()[24:]))}
	}
	m.must(pg.InTx(m.ctx, m.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		moment, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		for i, n := range out {
			r := &identity.Record{NodeID: n.id, Name: fmt.Sprintf("node-%03d-%s", i, n.id[30:])}
			if _, err := identity.Insert(ctx, tx, r); err != nil {
				return err
			}
			key := make([]byte, 32)
			_, _ = rand.Read(key)
			certificate := identity.Serial{
				Serial: n.serial, KeySHA256: key, ChainPEM: []byte("chain"), IssuerFingerprint: "issuer",
				NotBefore: moment.Now, NotAfter: moment.Now.Add(8 * time.Hour),
			}
			if err := identity.Activate(ctx, tx, r, n.instance, certificate, "test", "enrolled", moment); err != nil {
				return err
			}
			if _, err := identity.Save(ctx, tx, r); err != nil {
				return err
			}
		}
		return nil
	}))
	hellos := m.hellos(out)
	opened := m.open(hellos)
	confirms := make([]*recoveryv1.ConfirmSession, count)
	for i, n := range out {
		if opened[i].GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
			m.t.Fatalf("open: %v", opened[i])
		}
		n.joinState = opened[i].GetJoinState()
		confirms[i] = &recoveryv1.ConfirmSession{
			SessionId: hellos[i].GetSessionId(), NodeId: n.id, NodeInstanceId: n.instance, Generation: opened[i].GetGeneration(),
			Serial: n.serial,
		}
	}
	confirmed, _, err := m.identities.Confirm(m.ctx, confirms)
	m.must(err)
	for _, c := range confirmed {
		if !c.GetAdmitted() {
			m.t.Fatalf("confirm: %v", c)
		}
	}
	return out
}

func (m *members) hellos(nodes []*member) []*recoveryv1.OpenSession {
	out := make([]*recoveryv1.OpenSession, len(nodes))
	for i, n := range nodes {
		out[i] = &recoveryv1.OpenSession{
			SessionId: ids.New(), NodeId: n.id, NodeInstanceId: n.instance, Serial: n.serial, JoinState: n.joinState,
		}
	}
	return out
}

func (m *members) open(hellos []*recoveryv1.OpenSession) []*recoveryv1.OpenResult {
	m.t.Helper()
	results, _, err := m.identities.Open(m.ctx, hellos)
	m.must(err)
	return results
}

// answer reports that a challenged stream signed.
func (m *members) answer(hello *recoveryv1.OpenSession) *commonv1.Denial {
	m.t.Helper()
	denial, err := m.identities.ReportChallenge(m.ctx, &recoveryv1.ReportChallengeRequest{
		SessionId: hello.GetSessionId(), NodeId: hello.GetNodeId(), Answered: true,
	})
	m.must(err)
	return denial
}

func (m *members) owner(sql string, args ...any) {
	m.t.Helper()
	_, err := m.db.OwnerPool().Exec(m.ctx, sql, args...)
	m.must(err)
}

// forget deletes the certificates of nodes from the database, as a restore to an earlier time does, and drops the
// nodes' join states.
func (m *members) forget(nodes []*member) {
	m.t.Helper()
	m.owner(`CREATE TABLE IF NOT EXISTS recovery.kept AS SELECT * FROM recovery.serial`)
	for _, n := range nodes {
		n.joinState = nil
	}
	m.owner(`DELETE FROM recovery.serial WHERE node_id = ANY($1::uuid[])`, idsOf(nodes))
}

// restore brings back the certificates that forget deleted.
func (m *members) restore(nodes []*member) {
	m.t.Helper()
	m.owner(`INSERT INTO recovery.serial SELECT * FROM recovery.kept WHERE node_id = ANY($1::uuid[])`, idsOf(nodes))
}

func idsOf(nodes []*member) []string {
	out := make([]string, len(nodes))
	for i, n := range nodes {
		out[i] = n.id
	}
	return out
}

// waits reports whether a denial tells a node to try again after a given time.
func waits(d *commonv1.Denial) bool {
	return d.GetAction() == commonv1.Action_ACTION_WAIT && d.GetRetryAfter().AsDuration() > 0
}

// batches splits nodes as replicas of nodeapi gather them.
func batches(nodes []*member, size int) [][]*member {
	var out [][]*member
	for len(nodes) > 0 {
		n := min(size, len(nodes))
		out, nodes = append(out, nodes[:n]), nodes[n:]
	}
	return out
}

// The database of recovery was restored and lacks the certificates of 200 nodes: a few are refused before there is a
// wave, all others are told to wait, there is one incident for all, a copy among them is put on hold at once, and all
// are admitted when the rows are back.
func TestAWaveOfRefusalsStopsItself(t *testing.T) {
	m := newMembers(t)
	nodes := m.enrol(201)
	copied, lost := nodes[200], nodes[:200]
	early := copied.joinState
	hello := m.hellos(nodes[200:])
	opened := m.open(hello)[0]
	confirmed, _, err := m.identities.Confirm(m.ctx, []*recoveryv1.ConfirmSession{{
		SessionId: hello[0].GetSessionId(), NodeId: copied.id, NodeInstanceId: copied.instance,
		Generation: opened.GetGeneration(), Serial: copied.serial,
	}})
	m.must(err)
	if !confirmed[0].GetAdmitted() {
		t.Fatalf("confirm: %v", confirmed[0])
	}
	states := make([][]byte, len(lost))
	for i, n := range lost {
		states[i] = n.joinState
	}
	m.forget(lost)
	const most = 3
	refused, first := 0, true
	for range 2 { // each comes again
		for _, part := range batches(lost, 3) {
			for _, r := range m.open(m.hellos(part)) {
				if r.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED {
					t.Fatalf("a node without a certificate: %v", r)
				}
				if !waits(r.GetDenial()) {
					refused++
				}
			}
			if refused > most {
				t.Fatalf("%d nodes were refused for good, want %d at most", refused, most)
			}
		}
		m.round()
		if b := m.brake(); !b.GetEngaged() || b.GetAffected() != 200 || b.GetIncidentId() == "" ||
			!strings.Contains(b.GetReason(), "serial_unknown") {
			t.Fatalf("the brake: %v", b)
		}
		list := m.incidents(brakeKind)
		if len(list) != 1 || list[0].GetClosedAt() != nil || len(list[0].GetNodeIds()) == 0 ||
			!strings.Contains(list[0].GetNextAction(), "docs/restore.md") {
			t.Fatalf("incidents: %v", list)
		}
		if first {
			// The copy presents an old generation and signs the challenge: no record of recovery is missing for that decision.
			copied.joinState, first = early, false
			shown := m.hellos(nodes[200:])
			if r := m.open(shown)[0]; r.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
				t.Fatalf("an old generation: %v", r)
			}
			if d := m.answer(shown[0]); d.GetReason() != commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED {
				t.Fatalf("an answered challenge: %v", d)
			}
		}
	}
	var held int
	m.must(m.db.Pool(pg.RoleRecovery).QueryRow(m.ctx,
		`SELECT count(*) FROM recovery.identity WHERE state = 'held'`).Scan(&held))
	if held != 1 {
		t.Fatalf("%d nodes are held, want the copied one", held)
	}
	m.restore(lost)
	for i, n := range lost {
		n.joinState = states[i]
	}
	for _, r := range m.open(m.hellos(lost)) {
		if r.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
			t.Fatalf("with its row back: %v", r)
		}
	}
	m.pass(10 * time.Minute)
	m.round()
	m.pass(6 * time.Minute)
	m.round()
	if b := m.brake(); b.GetEngaged() {
		t.Fatalf("the brake holds with nothing refused: %v", b)
	}
	if list := m.incidents(brakeKind); len(list) != 1 || list[0].GetClosedAt() == nil {
		t.Fatalf("incidents: %v", list)
	}
}

// A wave of lost join states puts a few nodes on hold at most, and after a person's release decisions take effect
// again.
func TestAWaveOfHoldsStopsItself(t *testing.T) {
	m := newMembers(t)
	nodes := m.enrol(40)
	for _, n := range nodes {
		n.joinState = []byte("not a join state")
	}
	held := 0
	for _, n := range nodes {
		hello := m.hellos([]*member{n})
		if r := m.open(hello)[0]; r.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
			t.Fatalf("an unreadable join state: %v", r)
		}
		if d := m.answer(hello[0]); !waits(d) {
			held++
		}
	}
	if held > 3 {
		t.Fatalf("%d nodes were held, want 3 at most", held)
	}
	m.round()
	if list := m.incidents(brakeKind); len(list) != 1 || list[0].GetClosedAt() != nil {
		t.Fatalf("incidents: %v", list)
	}
	ada := rpc.WithPerson(m.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	_, err := m.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "these join states are lost"})
	m.must(err)
	m.round()
	if m.brake().GetEngaged() {
		t.Fatal("the brake engaged again over what it was released for")
	}
	hello := m.hellos(nodes[39:])
	m.open(hello)
	if d := m.answer(hello[0]); d.GetReason() != commonv1.Reason_REASON_JOIN_STATE_LOST {
		t.Fatalf("after the release: %v", d)
	}
}

// Scenario: a person releases the brake over nodes whose records are lost for good, and they ask on for days, until
// each has its bundle. Then workspaces fail, which engages the brake for that. It lets go by itself once these are
// back: the nodes that it was released over do not hold it.
func TestWhatTheBrakeWasReleasedOverDoesNotHoldItLater(t *testing.T) {
	m := newMembers(t)
	nodes := m.enrol(12)
	m.forget(nodes)
	m.open(m.hellos(nodes))
	m.round()
	if !m.brake().GetEngaged() {
		t.Fatal("twelve nodes without a certificate have not engaged the brake")
	}
	ada := rpc.WithPerson(m.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	_, err := m.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "these records are lost"})
	m.must(err)
	instances := m.fleet(5)
	m.detectAll(instances[:3])
	if b := m.brake(); !b.GetEngaged() || b.GetReleasedAt() != nil {
		t.Fatalf("three of five instances: %v", b)
	}
	for _, b := range instances[:3] {
		m.back(b)
	}
	for range 7 {
		m.listen(time.Minute)
		m.open(m.hellos(nodes))
		m.round()
	}
	if b := m.brake(); b.GetEngaged() || b.GetReleasedBy() == "ada" {
		t.Fatalf("the brake is held by what it was released over: %v", b)
	}
	for _, r := range m.open(m.hellos(nodes)) {
		if r.GetDenial().GetReason() != commonv1.Reason_REASON_SERIAL_UNKNOWN {
			t.Fatalf("after the release: %v", r)
		}
	}
}

// If there are few nodes in a window, they are refused and put on hold as usual.
func TestFewRefusalsAreNoWave(t *testing.T) {
	m := newMembers(t)
	nodes := m.enrol(10)
	m.forget(nodes[:3])
	for range 3 {
		for _, r := range m.open(m.hellos(nodes[:3])) {
			if r.GetDenial().GetReason() != commonv1.Reason_REASON_SERIAL_UNKNOWN {
				t.Fatalf("one of three: %v", r)
			}
		}
	}
	m.round()
	if len(m.incidents(brakeKind)) != 0 {
		t.Fatal("three nodes have engaged the brake")
	}
	// Nodes that are refused after the window are counted anew.
	m.pass(6 * time.Minute)
	m.forget(nodes[3:6])
	for _, r := range m.open(m.hellos(nodes[3:6])) {
		if r.GetDenial().GetReason() != commonv1.Reason_REASON_SERIAL_UNKNOWN {
			t.Fatalf("one of three more: %v", r)
		}
	}
}
