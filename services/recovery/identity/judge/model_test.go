package judge_test

import (
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

// The model: one node's agent (and perhaps a copy of it), any number of nodeapi replicas that may be paused between
// reading a frame and calling recovery, and recovery itself, which decides by the very functions that the store uses.
// Every message may be lost at any point, every agent may die between any two of its fsyncs, every call may be executed
// long after its connection was given up. The search visits every state that bounded numbers of opens, renewals and
// faults can reach.

const (
	slots   = 4 // connections that still matter at once
	serials = 5 // certificates that may be issued, from 1
	mails   = 2 // renewals under way at once
	eraJump = 40
)

type phase uint8

const (
	free      phase = iota
	hello           // at a replica; OpenSession not executed
	welcome         // executed, the Welcome on its way
	challenge       // executed, the Challenge on its way
	denied          // executed, the denial on its way
	storing         // the agent has read the Welcome, its fsync is to come
	stored          // fsync done, Ready not sent
	ready           // Ready at a replica; ConfirmSessions not executed
	admitted        // executed, Admitted on its way
	up              // the agent knows that it is admitted
	answered        // the agent's signature at a replica; ReportChallenge not executed
)

type conn struct {
	phase   phase
	of      int8 // the node instance of its Hello
	id      int8 // unique: stands for the session id
	owner   uint8
	serial  int8
	p, pSer int8 // presented generation (0: absent) and the serial it is signed for
	gen     int8 // given
	live    bool // the agent still reads it
	row     bool // recovery has its row
	putFor  bool // the challenge is for a lost join state
	reason  commonv1.Reason
	after   bool // its Hello was sent after the copy was made
}

type agent struct {
	alive         bool
	of            int8 // its node instance, durable
	js, jsSer     int8 // durable, of that node instance
	active, other int8 // durable certificates
	pending       int8 // durable key of a renewal
	dial, sess    int8 // slot+1 of the open in flight, and of the admitted session
	lost          bool // told to recover, and it has no other certificate
	shut          bool // told that the identity is on hold
}

type cert struct {
	state uint8 // 0 none, 1 next, 2 current, 3 superseded, 4 revoked
	used  bool
}

type mail struct {
	state  uint8 // 0 none, 1 asked, 2 answered, 3 refused
	key    int8
	sessID int8
	slot   int8
	owner  uint8
}

type record struct {
	of                        int8 // the node instance that counts
	issued, confirmed, confID int8
	certs                     [serials + 1]cert
	alarm                     commonv1.Reason
}

type world struct { //nolint:recvcheck // steps change a copy, successors make copies
	rec       record
	backup    record
	hasBackup bool
	restored  bool
	era       int8
	agents    [2]agent
	conns     [slots]conn
	mail      [mails]mail
	split     bool
	bare      bool    // the copy was made before there was any join state
	won       [2]bool // a session opened after the copy was confirmed
	ids, keys int8
	opens     int8
	renewals  int8
	fallbacks int8
}

type bounds struct {
	name                       string
	opens, renewals, fallbacks int8
	copies, restore, era       bool
	rules                      rules
}

// rules are the decisions of recovery: the real functions, or a mutant that the search must catch.
type rules struct {
	judge      func(judge.Standing, judge.Hello) judge.Verdict
	judgeReady func(judge.Standing, string, judge.Ready) judge.ReadyVerdict
	eager      bool // alarms without waiting for the answer to a challenge
	lenient    bool // a reactivation ends nothing, whatever the alarm
}

func realRules() rules { return rules{judge: judge.Open, judgeReady: judge.Confirm} }

// ends reports whether a reactivation ends the certificates that were issued.
func (r rules) ends(alarm commonv1.Reason) bool {
	return !r.lenient && identity.Copied(names.Of(alarm))
}

func certUse(r *record, serial int8) judge.CertificateUse {
	c := r.certs[serial]
	states := []commonv1.SerialState{
		commonv1.SerialState_SERIAL_STATE_UNSPECIFIED, commonv1.SerialState_SERIAL_STATE_NEXT,
		commonv1.SerialState_SERIAL_STATE_CURRENT, commonv1.SerialState_SERIAL_STATE_SUPERSEDED,
		commonv1.SerialState_SERIAL_STATE_REVOKED,
	}
	return judge.CertificateUse{State: states[c.state], Used: c.used}
}

// instances are the ids of node instances: the one with which a world begins, the one of a reactivation, and the one of
// the bundle after it.
var instances = [...]string{"i", "j", "k"}

func spell(serial int8) string {
	if serial == 0 {
		return ""
	}
	return fmt.Sprint(serial)
}

func (r *record) standing() judge.Standing {
	s := judge.Standing{
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, InstanceID: instances[r.of],
		Issued: int64(r.issued), Confirmed: int64(r.confirmed),
	}
	if r.alarm != 0 {
		s.State = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
	}
	for i, c := range r.certs {
		switch c.state {
		case 1:
			s.NextSerial = spell(int8(i))
		case 2:
			s.CurrentSerial = spell(int8(i))
		}
	}
	return s
}

func (r *record) offer(serial int8) {
	for i := range r.certs {
		if r.certs[i].state == 1 {
			r.certs[i].state = 3
		}
	}
	r.certs[serial].state = 1
}

// open executes OpenSession.
func (w *world) open(i int, r rules) {
	c := &w.conns[i]
	form := judge.FormSigned
	switch {
	case c.p == 0:
		form = judge.FormAbsent
	case c.of != w.rec.of:
		form = judge.FormForeign
	}
	v := r.judge(w.rec.standing(), judge.Hello{
		InstanceID:  instances[c.of],
		Serial:      spell(c.serial),
		Presented:   judge.Presented{Form: form, Generation: int64(c.p), Serial: spell(c.pSer)},
		Certificate: certUse(&w.rec, c.serial),
	})
	switch v.Ruling {
	case judge.RulingWelcome:
		if v.Adopt > 0 {
			w.rec.issued, w.rec.confirmed, w.rec.confID = int8(v.Adopt), int8(v.Adopt), 0
		}
		if v.AdoptSerial {
			w.rec.offer(c.serial)
		}
		w.rec.issued = max(w.rec.issued+1, w.era*eraJump)
		c.gen, c.row, c.phase = w.rec.issued, true, welcome
	case judge.RulingChallenge:
		c.phase, c.putFor = challenge, v.Reason == commonv1.Reason_REASON_JOIN_STATE_LOST
		if r.eager {
			w.rec.alarm = v.Reason
		}
	case judge.RulingDeny:
		c.phase, c.reason = denied, v.Reason
	}
	if !c.live {
		*c = conn{} // the agent does not read the answer, and a dead connection answers no challenge
	}
}

// confirm executes ConfirmSessions.
func (w *world) confirm(i int, r rules) {
	c := &w.conns[i]
	opened := int64(0)
	if c.row {
		opened = int64(c.gen)
	}
	confirmed := ""
	if w.rec.confID != 0 {
		confirmed = fmt.Sprint(w.rec.confID)
	}
	v := r.judgeReady(w.rec.standing(), confirmed, judge.Ready{
		InstanceID: instances[c.of], Generation: int64(c.gen), Session: fmt.Sprint(c.id), Opened: opened,
		Certificate: certUse(&w.rec, c.serial),
	})
	if v.Admitted {
		w.rec.confirmed, w.rec.confID = c.gen, c.id
		if w.rec.certs[c.serial].state == 1 {
			for k := range w.rec.certs {
				if w.rec.certs[k].state == 2 {
					w.rec.certs[k].state = 3
				}
			}
			w.rec.certs[c.serial].state = 2
		}
		w.rec.certs[c.serial].used = true
		if c.after {
			w.won[c.owner] = true
		}
		c.phase = admitted
	} else {
		c.phase, c.reason = denied, v.Reason
	}
	if !c.live {
		*c = conn{}
	}
}

// report executes ReportChallenge with a good signature.
func (w *world) report(i int) {
	c := &w.conns[i]
	putFor := commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED
	if c.putFor {
		putFor = commonv1.Reason_REASON_JOIN_STATE_LOST
	}
	if reason := judge.Challenge(w.rec.standing(), 1, 1, putFor, true); reason == putFor {
		w.rec.alarm = reason
		w.rec.confID = 0
	}
	c.phase, c.reason = denied, commonv1.Reason_REASON_IDENTITY_HELD
	if !c.live {
		*c = conn{}
	}
}

// renew executes RenewCertificate.
func (w *world) renew(m *mail) {
	switch {
	case w.rec.alarm != 0 || m.sessID != w.rec.confID:
		m.state = 3
	case w.rec.certs[m.key].state == 0:
		w.rec.offer(m.key)
		m.state = 2
	case w.rec.certs[m.key].state == 3:
		m.state = 3
	default:
		m.state = 2
	}
	if !w.reads(m) {
		*m = mail{}
	}
}

// reads reports whether the agent still has the session over which a renewal was requested.
func (w *world) reads(m *mail) bool {
	a := w.agents[m.owner]
	return a.sess != 0 && a.sess-1 == m.slot && w.conns[m.slot].id == m.sessID
}

// hangUp ends the agent's side of a connection: calls that a replica holds may still be executed.
func (w *world) hangUp(slot int8) {
	c := &w.conns[slot]
	c.live = false
	if c.phase != hello && c.phase != ready && c.phase != answered {
		*c = conn{}
	}
	for i := range w.mail {
		if m := &w.mail[i]; m.state > 1 && !w.reads(m) {
			*m = mail{}
		}
	}
}

// refused applies a denial to the agent: it changes certificates only if it is told to renew. The rules must not rely
// on more than that.
func (a *agent) refused(reason commonv1.Reason) {
	switch reason { // the rest is waited out
	case commonv1.Reason_REASON_SERIAL_UNKNOWN:
		a.lost = true
	case commonv1.Reason_REASON_SERIAL_SUPERSEDED:
		if a.other == 0 {
			a.lost = true
			return
		}
		a.active, a.other = a.other, a.active
	case commonv1.Reason_REASON_IDENTITY_HELD, commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED,
		commonv1.Reason_REASON_JOIN_STATE_LOST:
		a.shut = true
	}
}

func (w *world) freeSlot() int {
	for i := range w.conns {
		if w.conns[i].phase == free {
			return i
		}
	}
	return -1
}

// dialUp sends a Hello on a new connection.
func (w *world) dialUp(n int) bool {
	slot := w.freeSlot()
	if slot < 0 {
		return false
	}
	a := &w.agents[n]
	w.ids++
	w.conns[slot] = conn{
		phase: hello, of: a.of, id: w.ids, owner: uint8(n), serial: a.active, p: a.js, pSer: a.jsSer, live: true,
		after: w.split,
	}
	a.dial = int8(slot) + 1
	return true
}

// deliver lets the agent take the next step on a connection it reads; false if the step is not the agent's.
func (w *world) deliver(i int) bool {
	c := &w.conns[i]
	if !c.live {
		return false
	}
	a := &w.agents[c.owner]
	switch c.phase { // the rest are steps of recovery
	case welcome:
		c.phase = storing
	case storing:
		if c.gen > a.js {
			a.js, a.jsSer = c.gen, c.serial
		}
		c.phase = stored
	case stored:
		c.phase = ready
	case challenge:
		c.phase = answered
	case admitted:
		if old := a.sess; old != 0 {
			a.sess = 0
			w.hangUp(old - 1)
		}
		a.sess, a.dial = int8(i)+1, 0
		if a.active == c.serial {
			a.other = 0
		}
		c.phase = up
	case denied:
		reason := c.reason
		a.dial = 0
		*c = conn{}
		a.refused(reason)
	default:
		return false
	}
	return true
}

// execute lets recovery take the next step of a connection; false if the step is not recovery's.
func (w *world) execute(i int, r rules) bool {
	switch w.conns[i].phase { // the rest are steps of the agent
	case hello:
		w.open(i, r)
	case ready:
		w.confirm(i, r)
	case answered:
		w.report(i)
	default:
		return false
	}
	return true
}

// successors calls yield for every world one step away.
func (w world) successors(b bounds, yield func(step string, next world)) {
	for i := range w.conns {
		if n := w; n.execute(i, b.rules) {
			yield("execute", n)
		}
		if n := w; n.deliver(i) {
			yield("deliver", n)
		}
	}
	for i := range w.mail {
		w.mailSuccessors(i, yield)
	}
	for k := range w.agents {
		w.agentSuccessors(k, b, yield)
	}
	if b.copies && !w.split {
		n := w
		n.split, n.bare = true, w.agents[0].js == 0
		n.agents[1] = w.agents[0]
		n.agents[1].dial, n.agents[1].sess = 0, 0
		yield("copy", n)
	}
	if b.restore && !w.hasBackup {
		n := w
		n.hasBackup, n.backup = true, w.rec
		yield("backup", n)
	}
	if b.restore && w.hasBackup && !w.restored {
		n := w
		n.restored, n.rec = true, w.backup
		n.backup = record{}
		if b.era {
			n.era = 1
		}
		for i := range n.conns {
			if n.conns[i].gen > n.rec.issued {
				n.conns[i].row = false
			}
		}
		yield("restore", n)
	}
}

func (w world) mailSuccessors(i int, yield func(step string, next world)) {
	switch w.mail[i].state {
	case 1:
		n := w
		n.renew(&n.mail[i])
		yield("renew", n)
	case 2, 3:
		n := w
		m := n.mail[i]
		a := &n.agents[m.owner]
		n.mail[i] = mail{}
		switch {
		case m.state == 3:
			a.pending = 0
		case a.pending == m.key && a.active == n.conns[m.slot].serial:
			// The new certificate is stored beside the one in use, and never overwrites it.
			a.other, a.pending = m.key, 0
		}
		yield("issued", n)
	}
}

func (w world) agentSuccessors(k int, b bounds, yield func(step string, next world)) {
	a := w.agents[k]
	if !a.alive || a.lost || a.shut {
		return
	}
	if a.dial == 0 && w.opens < b.opens {
		n := w
		n.opens++
		if n.dialUp(k) {
			yield("open", n)
		}
	}
	if a.dial != 0 {
		n := w
		n.agents[k].dial = 0
		n.hangUp(a.dial - 1)
		yield("give up", n)
	}
	if a.sess != 0 {
		n := w
		n.agents[k].sess = 0
		n.hangUp(a.sess - 1)
		yield("lose session", n)
	}
	if a.other != 0 && a.dial == 0 && a.sess != 0 && w.conns[a.sess-1].serial == a.active {
		n := w
		n.agents[k].active, n.agents[k].other = a.other, a.active
		yield("flip", n)
	}
	if a.other != 0 && a.dial == 0 && w.fallbacks < b.fallbacks {
		// The handshake with the certificate in use was refused somewhere.
		n := w
		n.fallbacks++
		n.agents[k].active, n.agents[k].other = a.other, a.active
		yield("fall back", n)
	}
	if a.sess != 0 && w.renewals < b.renewals {
		w.askRenewal(k, yield)
	}
}

func (w world) askRenewal(k int, yield func(step string, next world)) {
	a := w.agents[k]
	keys := []int8{}
	if a.pending != 0 {
		keys = append(keys, a.pending)
	}
	if w.keys < serials {
		keys = append(keys, w.keys+1)
	}
	for _, key := range keys {
		for i := range w.mail {
			if w.mail[i].state != 0 {
				continue
			}
			n := w
			n.renewals++
			n.keys = max(n.keys, key)
			n.agents[k].pending = key
			n.mail[i] = mail{state: 1, key: key, sessID: w.conns[a.sess-1].id, slot: a.sess - 1, owner: uint8(k)}
			yield("ask renewal", n)
			break
		}
	}
}
