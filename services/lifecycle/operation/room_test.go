package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// rooms is a database with machines, with the changes that a test makes to them.
type rooms struct {
	t       *testing.T
	pool    *pgxpool.Pool
	replica string
	tenant  string
}

func newRooms(t *testing.T) *rooms {
	t.Helper()
	db := testkit.DB(t)
	r := &rooms{t: t, pool: db.Pool(pg.RoleLifecycle), replica: ids.New(), tenant: ids.New()}
	testkit.Beat(db, r.replica, "", 24*time.Hour, false)
	r.exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`, r.tenant, "t-"+r.tenant[24:])
	return r
}

func (r *rooms) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.pool.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

// machine makes a machine that is admitted and connected.
func (r *rooms) machine(slots, gpus int) string {
	r.t.Helper()
	id := ids.New()
	r.exec(`INSERT INTO lifecycle.node_gate (node_id, fence_epoch, admitted, session_open, replica_id, slots, host)
		SELECT $1, 1, true, true, $2, $3, jsonb_build_object('gpus', coalesce(jsonb_agg(jsonb_build_object('id', n)), '[]'))
		FROM generate_series(1, $4) n`, id, r.replica, slots, gpus)
	return id
}

// allocate inserts an allocation of a new workspace in a transaction that has taken a slot.
func (r *rooms) allocate(ctx context.Context, tx pgx.Tx, gpus int32) (string, string, int32, error) {
	node, slot, err := allocation.TakeSlot(ctx, tx, gpus)
	if err != nil {
		return "", "", 0, err
	}
	id, workspace := ids.New(), ids.New()
	if _, err = tx.Exec(ctx, `INSERT INTO lifecycle.workspace (id, tenant_id, name, spec, spec_digest, state,
		desired_state) VALUES ($1, $2, $3, '{}', 'd', 'active', 'active')`,
		workspace, r.tenant, "w-"+workspace); err == nil {
		_, err = tx.Exec(ctx, `INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state,
			placement, node_id, slot, gpus, occupancy)
			VALUES ($1, $2, $3, 1, 'active', 'static', $4, $5, $6, 'in_use')`, id, workspace, r.tenant, node, slot, gpus)
	}
	return id, node, slot, err
}

func (r *rooms) place(gpus int32) (string, string, int32, error) {
	var id, node string
	var slot int32
	err := pg.InTx(r.t.Context(), r.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		id, node, slot, err = r.allocate(ctx, tx, gpus)
		return err
	})
	return id, node, slot, err
}

// counted checks that the stored room of each machine equals a count of its allocations.
func counted(ctx context.Context, q *pgxpool.Pool) error {
	rows, err := q.Query(ctx, `
		SELECT r.node_id::text || ': kept ' || r.used || ' ' || r.held || ' ' || r.failed || ' ' || r.open || ', counted ' ||
			x.used || ' ' || x.held || ' ' || x.failed || ' ' || x.open
		FROM lifecycle.node_room r JOIN lifecycle.node_gate g USING (node_id) CROSS JOIN LATERAL (
			SELECT count(*) AS used, coalesce(sum(a.gpus), 0) AS held,
				count(*) FILTER (WHERE a.state = 'release_failed') AS failed,
				g.admitted AND NOT g.cordoned AND NOT g.retired AND g.session_open
					AND coalesce(g.host->'stateDisk'->>'full', '') <> 'true' AS open
			FROM lifecycle.allocation a WHERE a.node_id = r.node_id AND a.state <> 'released') x
		WHERE (r.used, r.held, r.failed, r.open) <> (x.used, x.held, x.failed, x.open)`)
	if err != nil {
		return err
	}
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil && len(wrong) > 0 {
		err = fmt.Errorf("%d machines: %v", len(wrong), wrong)
	}
	return err
}

// TestRoomIsKept checks that the stored room of machines is right in whatever order machines and allocations change,
// and that a workspace is placed exactly where a scan of all machines finds a place.
func TestRoomIsKept(t *testing.T) {
	t.Parallel()
	testkit.IO(t)
	r := newRooms(t)
	rapid.Check(t, func(rt *rapid.T) {
		r.exec(`UPDATE lifecycle.allocation SET state = 'released', occupancy = 'none'`)
		r.exec(`UPDATE lifecycle.node_gate SET retired = true`)
		var nodes, held []string
		rt.Repeat(map[string]func(*rapid.T){
			"machine": func(rt *rapid.T) {
				if len(nodes) < 3 {
					nodes = append(nodes, r.machine(rapid.IntRange(0, 3).Draw(rt, "slots"), rapid.IntRange(0, 3).Draw(rt, "gpus")))
				}
			},
			"place": func(rt *rapid.T) {
				gpus := rapid.Int32Range(0, 3).Draw(rt, "gpus")
				var want int
				err := r.pool.QueryRow(t.Context(), `
					SELECT count(*) FROM lifecycle.node_gate g CROSS JOIN LATERAL (
						SELECT count(*) AS used, coalesce(sum(a.gpus), 0) AS held,
							count(*) FILTER (WHERE a.state = 'release_failed') AS failed
						FROM lifecycle.allocation a WHERE a.node_id = g.node_id AND a.state <> 'released') x
					WHERE g.admitted AND NOT g.cordoned AND NOT g.retired AND g.session_open
						AND coalesce(g.host->'stateDisk'->>'full', '') <> 'true'
						AND x.used < g.slots AND x.failed = 0 AND jsonb_array_length(g.host->'gpus') - x.held >= $1`, gpus).Scan(&want)
				if err != nil {
					rt.Fatal(err)
				}
				id, _, _, err := r.place(gpus)
				refused, ok := errors.AsType[*saga.StepError](err)
				switch {
				case err == nil && want > 0:
					held = append(held, id)
				case ok && want == 0 && refused.Reason == commonv1.Reason_REASON_NO_CAPACITY:
				default:
					rt.Fatalf("%d machines take it, and: %v", want, err)
				}
			},
			"release": func(rt *rapid.T) {
				if len(held) == 0 {
					return
				}
				to := rapid.SampledFrom([][2]string{
					{"releasing", "cleanup"},
					{"released", "none"},
					{"release_failed", "cleanup"},
				}).Draw(rt, "to")
				r.exec(`UPDATE lifecycle.allocation SET state = $2, occupancy = $3
					WHERE allocation_id = $1 AND state <> 'released'`,
					rapid.SampledFrom(held).Draw(rt, "of"), to[0], to[1])
			},
			"gate": func(rt *rapid.T) {
				if len(nodes) == 0 {
					return
				}
				column := rapid.SampledFrom([]string{"admitted", "cordoned", "session_open", "retired"}).Draw(rt, "column")
				r.exec(`UPDATE lifecycle.node_gate SET `+column+` = NOT `+column+` WHERE node_id = $1`,
					rapid.SampledFrom(nodes).Draw(rt, "of"))
			},
			"disk": func(rt *rapid.T) {
				if len(nodes) == 0 {
					return
				}
				r.exec(`UPDATE lifecycle.node_gate
					SET host = host || jsonb_build_object('stateDisk', jsonb_build_object('full', $2::boolean)) WHERE node_id = $1`,
					rapid.SampledFrom(nodes).Draw(rt, "of"), rapid.Bool().Draw(rt, "full"))
			},
			"": func(rt *rapid.T) {
				if err := counted(t.Context(), r.pool); err != nil {
					rt.Fatal(err)
				}
			},
		})
	})
}

// TestPlacesAreTakenAtOnce checks that many transactions that place at the same time fill every slot and none twice,
// that none waits for a machine while another is free, and that the next one fails for want of room.
func TestPlacesAreTakenAtOnce(t *testing.T) {
	testkit.IO(t)
	r := newRooms(t)
	const machines, slots = 4, 4
	for range machines {
		r.machine(slots, 0)
	}
	// The first stays in its transaction until all others have ended: none of them waits for its machine.
	begun, end := make(chan string), make(chan struct{})
	var first sync.WaitGroup
	first.Go(func() {
		err := pg.InTx(t.Context(), r.pool, func(ctx context.Context, tx pgx.Tx) error {
			_, node, slot, err := r.allocate(ctx, tx, 0)
			begun <- fmt.Sprint(node, "/", slot)
			<-end
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
	taken := []string{<-begun}
	var mu sync.Mutex
	var others sync.WaitGroup
	for range (machines - 1) * slots {
		others.Go(func() {
			_, node, slot, err := r.place(0)
			mu.Lock()
			defer mu.Unlock()
			taken = append(taken, fmt.Sprint(node, "/", slot))
			if err != nil {
				t.Error(err)
			}
		})
	}
	others.Wait()
	close(end)
	first.Wait()
	for range slots - 1 {
		_, node, slot, err := r.place(0)
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, fmt.Sprint(node, "/", slot))
	}
	slices.Sort(taken)
	if n := len(slices.Compact(taken)); n != machines*slots {
		t.Errorf("%d slots are taken, not %d: %v", n, machines*slots, taken)
	}
	if _, _, _, err := r.place(0); err == nil {
		t.Error("a workspace is placed where nothing is free")
	}
	// Counts that were changed by hand are corrected.
	r.exec(`UPDATE lifecycle.node_room SET used = 0`)
	if _, _, _, err := r.place(0); err == nil {
		t.Error("a workspace is placed where nothing is free, as the count was wrong")
	}
}
