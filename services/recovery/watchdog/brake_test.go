package watchdog_test

import (
	"context"
	"errors"
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// TestARoundThatChangesNothingLocksNoRow checks that such a round does not write to the row of the brake: a row lock is
// written to the row.
func TestARoundThatChangesNothingLocksNoRow(t *testing.T) {
	k := newKit(t)
	k.round()
	if n := k.count(`SELECT count(*) FROM recovery.brake WHERE xmax <> 0`); n != 0 {
		t.Error("a round that changed nothing has locked the row of the brake")
	}
}

// whileHeld runs fn while a replica of an earlier build has locked the row of the brake, has the replica engage the
// brake once fn waits for it, and returns when fn has ended. It fails if fn ends without having waited.
func (k *kit) whileHeld(fn func() error) error {
	k.t.Helper()
	tx, err := k.db.OwnerPool().Begin(k.ctx)
	k.must(err)
	defer tx.Rollback(context.WithoutCancel(k.ctx)) // it is committed below
	_, err = tx.Exec(k.ctx, `SELECT FROM recovery.brake FOR UPDATE`)
	k.must(err)
	ended := make(chan error, 1)
	go func() { ended <- fn() }()
	waited := true
	testkit.Eventually(k.t, testkit.Patience, func() error {
		select {
		case err = <-ended:
			waited = false
			return nil
		default:
		}
		if n := k.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
			AND usename = 'recovery'`); n != 1 {
			return errors.New("nothing waits for the row")
		}
		return nil
	})
	if !waited {
		k.t.Fatalf("it ended while another build held the row of the brake: %v", err)
	}
	_, err = tx.Exec(k.ctx, `UPDATE recovery.brake
		SET engaged = true, since = mesh.clock(), affected = affected + 3, version = version + 1`)
	k.must(err)
	k.must(tx.Commit(k.ctx))
	return <-ended
}

// TestARoundThatAsksWaitsForAnEarlierBuild checks that a round which requests a recreation decides under the lock that
// replicas of earlier builds take, and after reading what they have written under it.
func TestARoundThatAsksWaitsForAnEarlierBuild(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.lose(b)
	k.listen(130 * time.Second)
	k.round()
	k.wantOutcome(k.record(b), open)
	k.pass(6 * time.Second)
	k.beat()
	k.must(k.sequencer.Drain(k.ctx))
	k.must(k.w.Drain(k.ctx))
	var out watchdog.Round
	k.must(k.whileHeld(func() error {
		var err error
		out, err = k.w.RunOnce(k.ctx)
		return err
	}))
	if !out.Engaged || out.Asked != 0 {
		t.Errorf("after another build has engaged the brake: %+v", out)
	}
	k.wantAsked(0)
}

// TestAReleaseWaitsForAnEarlierBuild checks that a release of the brake does not overwrite what a replica of an earlier
// build writes meanwhile.
func TestAReleaseWaitsForAnEarlierBuild(t *testing.T) {
	k := newKit(t)
	ada := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	k.must(k.whileHeld(func() error {
		_, err := k.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "the switch was replaced"})
		return err
	}))
	if n := k.count(`SELECT count(*) FROM recovery.brake WHERE NOT engaged AND affected = 3 AND version = 2`); n != 1 {
		t.Error("the other's change was lost")
	}
}
