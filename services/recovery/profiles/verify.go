package profiles

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// verifyWithin bounds the time in which the endpoints of a profile are verified, all at once.
const verifyWithin = 5 * time.Second

// verifications is how many requests verify endpoints at the same time.
const verifications = 4

var nameText = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// endpoint is one address of a profile, with the service that must answer there and the roots that must verify it.
type endpoint struct {
	field, address, service string
	roots                   *pki.Bundle
}

// contentOf returns the content that a request describes, with its fingerprint and its endpoints, or the first thing
// that is wrong with it.
func contentOf(req *recoveryv1.SetProfileRequest) (*commonv1.Profile, []endpoint, error) {
	wrong := func(field string, err error) (*commonv1.Profile, []endpoint, error) {
		return nil, nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the profile is not valid",
			fault.Unmet(field+": "+err.Error()))
	}
	if !nameText.MatchString(req.GetName()) {
		return wrong("name", errors.New("lower-case letters, digits and hyphens"))
	}
	trusted, err := bundleOf(req.GetCaBundlePem())
	if err != nil {
		return wrong("ca_bundle_pem", err)
	}
	recovering := trusted
	if len(req.GetRecoveryCaBundlePem()) > 0 {
		if recovering, err = bundleOf(req.GetRecoveryCaBundlePem()); err != nil {
			return wrong("recovery_ca_bundle_pem", err)
		}
	}
	api, err := config.HostPort(req.GetApiUrl())
	if err != nil {
		return wrong("api_url", err)
	}
	recoveryURL, err := url.Parse(req.GetRecoveryUrl())
	if err != nil || recoveryURL.Scheme != "https" {
		return wrong("recovery_url", errors.New("not an https URL"))
	}
	recovery, err := config.HostPort(req.GetRecoveryUrl())
	if err != nil {
		return wrong("recovery_url", err)
	}
	list := []endpoint{
		{"api_url", api, "nodeapi", trusted}, {"recovery_url", recovery, "recovery", recovering},
	}
	if req.GetTerminalUrl() != "" {
		terminal, err := config.HostPort(req.GetTerminalUrl())
		if err != nil {
			return wrong("terminal_url", err)
		}
		list = append(list, endpoint{"terminal_url", terminal, "nodeapi", trusted})
	}
	p := &commonv1.Profile{
		Name: req.GetName(), ApiUrl: req.GetApiUrl(), RecoveryUrl: req.GetRecoveryUrl(), TerminalUrl: req.GetTerminalUrl(),
		CaBundlePem: trusted.PEM(), RecoveryCaBundlePem: recovering.PEM(),
	}
	p.Fingerprint = Fingerprint(p)
	return p, list, nil
}

func bundleOf(text []byte) (*pki.Bundle, error) {
	certs, err := pki.DecodeCertificates(text)
	if err != nil {
		return nil, err
	}
	return pki.NewBundle(certs...)
}

// verify connects to each endpoint as an agent would that trusts nothing but the roots of the profile. It returns fault
// profile_unverified with each endpoint that was not reached, or that proved to be another service.
func (b *Book) verify(ctx context.Context, list []endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, verifyWithin)
	defer cancel()
	failures := make([]error, len(list))
	done := make(chan struct{}, len(list))
	for i, e := range list {
		go func() {
			failures[i] = b.handshake(ctx, e)
			done <- struct{}{}
		}()
	}
	for range list {
		<-done
	}
	var options []fault.Option
	for i, err := range failures {
		if err != nil {
			options = append(options, fault.Unmet(fmt.Sprintf("%s: %s: %v", list[i].field, list[i].address, err)),
				fault.Cause(err))
		}
	}
	if len(options) == 0 {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PROFILE_UNVERIFIED, "", options...)
}

// handshake returns nil once the server has proved to be the service. What it makes of the caller, which shows no
// certificate, does not matter.
func (b *Book) handshake(ctx context.Context, e endpoint) error {
	client, err := pki.ClientTLS(pki.ClientConfig{
		Roots: e.roots, Server: pki.ServiceID(b.deps.TrustDomain, e.service), NextProtos: []string{"h2"},
	})
	if err != nil {
		return err
	}
	verified := false
	check := client.VerifyConnection
	client.VerifyConnection = func(state tls.ConnectionState) error {
		err := check(state)
		verified = err == nil
		return err
	}
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", e.address)
	if err != nil {
		return fmt.Errorf("not reached: %w", err)
	}
	defer raw.Close()
	err = tls.Client(raw, client).HandshakeContext(ctx)
	if verified {
		return nil
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return fmt.Errorf("the profile's trust does not verify it: %w", err)
	}
	if err == nil {
		return errors.New("the server was not verified")
	}
	return err
}
