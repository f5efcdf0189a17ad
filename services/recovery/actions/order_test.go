package actions_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// Scenario: the sessions of many nodes are confirmed while the judge has the actions of some of them. The confirmation
// waits for the first one in the order of nodes, and holds none of those behind it: the judge may need them.
func TestSessionsAreNotedInTheOrderOfNodes(t *testing.T) {
	k := newKit(t)
	nodes := []string{ids.New(), ids.New()}
	slices.Sort(nodes)
	first, second := nodes[0], nodes[1]
	for _, node := range []string{second, first} { // as they lie in the table
		k.in(func(ctx context.Context, tx pgx.Tx) error {
			_, err := actions.Enrolled(ctx, tx, actions.Beginning{
				NodeID: node, Kind: actions.ReEnrolment, Requester: actions.Automatic,
			}, "certificate 01 was issued")
			return err
		})
	}
	release, held, noted := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	go func() {
		noted <- pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			if _, err := actions.Open(ctx, tx, first); err != nil {
				return err
			}
			close(held)
			select {
			case <-release:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	<-held
	go func() {
		noted <- pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			found, err := actions.NoteSessions(ctx, tx, []string{second, first})
			if err == nil && len(found) != 2 {
				err = fmt.Errorf("noted %v", found)
			}
			return err
		})
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting int
		err := k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%session_at%'`).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("the confirmation does not wait")
		}
		return err
	})
	if _, err := k.db.OwnerPool().Exec(k.ctx, `SELECT FROM recovery.recovery_action
		WHERE node_id = $1 FOR UPDATE NOWAIT`, second); err != nil {
		t.Errorf("the action of the second node: %v", err)
	}
	close(release)
	for range 2 {
		k.must(<-noted)
	}
}

// Scenario: a person is given a bundle for a node that still tries by itself. Both go on under one correlation id until
// the token is used, shortly before it ends: from then on the bundle has the time of a recovery.
func TestABundleTakesThePlaceOfTheNodesOwnRecoveryAsItIsUsed(t *testing.T) {
	k := newKit(t)
	rejected := actions.Beginning{
		NodeID: ids.New(), Kind: actions.ReEnrolment, Reason: expired, Requester: actions.Automatic,
		CorrelationID: "rejected-1", RejectedAt: time.Now().Add(-time.Minute).UTC().Truncate(time.Millisecond),
	}
	bundle := actions.Beginning{NodeID: rejected.NodeID, Kind: actions.Bundle, Requester: "ada", Within: 2 * time.Hour}
	issue := func() {
		t.Helper()
		k.in(func(ctx context.Context, tx pgx.Tx) error {
			_, err := actions.Issued(ctx, tx, bundle)
			return err
		})
	}
	open := func(want ...actions.Kind) map[actions.Kind]*recoveryv1.RecoveryAction {
		t.Helper()
		out := map[actions.Kind]*recoveryv1.RecoveryAction{}
		for _, a := range k.list(rejected.NodeID, actions.StateOpen) {
			out[a.GetKind()] = a
		}
		for _, kind := range want {
			if out[kind] == nil || len(out) != len(want) {
				t.Fatalf("open are %v, want %v", out, want)
			}
		}
		return out
	}
	issue() // before anything is refused
	bundle.Within = 4 * time.Hour
	issue() // again, with a token that ends later
	list := open(actions.Bundle)
	if a := list[actions.Bundle]; a.GetFailsAt().AsTime().Sub(a.GetBegunAt().AsTime()) < 4*time.Hour {
		t.Errorf("it fails before its token ends: %v", a)
	}
	k.begin(rejected)
	open(actions.ReEnrolment, actions.Bundle)
	testkit.SetClockOffset(k.db, 4*time.Hour-time.Second)
	var correlation string
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		correlation, err = actions.Enrolled(ctx, tx, bundle, "certificate 01 was issued")
		return err
	})
	a := open(actions.Bundle)[actions.Bundle]
	if correlation != "rejected-1" || a.GetCorrelationId() != "rejected-1" || a.GetReason() != expired ||
		!a.GetFirstRejectedAt().AsTime().Equal(rejected.RejectedAt) || a.GetEffectAt() == nil {
		t.Errorf("%s, %v", correlation, a)
	}
	if left := a.GetFailsAt().AsTime().Sub(a.GetEffectAt().AsTime()); left < time.Minute {
		t.Errorf("the recovery has %s", left)
	}
	for _, a := range k.list(rejected.NodeID, actions.StateSuperseded) {
		if a.GetKind() != actions.ReEnrolment || a.GetOutcome() != "bundle by ada" {
			t.Errorf("%v", a)
		}
	}
	bundle.NodeID = ids.New()
	rejected.NodeID = bundle.NodeID
	k.begin(rejected)
	issue() // after the rejection
	for kind, a := range open(actions.ReEnrolment, actions.Bundle) {
		if a.GetCorrelationId() != "rejected-1" {
			t.Errorf("%v: %v", kind, a)
		}
	}
}
