package ca_test

import (
	"context"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// moody is an authority whose answers the test sets.
type moody struct {
	ca.Signer

	sign, ask error
	certs     []*x509.Certificate
}

func (m *moody) Sign(context.Context, ca.SignRequest) (ca.Issued, error) { return ca.Issued{}, m.sign }

func (m *moody) Intermediates(context.Context) ([]*x509.Certificate, error) { return m.certs, m.ask }

func TestWitness(t *testing.T) {
	good := []*x509.Certificate{{NotAfter: time.Now().Add(time.Hour)}}
	broken := fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "no", fault.Cause(errors.New("secret")))
	m := &moody{certs: good}
	w := &ca.Witness{Signer: m}
	check := func(when, want string) {
		t.Helper()
		err := w.Check(t.Context())
		f, ok := fault.As(err)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", when, err)
		case want == "":
		case !ok || f.Reason != commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE ||
			!strings.Contains(f.Public, want) || f.Remedy == "" || strings.Contains(f.Public, "secret"):
			t.Errorf("%s: %v, want %q", when, err, want)
		}
	}
	sign := func(ctx context.Context, err error) {
		t.Helper()
		m.sign = err
		if _, got := w.Sign(ctx, ca.SignRequest{}); !errors.Is(got, err) {
			t.Fatalf("signing answered %v", got)
		}
	}
	check("at the start", "")
	sign(t.Context(), fault.New(commonv1.Reason_REASON_CSR_REFUSED, "a bad request"))
	check("after a request that was refused", "")
	left, leave := context.WithCancel(t.Context())
	leave()
	sign(left, broken)
	check("after a caller who left", "")
	late, done := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer done()
	sign(late, broken)
	check("after an authority that took too long", "did not sign")
	sign(t.Context(), nil)
	check("after it signed again", "")
	m.ask = broken
	check("while it cannot be asked", "cannot be asked")
	m.ask, m.certs = nil, nil
	check("without a certificate", "cannot be asked")
	m.certs = []*x509.Certificate{{NotAfter: time.Now().Add(-time.Hour)}}
	check("with one that has ended", "ended at")
}
