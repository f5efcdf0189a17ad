package allocation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// openRoomSQL is the condition, over node_room r, that a machine takes a workspace of $1 GPUs. A claim that was given
// up there and may still use devices excludes the machine, whether or not it is cordoned; $2 are the kinds of such
// claims.
const openRoomSQL = `r.open AND r.used < r.slots AND r.failed = 0 AND NOT EXISTS (SELECT 1
	FROM lifecycle.resource_claim o
		WHERE o.node_id = r.node_id AND o.kind = ANY ($2) AND o.orphaned_at IS NOT NULL AND o.released_at IS NULL)`

// candidatesSQL are the machines with the fewest workspaces among those that take one: the first of each replica and of
// each number of free GPUs, by the index, so that the number of rows that are read depends on neither machines nor
// workspaces.
var candidatesSQL = `
		SELECT c.node_id, c.used FROM mesh.replica s
		CROSS JOIN generate_series($1::integer, (SELECT max(devices) FROM lifecycle.node_room WHERE open)) AS level (free)
		CROSS JOIN LATERAL (SELECT r.node_id, r.used FROM lifecycle.node_room r
			WHERE r.replica_id = s.replica_id AND r.free = level.free AND ` + openRoomSQL + `
			ORDER BY r.used, r.node_id LIMIT 16) c
		WHERE ` + gate.LivingReplicaSQL + `
		ORDER BY c.used, c.node_id LIMIT 16`

var (
	anyRoom = pg.Define(pg.RoleLifecycle, "allocation.any_room", `SELECT EXISTS (`+candidatesSQL+`)`)

	// lockRoom passes over machines that another transaction is placing on, waitForRoom waits for it.
	lockRoom     = pg.Define(pg.RoleLifecycle, "allocation.lock_room", lockRoomSQL+` SKIP LOCKED`)
	waitForRoom  = pg.Define(pg.RoleLifecycle, "allocation.wait_for_room", lockRoomSQL)
	freeSlotOf   = pg.Define(pg.RoleLifecycle, "allocation.free_slot_of", freeSlotSQL)
	recountRoom  = pg.Define(pg.RoleLifecycle, "allocation.recount_room", recountRoomSQL)
	roomsOfDisks = pg.Define(pg.RoleLifecycle, "allocation.machines_without_room", `
		SELECT count(*) FROM lifecycle.node_gate g
		WHERE g.host->'stateDisk'->>'full' = 'true' AND g.admitted AND NOT g.retired AND g.instance_id IS NULL
			AND `+gate.ConnectedSQL)
)

var lockRoomSQL = `
		SELECT r.node_id::text FROM lifecycle.node_room r JOIN (` + candidatesSQL + `) c USING (node_id)
		WHERE r.free >= $1 AND ` + openRoomSQL + `
		ORDER BY c.used, c.node_id LIMIT 1 FOR UPDATE OF r`

const (
	freeSlotSQL = `
		SELECT n FROM lifecycle.node_room r CROSS JOIN LATERAL generate_series(0, r.slots - 1) n
		WHERE r.node_id = $1 AND NOT EXISTS (SELECT 1 FROM lifecycle.allocation a
			WHERE a.node_id = r.node_id AND a.slot = n AND a.state <> 'released')
		ORDER BY n LIMIT 1`
	recountRoomSQL = `
		UPDATE lifecycle.node_room r SET used = x.used, held = x.held, failed = x.failed
		FROM (SELECT count(*) AS used, coalesce(sum(a.gpus), 0) AS held,
			count(*) FILTER (WHERE a.state = 'release_failed') AS failed
			FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state <> 'released' AND a.slot IS NOT NULL) x
		WHERE r.node_id = $1`
)

// roomTries is how many machines may turn out to have a wrong count before the step fails for want of room.
const roomTries = 64

// TakeSlot takes a slot on the machine with the fewest workspaces among those that are admitted, connected, not
// cordoned and have the devices. The machine's room stays locked until the transaction ends; nothing else of the
// transaction may be locked after it.
func TakeSlot(ctx context.Context, tx pgx.Tx, gpus int32) (string, int32, error) {
	for range roomTries {
		node, err := lockedRoom(ctx, tx, gpus)
		if err != nil {
			return "", 0, err
		}
		// The slots are read after the lock: the transaction that had it before has ended.
		var slot int32
		err = pg.QueryRow(ctx, tx, freeSlotOf, node).Scan(&slot)
		if err == nil {
			return node, slot, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return "", 0, fmt.Errorf("pick slot: %w", err)
		}
		// Only a row that was changed by hand counts a slot that is not there.
		if _, err := pg.Exec(ctx, tx, recountRoom, node); err != nil {
			return "", 0, fmt.Errorf("count room of machine: %w", err)
		}
	}
	return "", 0, noMachine(ctx, tx, gpus)
}

// Machines with room may all be locked by other transactions that place workspaces, each for a few milliseconds. The
// transaction tries them again every roomPause, and after roomWait it waits for the lock of the first.
const (
	roomPause = 5 * time.Millisecond
	roomWait  = 2 * time.Second
)

// lockedRoom locks the room of a machine that takes a workspace.
func lockedRoom(ctx context.Context, tx pgx.Tx, gpus int32) (string, error) {
	statement := lockRoom
	for began := time.Now(); ; {
		var node string
		err := pg.QueryRow(ctx, tx, statement, gpus, occupying()).Scan(&node)
		if err == nil {
			return node, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return "", fmt.Errorf("pick machine: %w", err)
		}
		if err := HasRoom(ctx, tx, gpus); err != nil {
			return "", err
		}
		if time.Since(began) > roomWait {
			statement = waitForRoom
		} else if !app.Sleep(ctx, roomPause) {
			return "", context.Cause(ctx)
		}
	}
}

// HasRoom returns nil if a workspace could be placed now, and otherwise the failure that placing it would be.
func HasRoom(ctx context.Context, tx pgx.Tx, gpus int32) error {
	there, err := pg.Value[bool](ctx, tx, anyRoom, gpus, occupying())
	if err != nil {
		return fmt.Errorf("look for room: %w", err)
	}
	if !there {
		return noMachine(ctx, tx, gpus)
	}
	return nil
}

// noMachine returns the failure to pick a machine. Machines that are left out for their disks alone are counted in it.
func noMachine(ctx context.Context, tx pgx.Tx, gpus int32) error {
	full, err := pg.Value[int](ctx, tx, roomsOfDisks)
	if err != nil {
		return fmt.Errorf("count machines without room: %w", err)
	}
	text := fmt.Sprintf("no enrolled machine has a free slot and %d free GPUs", gpus)
	if full > 0 {
		text += fmt.Sprintf("; %d connected machines take nothing new, since their agents' state directories have no room",
			full)
	}
	return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_NO_CAPACITY, text, nil)
}
