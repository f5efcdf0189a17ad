package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"time"
)

// RejectReason is why a handshake failed. The set is closed, so that it can be a metric's label.
type RejectReason string

// The reasons of a failed handshake.
const (
	RejectNoCertificate    RejectReason = "no_certificate"
	RejectExpired          RejectReason = "expired"
	RejectNotYetValid      RejectReason = "not_yet_valid"
	RejectUnknownAuthority RejectReason = "unknown_authority"
	RejectWrongUsage       RejectReason = "wrong_usage"
	RejectWrongKind        RejectReason = "wrong_kind"
	RejectIdentity         RejectReason = "identity"
	RejectCertificate      RejectReason = "certificate" // any other defect of the certificate
	RejectByPeer           RejectReason = "refused_by_peer"
	RejectTimeout          RejectReason = "timeout"
	RejectClosed           RejectReason = "closed"
	RejectOverload         RejectReason = "overload"
	RejectProtocol         RejectReason = "protocol" // not TLS 1.3, not TLS at all
)

// Reject describes a refused handshake.
type Reject struct {
	Reason RejectReason
	// Claimed is what the refused certificate claims. An unverified certificate can name anything: the name may point an
	// operator to a node, and must never change the state of one. It is zero where the peer presented no certificate that
	// can be read.
	Claimed Claim
	Remote  string
	Err     error
}

// ClassifyHandshake returns why a handshake of ServerTLS failed. now is the time by which certificates were verified.
func ClassifyHandshake(err error, now time.Time) Reject {
	out := Reject{Reason: rejectReason(err, now), Err: err}
	var verification *tls.CertificateVerificationError
	if errors.As(err, &verification) {
		out.Claimed = ReadClaim(verification.UnverifiedCertificates)
	}
	return out
}

func rejectReason(err error, now time.Time) RejectReason {
	var (
		invalid   x509.CertificateInvalidError
		authority x509.UnknownAuthorityError
		alert     *net.OpError
		verify    *tls.CertificateVerificationError
		network   net.Error
	)
	switch {
	case errors.Is(err, ErrNoCertificate):
		return RejectNoCertificate
	case errors.Is(err, ErrUsage):
		return RejectWrongUsage
	case errors.Is(err, ErrKind):
		return RejectWrongKind
	case errors.Is(err, ErrIdentity):
		return RejectIdentity
	case errors.As(err, &invalid) && errors.As(err, &verify) && ofIssuer(invalid, verify.UnverifiedCertificates):
		return RejectUnknownAuthority // what is wrong is with the authority, and no other certificate of the peer's helps
	case errors.As(err, &invalid):
		return invalidReason(invalid, now)
	case errors.As(err, &authority):
		return RejectUnknownAuthority
	case errors.As(err, &verify):
		return RejectCertificate
	case errors.As(err, &alert) && alert.Op == "remote error": // how crypto/tls reports the peer's alert
		return RejectByPeer
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return RejectTimeout
	case errors.As(err, &network) && network.Timeout():
		return RejectTimeout
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, context.Canceled):
		return RejectClosed
	default:
		return RejectProtocol
	}
}

// ofIssuer reports whether an error of the verification is about another certificate than the peer's own: an
// intermediate that the peer presented, or a root.
func ofIssuer(err x509.CertificateInvalidError, presented []*x509.Certificate) bool {
	return err.Cert != nil && len(presented) > 0 && !err.Cert.Equal(presented[0])
}

func invalidReason(err x509.CertificateInvalidError, now time.Time) RejectReason {
	switch err.Reason { // every other defect is one reason.
	case x509.Expired:
		// crypto/x509 has one reason for both ends of the validity; only the certificate distinguishes them.
		if err.Cert != nil && now.Before(err.Cert.NotBefore) {
			return RejectNotYetValid
		}
		return RejectExpired
	case x509.IncompatibleUsage:
		return RejectWrongUsage
	default:
		return RejectCertificate
	}
}
