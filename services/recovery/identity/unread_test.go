package identity_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/fences"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// wantUnread requires that a node is told to wait because its record cannot be read.
func wantUnread(t *testing.T, what string, d *commonv1.Denial) {
	t.Helper()
	if d.GetReason() != commonv1.Reason_REASON_RECORD_UNREADABLE || d.GetAction() != commonv1.Action_ACTION_WAIT ||
		d.GetRetryAfter().AsDuration() <= 0 {
		t.Errorf("%s: %v", what, d)
	}
}

// In a batch of openings one node's state, another's certificate and a third one's refusal are of a newer build: the
// first two wait, the third and all others are welcomed, no node is put on hold, and no stored value is overwritten.
func TestUnknownValuesOfANodeStopNoOther(t *testing.T) {
	b := newBench(t)
	state, serial, refusal, plain := b.enrolled("state"), b.enrolled("serial"), b.enrolled("refusal"), b.enrolled("plain")
	for _, n := range []*node{state, serial, refusal, plain} {
		b.admit(n)
	}
	b.tx(func(tx pgx.Tx) error {
		r, err := identity.LockOne(b.ctx, tx, state.id)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(b.ctx, tx)
		if err != nil {
			return err
		}
		r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, "ada", "test", m.Now, m.Era)
		f, err := identity.LockOne(b.ctx, tx, refusal.id)
		if err != nil {
			return err
		}
		f.RefusedRegisters, f.LastRefusal = 1, commonv1.Reason_REASON_QUOTA_EXCEEDED
		_, err = identity.Save(b.ctx, tx, r, f)
		return err
	})
	if _, err := b.pool.Exec(b.ctx, `UPDATE recovery.serial SET state = 'superseded' WHERE node_id = $1`,
		serial.id); err != nil {
		t.Fatal(err)
	}
	testkit.WithoutValue(t, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED)
	testkit.WithoutValue(t, commonv1.SerialState_SERIAL_STATE_SUPERSEDED)
	testkit.WithoutValue(t, commonv1.Reason_REASON_QUOTA_EXCEEDED)
	results, _, err := b.identities.Open(b.ctx,
		[]*recoveryv1.OpenSession{b.hello(state), b.hello(serial), b.hello(refusal), b.hello(plain)})
	if err != nil {
		t.Fatal(err)
	}
	wantUnread(t, "a node with an unknown state", results[0].GetDenial())
	wantUnread(t, "a node with a certificate of an unknown state", results[1].GetDenial())
	wantWelcome(t, results[2])
	wantWelcome(t, results[3])
	// A value that this build does not know stays as it is when this build writes the row.
	b.tx(func(tx pgx.Tx) error {
		for _, n := range []*node{state, refusal} {
			r, err := identity.LockOne(b.ctx, tx, n.id)
			if err != nil {
				return err
			}
			if _, err := identity.SaveQuietly(b.ctx, tx, r); err != nil {
				return err
			}
		}
		return nil
	})
	if got := b.text(`SELECT state FROM recovery.identity WHERE node_id = $1`, state.id); got != "quarantined" {
		t.Errorf("the state has become %q", got)
	}
	if got := b.text(`SELECT last_refusal FROM recovery.identity WHERE node_id = $1`,
		refusal.id); got != "quota_exceeded" {
		t.Errorf("the refusal has become %q", got)
	}
	if got := b.text(`SELECT count(*)::text FROM recovery.identity WHERE state = 'held'`); got != "0" {
		t.Errorf("%s nodes are held", got)
	}
}

// Of two sessions that are opened once more with others, one was answered with a reason that this build does not know:
// its node waits, the others are welcomed.
func TestAnUnknownAnswerStopsNoOtherSession(t *testing.T) {
	b := newBench(t)
	reported := testkit.SetAside(t, "session")
	odd, again, fresh := b.enrolled("odd"), b.enrolled("again"), b.enrolled("fresh")
	list := []*recoveryv1.OpenSession{b.hello(odd), b.hello(again)}
	if _, _, err := b.identities.Open(b.ctx, list); err != nil {
		t.Fatal(err)
	}
	if _, err := b.pool.Exec(b.ctx, `UPDATE recovery.session_open SET answer = 'quota_exceeded' WHERE session_id = $1`,
		list[0].GetSessionId()); err != nil {
		t.Fatal(err)
	}
	testkit.WithoutValue(t, commonv1.Reason_REASON_QUOTA_EXCEEDED)
	results, _, err := b.identities.Open(b.ctx, append(list, b.hello(fresh)))
	if err != nil {
		t.Fatal(err)
	}
	wantUnread(t, "a session with an unknown answer", results[0].GetDenial())
	wantWelcome(t, results[1])
	wantWelcome(t, results[2])
	if n := reported(); n != 1 {
		t.Errorf("%d sessions were reported", n)
	}
}

// The fences of the other nodes are sent to lifecycle; a node in an unknown state is left to a replica whose build
// knows it.
func TestAnUnknownStateStopsNoNotice(t *testing.T) {
	b := newBench(t)
	odd, plain := b.enrolled("odd"), b.enrolled("plain")
	b.tx(func(tx pgx.Tx) error {
		r, err := identity.LockOne(b.ctx, tx, odd.id)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(b.ctx, tx)
		if err != nil {
			return err
		}
		r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, "ada", "test", m.Now, m.Era)
		_, err = identity.Save(b.ctx, tx, r)
		return err
	})
	testkit.WithoutValue(t, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED)
	g := &gate{high: map[string]int64{}}
	notifier, err := fences.New(fences.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Gate: g,
		Notices: b.notices,
	},
		fences.Config{Poll: 20 * time.Millisecond, Retry: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan error, 1)
	go func() { done <- notifier.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.get(plain); r.Notice != r.NoticeAcked {
			return fmt.Errorf("told %d of %d", r.NoticeAcked, r.Notice)
		}
		return nil
	})
	if call := g.last(odd.id); call != nil {
		t.Errorf("lifecycle was told %v of a state that is not known", call)
	}
}
