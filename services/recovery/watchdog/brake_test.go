package watchdog_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// rows returns, as text, the versions of the rows of the brake, of records, of incidents and of budgets, and the
// transactions that wrote or locked them last.
func (k *kit) rows() string {
	k.t.Helper()
	var out string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT concat_ws(E'\n',
		(SELECT string_agg(concat_ws(' ', 'brake', x.version, x.xmin, x.xmax), E'\n') FROM recovery.brake x),
		(SELECT string_agg(concat_ws(' ', 'record', x.record_id, x.version, x.xmin, x.xmax), E'\n' ORDER BY x.record_id)
			FROM recovery.recovery_record x),
		(SELECT string_agg(concat_ws(' ', x.kind, x.incident_id, x.version, x.xmin, x.xmax), E'\n' ORDER BY x.incident_id)
			FROM recovery.incident x),
		(SELECT string_agg(concat_ws(' ', x.scope, x.key, x.xmin, x.xmax), E'\n' ORDER BY x.scope, x.key)
			FROM recovery.churn_bucket x))`).Scan(&out))
	return out
}

// wantQuiet makes a round, and checks that it neither writes nor locks a row of rows: a row lock is written to the row.
func (k *kit) wantQuiet() {
	k.t.Helper()
	before := k.rows()
	k.round()
	if diff := cmp.Diff(before, k.rows()); diff != "" {
		k.t.Errorf("a round that changed nothing has locked or written rows (-before +after):\n%s", diff)
	}
}

// TestARoundThatChangesNothingLocksNoRow checks that such a round writes to no row of the brake, of records, of
// incidents and of budgets, also while recoveries are withheld and incidents are open.
func TestARoundThatChangesNothingLocksNoRow(t *testing.T) {
	t.Run("nothing is wrong", func(t *testing.T) {
		k := newKit(t)
		k.round()
		if n := k.count(`SELECT count(*) FROM recovery.brake WHERE xmax <> 0`); n != 0 {
			t.Error("a round that changed nothing has locked the row of the brake")
		}
	})
	t.Run("a machine is away", func(t *testing.T) {
		k := newKit(t)
		node := ids.New()
		kept, withheld := k.up("acme", "one", byStatic, node), k.up("acme", "two", byStatic, node)
		k.start(withheld, kRecreate, ids.New(), asked, recreating)
		k.owner.set(func() {
			k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
				return &lifecyclev1.Operation{
					OperationId: withheld.run.GetRunId(), WorkspaceId: r.GetWorkspaceId(), Joined: true,
				}, nil
			}
		})
		k.stall(withheld, 1)
		k.detect()
		k.lose(kept)
		k.lose(withheld)
		k.listen(130 * time.Second)
		k.fail(withheld, 1, "deadline_of_step_exceeded")
		k.round()
		n := k.count(`SELECT (SELECT count(*) FROM recovery.recovery_record
			WHERE withheld_by = 'machine' AND ended_at IS NULL)
			+ (SELECT count(*) FROM recovery.incident WHERE kind = 'machine_unreachable' AND closed_at IS NULL)`)
		if n != 2 {
			t.Fatalf("not one withheld record and one incident: %s", k.rows())
		}
		k.wantQuiet()
	})
	t.Run("a budget is used up", func(t *testing.T) {
		k := newKit(t)
		k.policySet("churn.recreates_per_hour", "1")
		k.detectAll(k.fleet(2))
		k.wantAsked(1)
		k.round()
		n := k.count(`SELECT (SELECT count(*) FROM recovery.recovery_record
			WHERE withheld_by = 'placement:process' AND ended_at IS NULL)
			+ (SELECT count(*) FROM recovery.incident WHERE kind = 'churn_budget' AND closed_at IS NULL)`)
		if n != 2 {
			t.Fatalf("not one withheld record and one incident: %s", k.rows())
		}
		k.wantQuiet()
	})
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
