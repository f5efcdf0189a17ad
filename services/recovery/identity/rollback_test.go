package identity_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
)

const rolledBack = commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK

// shows gives a node a join state that the control plane signed in a history that the database may have lost.
func (b *bench) shows(n *node, generation, era int64) {
	b.t.Helper()
	signed, err := b.keys.Sign(joinstate.State{
		NodeID: n.id, NodeInstanceID: n.instance, Generation: generation,
		Serial: n.serial, Era: era,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	n.joinState = signed
}

// enter sets rollback mode as the schema's owner does.
func (b *bench) enter() {
	b.t.Helper()
	if _, err := b.db.OwnerPool().Exec(b.ctx, `UPDATE recovery.rollback SET state = 'active', declared = true, since =
		mesh.clock()`); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) text(sql string, args ...any) string {
	b.t.Helper()
	var out string
	if err := b.pool.QueryRow(b.ctx, sql, args...).Scan(&out); err != nil {
		b.t.Fatal(err)
	}
	return out
}

func (b *bench) wantMode(active bool) {
	b.t.Helper()
	if got := b.text(`SELECT mesh.rolled_back()::text`); got != fmt.Sprint(active) {
		b.t.Fatalf("rollback mode: %s, want %v", got, active)
	}
}

// wantIncidents requires that there were all incidents of a rollback in total, and that open of them are open.
func (b *bench) wantIncidents(all, open int) {
	b.t.Helper()
	got := b.text(`SELECT count(*) || ' ' || count(*) FILTER (WHERE closed_at IS NULL) FROM recovery.incident WHERE kind =
		'control_plane_rollback'`)
	if want := fmt.Sprintf("%d %d", all, open); got != want {
		b.t.Fatalf("incidents (all, open): %s, want %s", got, want)
	}
}

func wantWelcome(t *testing.T, r *recoveryv1.OpenResult) {
	t.Helper()
	if r.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
		t.Fatalf("not welcome: %v", r)
	}
}

func wantWait(t *testing.T, what string, d *commonv1.Denial) {
	t.Helper()
	if d.GetReason() != rolledBack || d.GetAction() != commonv1.Action_ACTION_WAIT || !strings.Contains(d.GetRemedy(),
		"gpuaas rollback accept") {
		t.Errorf("%s: %v", what, d)
	}
}

// A node that presents a number which the database has never given is welcomed, and the mode is set, with one incident
// for all such nodes.
func TestNodesThatRememberMoreSetRollbackMode(t *testing.T) {
	b := newBench(t)
	first, second, fine := b.enrolled("one"), b.enrolled("two"), b.enrolled("three")
	b.admit(fine)
	b.wantMode(false)
	b.shows(first, 9, 0)
	got := b.open(b.hello(first))
	wantWelcome(t, got)
	if got.GetGeneration() != 10 {
		t.Fatalf("generation %d after one that shows 9", got.GetGeneration())
	}
	b.wantMode(true)
	b.wantIncidents(1, 1)
	b.shows(second, 4, 0)
	wantWelcome(t, b.open(b.hello(second)))
	b.admit(fine)
	b.wantIncidents(1, 1)
	if got := b.text(`SELECT severity || ' ' || owner_layer || ' ' || next_action FROM
		recovery.incident`); !strings.HasPrefix(got, "p0 database ") ||
		!strings.Contains(got, "gpuaas rollback accept") || !strings.Contains(got, "docs/restore.md") {
		t.Errorf("incident: %s", got)
	}
	if got := b.text(`SELECT state_by || ' ' || state_reason FROM recovery.identity WHERE node_id = '` + first.id +
		`'`); got != "recovery control_plane_rollback" {
		t.Errorf("the state is by %s", got)
	}
	nodes := b.text(`SELECT array_to_string(node_ids, ' ') FROM recovery.incident`)
	if !strings.Contains(nodes, first.id) || !strings.Contains(nodes, second.id) || strings.Contains(nodes, fine.id) {
		t.Errorf("nodes of the incident: %s", nodes)
	}
	if got := b.text(`SELECT declared || ' ' || evidence_total || ' ' || seen_era FROM
		recovery.rollback`); got != "false 2 0" {
		t.Errorf("row: %s", got)
	}
	if got := b.text(`SELECT count(*)::text FROM events.event WHERE kind = 'incident.changed' AND source =
		'recovery'`); got != "2" {
		t.Errorf("%s events of the incident", got)
	}
}

// After a declared restore nodes present numbers of earlier eras: they are adopted and are no evidence. A number of the
// present era is.
func TestNumbersOfAnEarlierEraAreNoNews(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	if _, err := testkit.RaiseEra(b.ctx, b.db.OwnerPool(), "a restore"); err != nil {
		t.Fatal(err)
	}
	b.shows(n, 9, 0)
	got := b.open(b.hello(n))
	wantWelcome(t, got)
	if got.GetGeneration() < 1<<40 || got.GetEra() != 1 {
		t.Fatalf("generation %d of era %d", got.GetGeneration(), got.GetEra())
	}
	b.wantMode(false)
	b.wantIncidents(0, 0)
	other := b.enrolled("two")
	b.shows(other, 1<<40+7, 1)
	wantWelcome(t, b.open(b.hello(other)))
	b.wantMode(true)
	b.wantIncidents(1, 1)
}

// In the mode no node is told to stop, whatever its state in the database, and no node is put on hold.
func TestRollbackModeStopsAndHoldsNoNode(t *testing.T) {
	b := newBench(t)
	gone, copied, blank, fine := b.enrolled("gone"), b.enrolled("copied"), b.enrolled("blank"), b.enrolled("fine")
	b.admit(gone)
	b.admit(copied)
	older := *copied
	b.admit(copied)
	b.admit(blank)
	blank.joinState = nil
	if _, _, err := b.identities.Change(b.ctx, gone.id, recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE, "gone",
		identity.Actor{Subject: "ada"}); err != nil {
		t.Fatal(err)
	}
	unknown := &node{id: ids.New(), instance: ids.New(), serial: "ff"}
	if got := b.open(b.hello(unknown)).GetDenial(); got.GetReason() != commonv1.Reason_REASON_IDENTITY_UNKNOWN {
		t.Fatalf("before: %v", got)
	}
	if got := b.open(b.hello(gone)).GetDenial(); got.GetAction() != commonv1.Action_ACTION_STOP {
		t.Fatalf("before: %v", got)
	}
	b.enter()
	wantWait(t, "an unknown node", b.open(b.hello(unknown)).GetDenial())
	wantWait(t, "a retired node", b.open(b.hello(gone)).GetDenial())
	mismatch := *fine
	mismatch.instance = ids.New()
	wantWait(t, "another instance", b.open(b.hello(&mismatch)).GetDenial())
	wantWait(t, "Ready of an unknown node", b.confirm(b.hello(unknown), 1).GetDenial())
	for name, n := range map[string]*node{"copied": &older, "blank": blank} {
		o := b.hello(n)
		if got := b.open(o); got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
			t.Fatalf("%s: %v", name, got)
		}
		d, err := b.identities.ReportChallenge(b.ctx, &recoveryv1.ReportChallengeRequest{
			SessionId: o.GetSessionId(), NodeId: n.id, NodeInstanceId: n.instance, Answered: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		wantWait(t, name, d)
		if r := b.get(n); r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.Alarm != "" {
			t.Errorf("%s is %v with alarm %q", name, r.State, r.Alarm)
		}
	}
	b.admit(fine) // opens go on
}

// In a batch with the first evidence no node is told to stop.
func TestTheFirstEvidenceCountsForItsBatch(t *testing.T) {
	b := newBench(t)
	ahead := b.enrolled("one")
	b.shows(ahead, 9, 0)
	results, _, err := b.identities.Open(b.ctx, []*recoveryv1.OpenSession{b.hello(&node{
		id: ids.New(), instance: ids.New(),
		serial: "ff",
	}), b.hello(ahead)})
	if err != nil {
		t.Fatal(err)
	}
	wantWait(t, "an unknown node", results[0].GetDenial())
	wantWelcome(t, results[1])
}

// People's requests are refused in the mode, with a remedy that names the command which ends the mode.
func TestRollbackModeRefusesVerbs(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.enter()
	for _, verb := range []recoveryv1.IdentityVerb{
		recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD, recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE,
		recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
		recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE,
	} {
		_, _, err := b.identities.Change(b.ctx, n.id, verb, "because", identity.Actor{
			Subject: "ada",
			Roles:   []string{verbs.RoleSecurity},
		})
		if f, ok := fault.As(err); !ok || f.Reason != rolledBack || !strings.Contains(f.Remedy, "gpuaas rollback accept") {
			t.Errorf("%v: %v", verb, err)
		}
	}
	if r := b.get(n); r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.FenceEpoch != 1 {
		t.Errorf("%+v", r)
	}
}

// backup copies the database as it is; restore puts the copy in its place. Nothing is connected while either happens.
func (b *bench) backup() func() {
	b.t.Helper()
	cfg, err := pgx.ParseConfig(b.db.AdminURL())
	if err != nil {
		b.t.Fatal(err)
	}
	cfg.Database = "postgres"
	admin, err := pgx.ConnectConfig(b.ctx, cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = admin.Close(b.ctx) })
	name, kept := pgx.Identifier{b.db.Name()}.Sanitize(), pgx.Identifier{b.db.Name() + "_kept"}.Sanitize()
	do := func(sql string, args ...any) error {
		_, err := admin.Exec(b.ctx, sql, args...)
		return err
	}
	alone := func(sql string) {
		b.t.Helper()
		testkit.Eventually(b.t, testkit.Patience, func() error {
			return errors.Join(do(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1`, b.db.Name()),
				do(sql))
		})
	}
	alone("CREATE DATABASE " + kept + " TEMPLATE " + name)
	b.t.Cleanup(func() { _ = do("DROP DATABASE IF EXISTS " + kept + " WITH (FORCE)") })
	return func() {
		b.t.Helper()
		alone("DROP DATABASE " + name)
		for _, sql := range []string{
			"CREATE DATABASE " + name + " TEMPLATE " + kept + " OWNER " + pg.RoleOwner, "REVOKE ALL ON DATABASE " + name +
				" FROM PUBLIC",
			"GRANT CONNECT ON DATABASE " + name + " TO nodeapi, lifecycle, recovery, readmodel, sequencer",
		} {
			if err := do(sql); err != nil {
				b.t.Fatal(err)
			}
		}
	}
}

// again runs fn until the pool has replaced the connections that a restore cut.
func (b *bench) again(fn func() error) {
	b.t.Helper()
	testkit.Eventually(b.t, testkit.Patience, fn)
}

// An older dump comes back under agents that remember more, undeclared and declared: no node is told to stop or put on
// hold, every later number is above all that were given, and there is one incident.
func TestAnOlderDumpUnderNodesThatRememberMore(t *testing.T) {
	for _, declared := range []bool{false, true} {
		t.Run(fmt.Sprintf("declared %v", declared), func(t *testing.T) {
			b := newBench(t)
			early, late := b.enrolled("early"), b.enrolled("late")
			b.admit(early)
			b.admit(late)
			restore := b.backup()
			b.again(func() error { return b.pool.Ping(b.ctx) })
			for range 6 {
				b.admit(early)
				b.admit(late)
			}
			lost := b.enrolled("lost")
			b.admit(lost)
			b.pool.Reset() // stop: nothing is connected
			restore()
			if declared {
				state, err := schema.DeclareRestored(b.ctx, b.db.URL(pg.RoleOwner), "the disk was lost")
				if err != nil {
					t.Fatal(err)
				}
				if state.Era != 1 || !state.Active || !state.Declared {
					t.Fatalf("%+v", state)
				}
			}
			b.again(func() error { return b.pool.Ping(b.ctx) })
			first := b.admit(early) // adopted and admitted: its generation goes on above 7
			if got := b.get(early); got.ConfirmedSession != first.GetSessionId() || got.Confirmed <= 7 {
				t.Fatalf("%+v", got)
			}
			b.wantMode(true)
			wantWait(t, "a node of the lost history", b.open(b.hello(lost)).GetDenial())
			if !declared {
				b.wantIncidents(1, 1)
			}
			b.wantEra(map[bool]string{false: "0", true: "1"}[declared])
			b.accept(t)
			b.wantMode(false)
			b.wantIncidents(1, 0)
			b.wantEra("1")
			// A node that comes late presents numbers of the lost history, which are known to be lost and set no mode.
			b.admit(late)
			b.wantMode(false)
			b.wantIncidents(1, 0)
			if got := b.get(late); got.Confirmed < 1<<40 {
				t.Errorf("generation %d could be one that was given before", got.Confirmed)
			}
			if got := b.text(`SELECT count(*)::text FROM recovery.identity WHERE state = 'held' OR alarm <> ''`); got != "0" {
				t.Errorf("%s nodes were held", got)
			}
		})
	}
}

func (b *bench) wantEra(want string) {
	b.t.Helper()
	if got := b.text(`SELECT era::text FROM mesh.era`); got != want {
		b.t.Fatalf("era %s, want %s", got, want)
	}
}
