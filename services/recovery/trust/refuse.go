package trust

import (
	"context"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// retryAfter is the least wait of an agent that asks for a certificate while none is issued: two checks end a mismatch.
const retryAfter = 30 * time.Second

// Refuse returns a fault while the ingress refuses the certificates that the authority issues: a good certificate must
// not be replaced by one that is refused. Agents wait on it. Enrolment calls it in the transaction of each claim,
// before it takes the claim, and of each certificate that it stores.
func Refuse(ctx context.Context, q pg.Querier) error {
	row, err := readPreflight(ctx, q)
	if err != nil {
		return err
	}
	return row.refusal()
}

// refusal returns the fault. Its text names no replica and no address: agents get it, and everybody who may read the
// status of the mesh.
func (r *preflightRow) refusal() error {
	if r.State != stateMismatch {
		return nil
	}
	public := "no certificate is issued: the ingress does not trust the issuer"
	if r.Side != "" {
		public = "no certificate is issued: the ingress and the authority do not agree, and the " + r.Side + " has changed"
	}
	return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, public, fault.RetryAfter(retryAfter),
		fault.Remedy(r.NextAction))
}
