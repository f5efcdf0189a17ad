package identity_test

import (
	"crypto/ed25519"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
)

// A history is one node at the real store for some dozens of steps, drawn at random: its agent restarts between any two
// of its fsyncs, replies are lost, calls are executed long after their connection was given up, certificates are
// renewed, and some nodes are copied. What happens to the control plane happens to all histories of a world at once:
// replicas of recovery sign with a rotated key at different times, and the database of some worlds is restored.
// judge/model_test.go explores the same decisions exhaustively, for one node and few steps; here they go through SQL,
// in batches, and for as long as a node lives.

const (
	historiesOfWorld = 256
	stepsOfHistory   = 48
)

// machine is an agent of a history: what it has on its disk, and its connections.
type machine struct {
	disk    node
	js      int64  // the generation of the join state on the disk
	other   string // a second certificate
	dialing *call
	session *call
	lost    bool // told to recover, and it has no other certificate
}

// call is a connection of a machine, and the call for it that a paused replica of nodeapi may make at any later time.
type call struct {
	of    int // which machine
	hello *recoveryv1.OpenSession
	next  verb
	gen   int64
	after bool // its Hello was sent after the copy was made
	live  bool // the machine reads what comes
}

type verb uint8

const (
	toOpen verb = iota
	toConfirm
	toReport
	toRenew
)

type history struct {
	name     string
	machines [2]machine
	calls    []*call
	split    bool
	won      [2]bool // a session that was opened after the copy has been admitted
	trace    []string
}

func (h *history) note(format string, args ...any) {
	h.trace = append(h.trace, fmt.Sprintf(format, args...))
}

// worldOf is many histories on one database, with two replicas of recovery.
type worldOf struct {
	*bench
	random    *rand.Rand
	histories []*history
	privates  []ed25519.PrivateKey
	knows     [2]int // how many of the keys each replica has; it signs with the last
	replicas  [2]*bench
	restored  bool
}

func newWorld(t *testing.T, seed uint64) *worldOf {
	t.Helper()
	w := &worldOf{bench: newBench(t), random: rand.New(rand.NewPCG(seed, 9))}
	w.privates = []ed25519.PrivateKey{newPrivate(t)}
	for i := range w.replicas {
		w.reads(i, 1)
	}
	w.tx(func(tx pgx.Tx) error {
		m, err := identity.ReadMoment(w.ctx, tx)
		if err != nil {
			return err
		}
		var records []*identity.Record
		for i := range historiesOfWorld {
			h := &history{name: fmt.Sprintf("node-%d", i)}
			h.machines[0].disk = node{id: ids.New(), instance: ids.New(), serial: newSerial()}
			n := h.machines[0].disk
			r := &identity.Record{NodeID: n.id, Name: h.name}
			if _, err := identity.Insert(w.ctx, tx, r); err != nil {
				return err
			}
			if err := identity.Activate(w.ctx, tx, r, n.instance, certificate(n.serial), "test", "enrolled", m); err != nil {
				return err
			}
			records, w.histories = append(records, r), append(w.histories, h)
		}
		_, err = identity.Save(w.ctx, tx, records...)
		return err
	})
	return w
}

func newSerial() string { return fmt.Sprintf("%x", []byte(ids.New()[24:])) }

// reads lets a replica have the first n keys.
func (w *worldOf) reads(replica, n int) {
	w.knows[replica] = n
	w.replicas[replica] = w.replica(fmt.Sprintf("replica-%d", replica), w.privates[:n]...)
}

// chance reports true in one of n cases.
func (w *worldOf) chance(n int) bool { return w.random.IntN(n) == 0 }

// rotate adds a key, or lets the replica that is behind read it.
func (w *worldOf) rotate() {
	if w.knows[0] == w.knows[1] {
		w.privates = append(w.privates, newPrivate(w.t))
		w.reads(w.random.IntN(2), len(w.privates))
		return
	}
	for i := range w.replicas {
		w.reads(i, len(w.privates))
	}
}

// dial sends a Hello.
func (h *history) dial(w *worldOf, k int) {
	m := &h.machines[k]
	c := &call{of: k, hello: w.hello(&m.disk), after: h.split, live: true}
	m.dialing = c
	h.calls = append(h.calls, c)
	h.note("%d: Hello with generation %d on %s", k, m.js, m.disk.serial)
}

// restart ends the connections of a machine. What they have asked may still be executed.
func (h *history) restart(k int) {
	m := &h.machines[k]
	for _, c := range []*call{m.dialing, m.session} {
		if c != nil {
			c.live = false
		}
	}
	m.dialing, m.session = nil, nil
	h.note("%d: restart", k)
}

// step lets a history take a step of its own; the call that is to be executed now is returned, if any.
func (h *history) step(w *worldOf) *call {
	k := 0
	if h.split {
		k = w.random.IntN(2)
	}
	m := &h.machines[k]
	switch {
	case len(h.calls) > 0 && !w.chance(3):
		i := w.random.IntN(len(h.calls))
		c := h.calls[i]
		h.calls = append(h.calls[:i], h.calls[i+1:]...)
		return c
	case w.chance(6):
		h.restart(k)
	case !h.split && m.js > 0 && h.machines[0].disk.id[35]%2 == 0 && w.chance(12):
		h.split = true
		h.machines[1] = machine{disk: m.disk, js: m.js, other: m.other, lost: m.lost}
		h.note("copied")
	case m.session != nil && m.other != "" && m.session.hello.GetSerial() == m.disk.serial && w.chance(2):
		m.disk.serial, m.other = m.other, m.disk.serial
		h.note("%d: uses %s", k, m.disk.serial)
	case m.session != nil && w.chance(4):
		h.calls = append(h.calls, &call{of: k, hello: m.session.hello, next: toRenew, live: true})
	case m.dialing == nil && !m.lost:
		h.dial(w, k)
	}
	return nil
}

// opened takes the answer to an open.
func (h *history) opened(w *worldOf, c *call, r *recoveryv1.OpenResult) {
	h.note("%d: open: %v %d %v, read: %v", c.of, r.GetVerdict(), r.GetGeneration(), r.GetDenial().GetReason(), c.live)
	if !c.live {
		return
	}
	m := &h.machines[c.of]
	switch r.GetVerdict() {
	case recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME:
		if w.chance(8) {
			h.restart(c.of) // before its fsync
			return
		}
		if r.GetGeneration() > m.js {
			m.js, m.disk.joinState = r.GetGeneration(), r.GetJoinState()
		}
		if w.chance(8) {
			h.restart(c.of) // after it
			return
		}
		c.next, c.gen = toConfirm, r.GetGeneration()
		h.calls = append(h.calls, c)
	case recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE:
		c.next = toReport
		h.calls = append(h.calls, c)
	case recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED:
		h.refused(c, r.GetDenial().GetReason())
	default:
		w.t.Fatalf("open: %v", r)
	}
}

// refused applies a denial as an agent does.
func (h *history) refused(c *call, reason commonv1.Reason) {
	m := &h.machines[c.of]
	if c.live && m.dialing == c {
		m.dialing = nil
	}
	switch reason { // the rest is waited out
	case commonv1.Reason_REASON_SERIAL_UNKNOWN:
		m.lost = c.live
	case commonv1.Reason_REASON_SERIAL_SUPERSEDED:
		if m.lost = c.live && m.other == ""; c.live && !m.lost {
			m.disk.serial, m.other = m.other, m.disk.serial
		}
	}
}

// confirmed takes the answer to a Ready.
func (h *history) confirmed(c *call, r *recoveryv1.ConfirmResult) {
	h.note("%d: ready %d: %v %v, read: %v", c.of, c.gen, r.GetAdmitted(), r.GetDenial().GetReason(), c.live)
	if !r.GetAdmitted() {
		h.refused(c, r.GetDenial().GetReason())
		return
	}
	h.won[c.of] = h.won[c.of] || c.after
	if !c.live {
		return
	}
	m := &h.machines[c.of]
	if m.session != nil {
		m.session.live = false
	}
	m.session, m.dialing = c, nil
	if m.disk.serial == c.hello.GetSerial() {
		m.other = ""
	}
}

// renew offers a certificate over the session that is confirmed, as recovery does; the agent has it beside its own.
func (w *worldOf) renew(h *history, c *call) {
	serial, given := newSerial(), false
	w.tx(func(tx pgx.Tx) error {
		given = false
		r, err := identity.LockOne(w.ctx, tx, h.machines[0].disk.id)
		if err != nil || r.ConfirmedSession != c.hello.GetSessionId() {
			return err
		}
		if err := identity.Offer(w.ctx, tx, r, certificate(serial)); err != nil {
			return err
		}
		given = true
		_, err = identity.Save(w.ctx, tx, r)
		return err
	})
	m := &h.machines[c.of]
	h.note("%d: renewal: %v", c.of, given)
	if given && m.session != nil && m.session.hello == c.hello && m.disk.serial == c.hello.GetSerial() && !w.chance(4) {
		m.other = serial
	}
}

func (w *worldOf) report(h *history, c *call) {
	d, err := w.replicas[w.random.IntN(2)].identities.ReportChallenge(w.ctx, &recoveryv1.ReportChallengeRequest{
		SessionId: c.hello.GetSessionId(), NodeId: c.hello.GetNodeId(), NodeInstanceId: c.hello.GetNodeInstanceId(),
		Answered: true,
	})
	if err != nil && !w.restored { // a restored database may not have the challenge
		w.t.Fatalf("%s: report: %v\n%v", h.name, err, h.trace)
	}
	h.note("%d: challenge answered: %v", c.of, d.GetReason())
	h.refused(c, d.GetReason())
}

// due is a call that is to be executed.
type due struct {
	h *history
	c *call
}

// execute makes calls, in one batch for each replica and kind.
func (w *worldOf) execute(calls []due) {
	var opens, confirms [2][]due
	for _, d := range calls {
		replica := w.random.IntN(2)
		switch d.c.next {
		case toOpen:
			opens[replica] = append(opens[replica], d)
		case toConfirm:
			confirms[replica] = append(confirms[replica], d)
		case toReport:
			w.report(d.h, d.c)
		case toRenew:
			w.renew(d.h, d.c)
		}
	}
	for i, r := range w.replicas {
		w.openAll(r, opens[i])
		w.confirmAll(r, confirms[i])
	}
}

func (w *worldOf) openAll(r *bench, calls []due) {
	if len(calls) == 0 {
		return
	}
	req := make([]*recoveryv1.OpenSession, len(calls))
	for i, d := range calls {
		req[i] = d.c.hello
	}
	results, _, err := r.identities.Open(w.ctx, req)
	if err != nil {
		w.t.Fatal(err)
	}
	for i, d := range calls {
		d.h.opened(w, d.c, results[i])
	}
}

func (w *worldOf) confirmAll(r *bench, calls []due) {
	if len(calls) == 0 {
		return
	}
	req := make([]*recoveryv1.ConfirmSession, len(calls))
	for i, d := range calls {
		req[i] = &recoveryv1.ConfirmSession{
			SessionId: d.c.hello.GetSessionId(), NodeId: d.c.hello.GetNodeId(), NodeInstanceId: d.c.hello.GetNodeInstanceId(),
			Generation: d.c.gen, Serial: d.c.hello.GetSerial(),
		}
	}
	results, _, err := r.identities.Confirm(w.ctx, req)
	if err != nil {
		w.t.Fatal(err)
	}
	for i, d := range calls {
		d.h.confirmed(d.c, results[i])
	}
}

// run lets all histories take their steps. With restores, the database comes back as it was some steps before.
func (w *worldOf) run(t *testing.T, restores bool) {
	t.Helper()
	backup, restore := 12+w.random.IntN(8), 26+w.random.IntN(8)
	var back func()
	for step := range stepsOfHistory {
		if restores && step == backup {
			back = w.backup()
			w.again(func() error { return w.pool.Ping(w.ctx) })
		}
		if restores && step == restore {
			w.pool.Reset()
			back()
			w.again(func() error { return w.pool.Ping(w.ctx) })
			w.restored = true
		}
		if w.chance(10) {
			w.rotate()
		}
		var calls []due
		for _, h := range w.histories {
			if c := h.step(w); c != nil {
				calls = append(calls, due{h, c})
			}
		}
		w.execute(calls)
	}
	if w.restored && w.text(`SELECT mesh.rolled_back()::text`) == "true" {
		w.accept(t)
	}
}

// alarms returns the alarm of each node that has one.
func (w *worldOf) alarms() map[string]string {
	rows, err := w.pool.Query(w.ctx, `SELECT node_id::text, alarm FROM recovery.identity WHERE alarm <> ''`)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	out := map[string]string{}
	for rows.Next() {
		var id, alarm string
		if err := rows.Scan(&id, &alarm); err != nil {
			w.t.Fatal(err)
		}
		out[id] = alarm
	}
	return out
}

// finish lets machine k of each history open sessions, with nothing lost, until it is admitted or refused for good.
func (w *worldOf) finish(of []*history, machineOf func(*history) int) {
	for _, h := range of {
		h.calls = nil
		for k := range h.machines {
			h.restart(k)
		}
	}
	quiet := *w
	quiet.random = rand.New(never{})
	for range 4 {
		var calls []due
		for _, h := range of {
			k := machineOf(h)
			if m := &h.machines[k]; m.session == nil && !m.lost {
				h.dial(w, k)
			}
			for _, c := range h.calls {
				calls = append(calls, due{h, c})
			}
			h.calls = nil
		}
		for len(calls) > 0 {
			quiet.execute(calls)
			calls = calls[:0]
			for _, h := range of {
				for _, c := range h.calls {
					calls = append(calls, due{h, c})
				}
				h.calls = nil
			}
		}
	}
}

// never draws what chance takes for no.
type never struct{}

func (never) Uint64() uint64 { return 1<<63 - 1 }

// check requires that no node that was not copied is on hold or locked out, and that each copy is found.
func (w *worldOf) check(t *testing.T) {
	t.Helper()
	w.reads(0, len(w.privates)) // a key that a replica lacks is waited for, and comes
	w.reads(1, len(w.privates))
	var whole, split []*history
	alarms := w.alarms()
	for _, h := range w.histories {
		alarm := alarms[h.machines[0].disk.id]
		switch {
		case !h.split && alarm != "":
			t.Errorf("%s is innocent and on hold: %s\n%v", h.name, alarm, h.trace)
		case !h.split:
			whole = append(whole, h)
		case alarm == "":
			if h.won[0] && h.won[1] && !w.restored {
				t.Errorf("%s: both copies were admitted and none was found\n%v", h.name, h.trace)
			}
			split = append(split, h)
		case alarm != identity.AlarmClone:
			t.Errorf("%s: a copy is taken for %s\n%v", h.name, alarm, h.trace)
		}
	}
	w.finish(whole, func(*history) int { return 0 })
	for _, h := range whole {
		if h.machines[0].session == nil {
			t.Errorf("%s is innocent and has no way back\n%v", h.name, h.trace)
		}
	}
	for round := range 6 {
		w.finish(split, func(*history) int { return round % 2 })
	}
	alarms = w.alarms()
	for _, h := range split {
		if alarms[h.machines[0].disk.id] != identity.AlarmClone && !h.machines[0].lost && !h.machines[1].lost {
			t.Errorf("%s: two active copies are never found: alarm %q\n%v", h.name, alarms[h.machines[0].disk.id], h.trace)
		}
	}
	for _, h := range whole {
		if alarm := alarms[h.machines[0].disk.id]; alarm != "" {
			t.Errorf("%s is innocent and on hold in the end: %s\n%v", h.name, alarm, h.trace)
		}
	}
	w.reactivate(t, slices.DeleteFunc(slices.Clone(w.histories), func(h *history) bool {
		return alarms[h.machines[0].disk.id] != identity.AlarmClone
	}))
	t.Logf("%d histories, %d of them with a copy; %d keys; restored: %v", len(w.histories), len(w.histories)-len(whole),
		len(w.privates), w.restored)
}

// reactivate has the security role reactivate nodes that were copied: neither machine comes back by itself. Then the
// first machine enrols anew, and is the only one that is admitted. No alarm is raised.
func (w *worldOf) reactivate(t *testing.T, copied []*history) {
	t.Helper()
	tries := func(k int, admitted bool, when string) {
		t.Helper()
		for _, h := range copied {
			h.machines[k].lost = false
		}
		w.finish(copied, func(*history) int { return k })
		alarms := w.alarms()
		for _, h := range copied {
			if alarm := alarms[h.machines[0].disk.id]; alarm != "" || (h.machines[k].session != nil) != admitted {
				t.Errorf("%s: %s machine %d has a session: %t; alarm %q\n%v", h.name, when, k, h.machines[k].session != nil,
					alarm, h.trace)
			}
		}
	}
	for _, h := range copied {
		_, _, err := w.identities.Change(w.ctx, h.machines[0].disk.id, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
			"the copy is found", identity.Actor{Subject: "ada", Roles: []string{verbs.RoleSecurity}})
		if err != nil {
			t.Fatalf("%s: %v", h.name, err)
		}
	}
	tries(0, false, "after the reactivation")
	tries(1, false, "after the reactivation")
	w.tx(func(tx pgx.Tx) error {
		m, err := identity.ReadMoment(w.ctx, tx)
		if err != nil {
			return err
		}
		for _, h := range copied {
			disk := node{id: h.machines[0].disk.id, instance: ids.New(), serial: newSerial()}
			r, err := identity.LockOne(w.ctx, tx, disk.id)
			if err != nil {
				return err
			}
			err = identity.Activate(w.ctx, tx, r, disk.instance, certificate(disk.serial), "test", "enrolled anew", m)
			if err != nil {
				return err
			}
			if _, err := identity.Save(w.ctx, tx, r); err != nil {
				return err
			}
			h.machines[0] = machine{disk: disk}
		}
		return nil
	})
	tries(0, true, "enrolled anew")
	tries(1, false, "beside the new identity")
	tries(0, true, "beside the copy")
}

// TestHistoriesHoldNoInnocentNodeAndMissNoCopy runs 10,240 histories with GPUAAS_TEST_LONG, and 512 without.
func TestHistoriesHoldNoInnocentNodeAndMissNoCopy(t *testing.T) {
	testkit.IO(t)
	for i := range testkit.Repeat(2, 40) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			w := newWorld(t, uint64(i))
			w.run(t, i%3 == 1)
			w.check(t)
		})
	}
}
