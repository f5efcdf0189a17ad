package ca

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Witness is a Signer that remembers the result of its last signing, and reports the health of the authority from it.
type Witness struct {
	Signer

	mu     sync.Mutex
	failed error     // of the last signing; nil: it succeeded, or there was none
	at     time.Time // of it
}

// Sign signs, and remembers whether the authority did its part. A refused request is no evidence about the authority,
// nor is a caller that went away.
func (w *Witness) Sign(ctx context.Context, req SignRequest) (Issued, error) {
	issued, err := w.Signer.Sign(ctx, req)
	if err != nil && (!fault.Has(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) ||
		errors.Is(ctx.Err(), context.Canceled)) {
		return issued, err
	}
	w.mu.Lock()
	w.failed, w.at = err, time.Now()
	w.mu.Unlock()
	return issued, err
}

// Check returns an error unless the authority can be reached, holds a certificate that is good to sign with, and signed
// the last request.
func (w *Witness) Check(ctx context.Context) error {
	certs, err := w.Intermediates(ctx)
	if err == nil && len(certs) == 0 {
		err = errors.New("it reports no certificate that it signs with")
	}
	if err != nil {
		return down("it cannot be asked for the certificate that it signs with", err)
	}
	if cert := certs[0]; wallclock.Now().After(cert.NotAfter) {
		return down(fmt.Sprintf("the certificate that it signs with, %s, ended at %s", pki.Fingerprint(cert),
			cert.NotAfter.UTC().Format(time.RFC3339)), nil)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed != nil {
		return down(fmt.Sprintf("it did not sign what it was asked for last, at %s", w.at.UTC().Format(time.RFC3339)),
			w.failed)
	}
	return nil
}

func down(public string, cause error) error {
	return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, public, fault.Cause(cause),
		fault.Remedy("look at recovery's log and at the authority itself; nodes wait by themselves, and the next "+
			"certificate that is signed clears it"))
}
