package people

import (
	"bytes"
	"cmp"
	"context"
	"fmt"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// takeOver returns an error unless the token of a new person may replace a context: one of this mesh whose token is not
// valid, or one of the same person if the request has an idempotency key. If such a request is not the one that created
// the person, the mesh refuses it, and the context stays.
func takeOver(ctx context.Context, p *kit.Program, s *kit.Session, have contexts.Context,
	req *readmodelv1.CreatePersonRequest,
) error {
	taken := exit.Usage(fmt.Errorf("there is a context %q already: name another with --context-name", have.Name))
	if !isOf(s.Target, have) {
		return taken
	}
	asThat := s.Target
	asThat.Token = have.Token
	other, err := p.Dial(s.Printer, asThat)
	if err != nil {
		return err
	}
	defer other.Close()
	who, err := other.Query.WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
	switch {
	case fault.Has(err, commonv1.Reason_REASON_UNAUTHENTICATED):
		return nil // the session was ended, has expired, or was replaced
	case err != nil:
		return err
	case req.GetIdempotencyKey() != "" && who.GetSubject() == req.GetName():
		return nil
	}
	return taken
}

// isOf reports whether a context is for the mesh of the target and contains a token, which may then be sent to that
// mesh.
func isOf(t kit.Target, c contexts.Context) bool {
	return c.Server == t.Server && cmp.Or(c.TrustDomain, contexts.DefaultTrustDomain) == t.TrustDomain && c.Token != "" &&
		bytes.Equal([]byte(c.CAPEM), t.CA)
}
