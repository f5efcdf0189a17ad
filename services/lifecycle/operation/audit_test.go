package operation

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Each decision has an audit entry; a request that is joined or refused has one entry, however often it is repeated; a
// dry run has none.
func TestDecisionsAreAudited(t *testing.T) {
	b := newBed(t, nil)
	log, err := audit.New(audit.Deps{
		Logger: testkit.Logger(t), Pool: b.db.Pool("lifecycle"), Schema: "lifecycle", Policy: policy.Fixed{},
		Wake: &events.Signal{},
	})
	if err != nil {
		t.Fatal(err)
	}
	b.server.deps.Audit = log
	b.tenant("acme")
	ctx := rpc.WithPerson(t.Context(), rpc.Person{Subject: "ana", Roles: []string{"operator"}})
	op, err := b.create(ctx, "acme", "one", "k1", 1)
	if err != nil {
		t.Fatal(err)
	}
	operate := func(kind commonv1.OperationKind, dry bool) error {
		_, err := b.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
			Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: op.GetWorkspaceId()},
			Reason: "stalled", DryRun: dry,
		})
		return err
	}
	for range 3 {
		if _, err := b.create(ctx, "acme", "one", "k1", 1); err != nil { // the key returns the same operation again
			t.Fatal(err)
		}
		if joined, err := b.create(ctx, "acme", "one", "", 1); err != nil || !joined.GetJoined() {
			t.Fatalf("%v, %v", joined, err)
		}
		want(t, operate(kReset, false), commonv1.Reason_REASON_PRECONDITION_FAILED)
		if operate(kReset, true) == nil {
			t.Fatal("a dry run of a reset is possible")
		}
	}
	if err := operate(kCancel, false); err != nil {
		t.Fatal(err)
	}
	rows, err := b.db.Pool("lifecycle").Query(t.Context(),
		`SELECT payload->>'action' || ' ' || (payload->>'outcome') || ' ' || COALESCE(payload->>'actor', '')
		FROM events.event WHERE kind = $1 ORDER BY seq`, audit.Kind)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	expect := []string{
		"tenant.create done ", "workspace.create done ana", "workspace.create.join done ana",
		"workspace.reset refused ana", "workspace.cancel done ana",
	}
	if !slices.Equal(got, expect) {
		t.Errorf("entries: %q, want %q", got, expect)
	}
}
