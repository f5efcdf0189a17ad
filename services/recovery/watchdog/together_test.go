package watchdog_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// TestSessionsThatAreReadTogether checks that the events of sessions have the same effect together as one by one,
// whatever their order: of a session that is late and comes back, of one that ends before or after the next one begins,
// and of one whose events come twice or in the wrong order.
func TestSessionsThatAreReadTogether(t *testing.T) {
	k := newKit(t)
	began := k.now()
	var list []events.Record
	add := func(s *nodev1.SessionChanged, version int64) {
		s.ReplicaId = k.replica
		raw, err := protojson.Marshal(s)
		k.must(err)
		list = append(list, events.Record{
			Kind: "session.changed", AggregateVersion: version, Stored: raw,
			CreatedAt: began.Add(time.Duration(len(list)) * time.Second),
		})
	}
	const (
		admitted = commonv1.SessionState_SESSION_STATE_ADMITTED
		closed   = commonv1.SessionState_SESSION_STATE_CLOSED
	)
	for n := range 3 {
		node, first, second := ids.New(), ids.New(), ids.New()
		event := func(id string, generation int64, state commonv1.SessionState, late bool, version int64) {
			add(&nodev1.SessionChanged{
				SessionId: id, NodeId: node, Generation: generation, State: state, Late: late,
			}, version)
		}
		event(first, 1, admitted, false, 1)
		event(first, 1, admitted, true, 2)
		event(first, 1, admitted, false, 3)
		if n == 1 {
			event(first, 1, closed, false, 4)
		}
		event(second, 2, admitted, false, 1)
		if n == 2 {
			event(first, 1, closed, false, 4)
			event(first, 1, admitted, false, 3)
		}
		event(second, 2, admitted, n == 0, 2)
	}
	undo := errors.New("undo")
	result := func(do func(ctx context.Context, tx pgx.Tx) error) string {
		t.Helper()
		var out string
		err := pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			if err := do(ctx, tx); err != nil {
				return err
			}
			err := tx.QueryRow(ctx, `SELECT string_agg(to_jsonb(x)::text, E'\n' ORDER BY x.session_id)
				FROM recovery.watch_session x`).Scan(&out)
			return errors.Join(err, undo)
		})
		if !errors.Is(err, undo) || out == "" {
			t.Fatalf("%q: %v", out, err)
		}
		return out
	}
	single := result(func(ctx context.Context, tx pgx.Tx) error {
		for _, r := range list {
			if err := watchdog.Apply(ctx, tx, r); err != nil {
				return fmt.Errorf("apply: %w", err)
			}
		}
		return nil
	})
	together := result(func(ctx context.Context, tx pgx.Tx) error { return watchdog.Together(ctx, tx, list) })
	if single != together {
		t.Errorf("one by one\n%s\ntogether\n%s", single, together)
	}
}
