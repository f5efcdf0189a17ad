package audit_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: the connection is lost after the server has committed counts, in a round that writes them and in the
// decision that ends their window. Each refusal is counted once.
func TestACommitOfUnknownOutcomeIsNotCountedTwice(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	pool, lose := testkit.LossyPool(t, w.db.URL(pg.RoleLifecycle))
	log, err := audit.New(audit.Deps{
		Logger: testkit.Logger(t), Pool: pool, Schema: pg.RoleLifecycle, Policy: policy.Fixed{Set: policy.Defaults()},
		Wake: &events.Signal{},
	})
	if err != nil {
		t.Fatal(err)
	}
	entry := audit.Entry{
		Action: "workspace.reset", Outcome: audit.Refused, SubjectType: "workspace", SubjectID: ids.New(), Reason: "no",
	}
	repeat := func(n int) {
		t.Helper()
		for range n {
			if err := log.Repeated(ctx, entry); err != nil {
				t.Fatal(err)
			}
		}
	}
	round := func() error { return log.RunOnce(ctx) }
	repeat(4)
	lose()
	if err := round(); !errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("the round whose commit was not answered: %v", err)
	}
	if err := round(); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := w.db.Pool(pg.RoleLifecycle).QueryRow(ctx,
		`SELECT count FROM lifecycle.audit_window`).Scan(&n); err != nil || n != 4 {
		t.Fatalf("%d of 4 are counted: %v", n, err)
	}
	repeat(3)
	lose()
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := log.Record(ctx, tx, audit.Entry{
			Action: entry.Action, SubjectType: entry.SubjectType, SubjectID: entry.SubjectID,
		})
		return err
	})
	if !errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("the decision whose commit was not answered: %v", err)
	}
	if err := round(); err != nil {
		t.Fatal(err)
	}
	got := w.entries(t)
	if len(got) != 3 || got[1].GetCount() != 7 || got[1].GetDetails().AsMap()["recovered"] != "true" {
		t.Fatalf("entries: %v", got)
	}
	if err := w.db.Pool(pg.RoleLifecycle).QueryRow(ctx,
		`SELECT count(*) FROM lifecycle.audit_window`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d windows are left: %v", n, err)
	}
}
