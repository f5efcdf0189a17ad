package nodeapi

import (
	"context"
	"crypto/x509"
	"log/slog"
	"slices"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
)

// mostIssuers bounds the roots of recovery that are trusted beside those of the file.
const mostIssuers = 64

// issuersWait is how long the agents' port of a replica that starts waits for the roots that recovery sends. An agent
// whose issuer is not in the file would be refused before.
const issuersWait = 5 * time.Second

// issuers are the roots that recovery sends, which the agents' port trusts beside those of its file.
type issuers struct {
	logger *slog.Logger
	bundle *pki.Bundle
	// fresh waits until recovery's view is fresh. It has sent its roots then, unless it is of an earlier build.
	fresh func(ctx context.Context) error
}

// set trusts the roots of a frame instead of those of the frame before, for handshakes that begin from now on. A root
// that cannot be read is left out; one that is no root of authorities is as well.
func (i *issuers) set(frame *recoveryv1.AuthorityIssuers) {
	var sent []*x509.Certificate
	for _, der := range frame.GetCertificates() {
		cert, err := x509.ParseCertificate(der)
		if err != nil || !cert.IsCA || len(sent) >= mostIssuers {
			i.logger.Warn("a root that recovery sent is not trusted", obs.Err(err), slog.Int("size", len(der)))
			continue
		}
		sent = append(sent, cert)
	}
	before := i.bundle.Fingerprints()
	err := i.bundle.Follow(func(given []*x509.Certificate) []*x509.Certificate {
		all := slices.Clone(given)
		for _, cert := range sent {
			if !slices.ContainsFunc(all, cert.Equal) {
				all = append(all, cert)
			}
		}
		return all
	})
	if err != nil {
		i.logger.Error("the roots that recovery sent are not trusted, those from before are", obs.Err(err))
		return
	}
	if now := i.bundle.Fingerprints(); !slices.Equal(now, before) {
		i.logger.Info("the issuers of nodes have changed", slog.Int("roots", len(now)), slog.Int("sent", len(sent)))
	}
}

// wait returns once recovery has sent its roots, or after issuersWait.
func (i *issuers) wait(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, issuersWait)
	defer cancel()
	if err := i.fresh(ctx); err != nil {
		i.logger.WarnContext(ctx, "recovery has not told which issuers it trusts beside those of the file", obs.Err(err))
	}
}
