package trust

import (
	"context"
	"crypto/x509"
	"errors"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// authority is what the authority reports that it signs with.
type authority struct {
	issuer  *x509.Certificate
	anchors []string // fingerprints of the certificates one of which ingress must trust: the issuer's, and of its roots
}

func (a *authority) fingerprint() string { return pki.Fingerprint(a.issuer) }

// trustedBy reports whether one of the fingerprints is an anchor.
func (a *authority) trustedBy(fingerprints []string) bool {
	return slices.ContainsFunc(a.anchors, func(anchor string) bool { return slices.Contains(fingerprints, anchor) })
}

// ask returns what the authority reports.
func ask(ctx context.Context, signer ca.Signer) (*authority, error) {
	issuers, err := signer.Intermediates(ctx)
	if err != nil {
		return nil, err
	}
	if len(issuers) == 0 {
		return nil, errors.New("it reports no certificate that it signs with")
	}
	roots, err := signer.Roots(ctx)
	if err != nil {
		return nil, err
	}
	out := &authority{issuer: issuers[0], anchors: []string{pki.Fingerprint(issuers[0])}}
	for _, root := range roots {
		if issuers[0].CheckSignatureFrom(root) == nil {
			out.anchors = append(out.anchors, pki.Fingerprint(root))
		}
	}
	return out, nil
}

// message returns an authority, or why it cannot be asked, as responses carry it.
func (a *authority) message(err error) *recoveryv1.AuthorityTrust {
	if err != nil {
		problem := "the authority cannot be asked for the certificate that it signs with"
		if f, ok := fault.As(err); ok {
			problem = f.Public
		}
		return &recoveryv1.AuthorityTrust{Problem: problem}
	}
	return &recoveryv1.AuthorityTrust{
		IssuerFingerprint: a.fingerprint(), IssuerName: a.issuer.Subject.CommonName,
		IssuerNotAfter: timestamppb.New(a.issuer.NotAfter), RootFingerprints: a.anchors[1:],
	}
}
