package enrol

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/endpoints"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
)

// Missing is what ReportMissing has come to.
type Missing struct {
	Noted  bool          // enrolment has taken note
	Counts bool          // it has not, and the attempt counts against the limit of an hour
	Wait   time.Duration // the least time until the next attempt; zero if it was told
	Answer error         // enrolment refuses each such request
}

// ReportMissing reports to enrolment, over the pinned way, that this host is the node of an expired certificate, and
// that it has no recovery token to send, or has lost the key that proves the token. Only the refusal as
// recovery_token_missing shows that enrolment has taken note: a build that does not know the request refuses it as
// another invalid one.
func (e *Enroller) ReportMissing(ctx context.Context, nodeID string, cert *tls.Certificate, keyLost bool) Missing {
	err := e.reportMissing(ctx, nodeID, cert, keyLost)
	if fault.Has(err, commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING) {
		e.retry.Reset()
		e.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "enrolment told that no recovery token is held",
			slog.Any("answer", err))
		return Missing{Noted: true, Answer: err}
	}
	_, answered := fault.As(err)
	untrusted := endpoints.Untrusts(err) || errors.Is(err, pki.ErrIdentity)
	out := Missing{Counts: answered && !busy(err) || untrusted, Answer: err}
	var terminal error
	if out.Wait, terminal = e.decide(err); terminal != nil { // it is no decision about what the host may do
		out.Wait = e.slow()
	}
	e.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "enrolment not told that no recovery token is held",
		slog.Any("error", err), slog.Duration("next_retry", out.Wait))
	return out
}

func (e *Enroller) reportMissing(ctx context.Context, nodeID string, cert *tls.Certificate, keyLost bool) error {
	key, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return fmt.Errorf("certificate has a key of type %T", cert.PrivateKey)
	}
	public, err := recoverykey.Public(key)
	if err != nil {
		return err
	}
	serial := pki.SerialString(cert.Leaf.SerialNumber)
	proof, err := recoverykey.SignMissing(key, nodeID, serial)
	if err != nil {
		return err
	}
	client, err := e.client()
	if err != nil {
		return err
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
		return errors.New("enrolment has not refused a request without a token")
	}
	return understand(err)
}
