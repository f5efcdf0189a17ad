package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/agent/endpoints"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// Bundle names what an operator brought to the host: the directory of `gpuaas nodes enroll`, or the archive of
// `gpuaas nodes bundle`. The zero value names none.
type Bundle struct {
	Path string
	// Digest is that of the archive, as the operator was shown it. Empty: the archive must be signed by a key that the
	// trust held here verifies.
	Digest string
}

// takeBundle puts a bundle in place after its endpoints were verified with its own trust: all of it or nothing. For a
// host without endpoints, which has nothing to lose, the enrolment with a directory is that test.
func (a *Agent) takeBundle(ctx context.Context, from Bundle) error {
	err := a.installBundle(ctx, from)
	if err == nil || errors.Is(err, identity.ErrBundleSpent) {
		return err
	}
	a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED, bundleRefusal(err), 0)
	return fmt.Errorf("the bundle is not taken, and nothing was changed: %w", err)
}

// bundleSpent returns nil for a bundle with whose token this host was enrolled before, so that the same command may be
// run twice, and an error if the host lacks what the bundle would have brought: nothing of it is put in place.
func (a *Agent) bundleSpent(ctx context.Context) error {
	cert := a.store.Certificate()
	_, trust := pki.LoadBundle(a.store.BundlePath())
	var lacks error
	switch env := a.store.Env().Validate(); {
	case cert == nil:
		lacks = errLost
	case !identity.Usable(cert, a.clock.Now()):
		lacks = fmt.Errorf("the certificate is not valid by this host's clock, but from %s to %s",
			cert.Leaf.NotBefore.UTC().Format(time.RFC3339), cert.Leaf.NotAfter.UTC().Format(time.RFC3339))
	case env != nil:
		lacks = env
	case trust != nil:
		lacks = trust
	default:
		node, _ := a.store.Node()
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn,
			"the bundle was used for the identity that this host holds: nothing was changed",
			slog.String("node_id", node.NodeID), slog.Time("certificate_ends", cert.Leaf.NotAfter))
		return nil
	}
	remedy := "issue another bundle: `gpuaas nodes bundle NODE`"
	if a.mayRecover() {
		remedy += "; with a recovery token held, an agent whose certificate alone is missing or has ended recovers by " +
			"itself: start it first"
	}
	return fault.New(commonv1.Reason_REASON_BUNDLE_INVALID,
		"nothing was changed: the bundle was used before, and this host lacks what it brought",
		fault.Remedy(remedy), fault.Cause(fmt.Errorf("%w (%w)", lacks, identity.ErrBundleSpent)))
}

func (a *Agent) installBundle(ctx context.Context, from Bundle) error {
	given, err := a.readBundle(from)
	if err != nil {
		return err
	}
	profile, err := a.store.CheckBundle(given)
	if err != nil {
		return err
	}
	if given.Archive() || a.store.Env().Validate() == nil {
		// A directory does not name its trust domain: on a host that is a node already it is of the node's.
		node, isNode := a.store.Node()
		err := endpoints.Verify(ctx, profile, endpoints.Options{
			TrustDomain: cmp.Or(given.TrustDomain(), node.TrustDomain), Now: a.clock.Now,
		})
		refused, ok := errors.AsType[*endpoints.Error](err)
		if ok && refused.Cause == endpoints.OtherIdentity && isNode {
			return fmt.Errorf("%w (this host is a node of trust domain %s: %s)", err, node.TrustDomain, identity.Transfer)
		}
		if err != nil {
			return err
		}
	}
	if err := a.store.InstallBundle(given); err != nil {
		return err
	}
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "bundle in place", slog.String("api", profile.GetApiUrl()),
		slog.String("recovery", profile.GetRecoveryUrl()), slog.Bool("archive", given.Archive()))
	return nil
}

// readBundle reads a bundle, and verifies the origin of an archive.
func (a *Agent) readBundle(from Bundle) (*identity.Bundle, error) {
	info, err := os.Stat(from.Path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read bundle: %w", err)
	case info.IsDir() && from.Digest != "":
		return nil, bundle.Invalid("a directory has no digest: name the archive of `gpuaas nodes bundle`")
	case info.IsDir():
		return identity.ReadBundle(from.Path)
	case !info.Mode().IsRegular():
		return nil, bundle.Invalid(from.Path + " is neither a file nor a directory")
	}
	data, err := readAtMost(from.Path, bundle.MaxSize+1)
	if err != nil {
		return nil, err
	}
	archive, err := bundle.Read(data)
	if err != nil {
		return nil, err
	}
	if err := a.vouched(archive, from.Digest); err != nil {
		return nil, err
	}
	return identity.BundleOf(archive)
}

// vouched returns nil if an archive is what recovery of this mesh made: by the digest that the operator was shown, else
// by the trust held here. With a digest its signature must be good under the trust that it brings: the trust held here
// may be what it is to replace, and the clock of this host may be wrong.
func (a *Agent) vouched(archive *bundle.Archive, digest string) error {
	m := archive.Manifest
	if digest != "" {
		if err := archive.CheckDigest(digest); err != nil {
			return err
		}
		own, err := bundleOfRoots(archive.Files.RecoveryCA)
		if err == nil {
			err = archive.Verify(own, m.TrustDomain, m.IssuedAt)
		}
		if err != nil {
			return bundle.Invalid("its signature is not good: " + err.Error())
		}
		return nil
	}
	trustDomain := a.store.Env().Get(envfile.TrustDomain)
	if node, ok := a.store.Node(); ok && trustDomain == "" {
		trustDomain = node.TrustDomain
	}
	why := errors.New("no trust is held here")
	for _, path := range []string{a.store.RecoveryBundlePath(), a.store.BundlePath()} {
		roots, err := pki.LoadBundle(path)
		if err != nil || trustDomain == "" {
			continue
		}
		if why = archive.Verify(roots, trustDomain, a.clock.Now()); why == nil {
			return nil
		}
	}
	return bundle.Invalid("its signature is not by a key that this host trusts (" + why.Error() + "); compare " +
		archive.Digest + " with what `gpuaas nodes bundle` printed, and name that with --digest")
}

func bundleOfRoots(content []byte) (*pki.Bundle, error) {
	certs, err := pki.DecodeCertificates(content)
	if err != nil {
		return nil, err
	}
	return pki.NewBundle(certs...)
}

func readAtMost(path string, most int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	data, err := io.ReadAll(io.LimitReader(file, most))
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	return data, nil
}

// bundleRefusal returns the text with which a refused bundle is recorded. It has no text from the bundle but addresses.
func bundleRefusal(err error) string {
	if denial, ok := fault.As(err); ok {
		return "bundle_invalid: " + denial.Public
	}
	if refused, ok := errors.AsType[*endpoints.Error](err); ok {
		return "the " + refused.Endpoint + " endpoint of a bundle, " + strconv.Quote(refused.Address) + ", is " +
			string(refused.Cause) + " with the bundle's own trust"
	}
	return "a bundle cannot be read"
}

// RestoreFormer puts the endpoints and the trust from before the last bundle back, and returns the address of the node
// API among them. It must not be called while Run runs.
func (a *Agent) RestoreFormer(ctx context.Context) (string, error) {
	if err := a.store.RestoreFormer(); err != nil {
		return "", err
	}
	api := a.store.Env().Get(envfile.APIURL)
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "endpoints and trust from before the last bundle are back",
		slog.String("api", api))
	return api, nil
}

// restoreAfter puts back what a bundle replaced if the control plane refuses this node for good. An enrolment that was
// cut off leaves the bundle in place: its token may have been used.
func (a *Agent) restoreAfter(ctx context.Context, from Bundle, err error) error {
	if _, ok := errors.AsType[*enrol.StopError](err); !ok || from.Path == "" {
		return err
	}
	_, restored := a.RestoreFormer(ctx)
	if errors.Is(restored, identity.ErrNothingBefore) {
		restored = nil
	}
	return errors.Join(err, restored)
}
