package identity_test

import (
	"testing"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// accept ends rollback mode as a person's acceptance does.
func (b *bench) accept(t *testing.T) {
	t.Helper()
	server, err := rollback.New(rollback.Deps{Logger: testkit.Logger(t), Pool: b.pool})
	if err != nil {
		t.Fatal(err)
	}
	ctx := rpc.WithPerson(b.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	if _, err := server.AcceptRollback(ctx, &recoveryv1.AcceptRollbackRequest{Reason: "compared"}); err != nil {
		t.Fatal(err)
	}
}
