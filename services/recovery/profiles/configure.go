package profiles

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// Configure has the content that this replica is configured with become the active version of its name, if it is not
// what the configuration said before: by a replica that has the same one, or by this one. A person's decision about the
// name stands until the configuration changes again. The first content of a name is taken as it is, as nothing listens
// yet. A later one is taken once its trust has verified its own endpoints; until then the former one goes on,
// Configured returns why, and Configure returns fault profile_unverified.
func (b *Book) Configure(ctx context.Context, p *commonv1.Profile) error {
	said, err := pg.Value[string](ctx, b.deps.Pool, readConfigured, p.GetName())
	if err != nil && !pg.IsNoRows(err) {
		return fmt.Errorf("read the configured profile: %w", err)
	}
	if said == p.GetFingerprint() {
		b.taken()
		return b.Refresh(ctx)
	}
	if said != "" {
		if err := b.verifyContent(ctx, p); err != nil {
			b.unverified(ctx, err, p)
			return err
		}
	}
	const reason = "the configuration of recovery, or a file that it names, has changed"
	done, err := b.do(ctx, byItself, reason, audit.Entry{
		Action: "profile.configure", Actor: byItself, Reason: reason, SubjectType: "profile", SubjectID: p.GetName(),
		Details: map[string]any{"fingerprint": p.GetFingerprint()},
	}, func(ctx context.Context, c *change) error {
		said, err := pg.Value[string](ctx, c.tx, readConfigured, p.GetName())
		if err != nil && !pg.IsNoRows(err) {
			return fmt.Errorf("read the configured profile: %w", err)
		}
		if said == p.GetFingerprint() {
			return nil // another replica was first
		}
		if _, err := pg.Exec(ctx, c.tx, noteConfigured, p.GetName(), p.GetFingerprint()); err != nil {
			return fmt.Errorf("note the configured profile: %w", err)
		}
		r, err := c.announce(ctx, p)
		if err != nil {
			return err
		}
		if err := c.activate(ctx, r); err != nil {
			return err
		}
		return c.retireStale(ctx, p.GetName())
	})
	if err != nil {
		return fmt.Errorf("take the configured profile: %w", err)
	}
	b.taken()
	if len(done.changed) > 0 {
		b.deps.Logger.InfoContext(ctx, "the profile that agents are told has changed",
			slog.String("profile", p.GetName()), slog.String("fingerprint", p.GetFingerprint()))
	}
	return b.Refresh(ctx)
}

// verifyContent connects to the endpoints of a content with its own trust.
func (b *Book) verifyContent(ctx context.Context, p *commonv1.Profile) error {
	_, endpoints, err := contentOf(&recoveryv1.SetProfileRequest{
		Name: p.GetName(), ApiUrl: p.GetApiUrl(), RecoveryUrl: p.GetRecoveryUrl(), TerminalUrl: p.GetTerminalUrl(),
		CaBundlePem: p.GetCaBundlePem(), RecoveryCaBundlePem: p.GetRecoveryCaBundlePem(),
	})
	if err != nil {
		options := []fault.Option{fault.Cause(err)}
		if f, ok := fault.As(err); ok {
			options = append(options, fault.Unmet(f.Unmet...))
		}
		return fault.New(commonv1.Reason_REASON_PROFILE_UNVERIFIED, "", options...)
	}
	return b.verify(ctx, endpoints)
}

// unverified keeps why the configured content is not taken. A content is logged once.
func (b *Book) unverified(ctx context.Context, failure error, p *commonv1.Profile) {
	b.refusals.Inc()
	b.mu.Lock()
	known := b.failed == p.GetFingerprint()
	b.failed, b.failure = p.GetFingerprint(), explained(failure, p)
	b.mu.Unlock()
	if known {
		return
	}
	b.deps.Logger.ErrorContext(ctx, "the configured profile is not taken, since its own trust does not verify its "+
		"endpoints; the former one goes on", slog.String("profile", p.GetName()),
		slog.String("fingerprint", p.GetFingerprint()), obs.Err(failure))
}

// taken keeps that the configured content has become a version.
func (b *Book) taken() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failed, b.failure = "", nil
}

// explained returns the failure as operators are shown it: its text names the profile and each endpoint.
func explained(failure error, p *commonv1.Profile) error {
	detail := "profile " + p.GetName() + " is not taken"
	if f, ok := fault.As(failure); ok && len(f.Unmet) > 0 {
		detail += ": " + strings.Join(f.Unmet, "; ")
	}
	return fault.New(commonv1.Reason_REASON_PROFILE_UNVERIFIED, detail, fault.Cause(failure), fault.Remedy("correct "+
		"`profile` of recovery's configuration, or the file that its ca_file names, or start what is not reached: it is "+
		"taken by itself within about a minute then, and the former version goes on meanwhile"))
}

// Configured returns fault profile_unverified while the content that this replica is configured with is not taken,
// since its trust does not verify its own endpoints.
func (b *Book) Configured(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failure
}
