package enrol

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
)

// ReportMissing reports to enrolment, over the pinned way, that this host is the node of an expired certificate, and
// that it has no recovery token to send, or has lost the key that proves the token. It reports whether enrolment has
// taken note. Enrolment refuses each such request, so that the error is never nil.
func (e *Enroller) ReportMissing(ctx context.Context, nodeID string, cert *tls.Certificate, keyLost bool) (bool,
	error,
) {
	key, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return false, fmt.Errorf("certificate has a key of type %T", cert.PrivateKey)
	}
	public, err := recoverykey.Public(key)
	if err != nil {
		return false, err
	}
	serial := pki.SerialString(cert.Leaf.SerialNumber)
	proof, err := recoverykey.SignMissing(key, nodeID, serial)
	if err != nil {
		return false, err
	}
	client, err := e.client()
	if err != nil {
		return false, err
	}
	facts := e.deps.Facts()
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Timeout)
	defer cancel()
	_, err = client.Enroll(ctx, &recoveryv1.EnrollRequest{
		AgentVersion: facts.AgentVersion, BootId: facts.BootID, CorrelationId: facts.CorrelationID,
		TokenMissing: &recoveryv1.TokenMissing{
			NodeId: nodeID, Serial: serial, PublicKey: public, Proof: proof, KeyLost: keyLost,
		},
	})
	if err == nil {
		return true, errors.New("enrolment has not refused a request without a token")
	}
	err = understand(err)
	_, answered := fault.As(err)
	return answered && !busy(err), err
}
