package actions_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

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
