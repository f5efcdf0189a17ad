package keyset

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// TestTheKeyOfTasksIsRotatedByReplicasOfThisBuildAlone refuses a rotation while a replica of lifecycle does not wait
// for agents, or one of nodeapi does not send them keys, and names it; then the key waits until it is distributed, and
// signs.
func TestTheKeyOfTasksIsRotatedByReplicasOfThisBuildAlone(t *testing.T) {
	b := newBench(t)
	files := FilesOf(filepath.Join(t.TempDir(), "tasks.pem"))
	missing := "agents that have not stored it: n1"
	part := Part{
		Kind: TaskSigning, Signs: true, Files: files,
		Distributed: func(context.Context, pg.Querier, Key) (string, error) { return missing, nil },
	}
	now, err := b.open(pg.RoleLifecycle, part)
	if err != nil {
		t.Fatal(err)
	}
	first := now.signs()
	ask := func(key string) error {
		return pg.InTx(b.ctx, b.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := Ask(ctx, tx, Request{Kind: TaskSigning, IdempotencyKey: key, By: "ada", Reason: "yearly"})
			return err
		})
	}
	part.Distributed = nil
	before, err := b.open(pg.RoleLifecycle, part)
	if err != nil {
		t.Fatal(err)
	}
	refusedWith(t, ask("r1"), commonv1.Reason_REASON_PRECONDITION_FAILED, before.id, "update these replicas")
	stop(b, before)
	// A nodeapi of the previous build reports only the keys of join states.
	join := b.signer(t.TempDir())
	earlier, _ := b.verifier(join)
	refusedWith(t, ask("r1"), commonv1.Reason_REASON_PRECONDITION_FAILED, earlier.id)
	stop(b, earlier)
	relay, err := b.open(pg.RoleNodeAPI, Part{Kind: TaskSigning, Relays: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := ask("r1"); err != nil {
		t.Fatal(err)
	}
	b.round(now)
	b.later(leastAge, now, relay)
	next := relay.view.Rows[len(relay.view.Rows)-1]
	if next.State != VerifyOnly || next.EndorsedBy != first {
		t.Fatalf("the relay passes on %+v", relay.view.Rows)
	}
	b.round(now)
	if rows, err := ReadKeys(b.ctx, b.db.Pool(pg.RoleRecovery)); err != nil || now.signs() != first ||
		needOf(rows, next.KeyID) != missing {
		t.Fatalf("%s signs, the next waits for %q, %v", now.signs(), needOf(rows, next.KeyID), err)
	}
	missing = ""
	b.round(now, relay)
	if now.signs() != next.KeyID {
		t.Errorf("%s signs, want %s", now.signs(), next.KeyID)
	}
}

func needOf(rows []Key, id string) string {
	for _, row := range rows {
		if row.KeyID == id {
			return row.NeededBy
		}
	}
	return ""
}

// stop deletes a replica's row, as its orderly end does.
func stop(b *bench, u *unit) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	if err := u.Run(ctx); err != nil {
		b.t.Fatal(err)
	}
}
