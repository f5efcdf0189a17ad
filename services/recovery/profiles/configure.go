package profiles

import (
	"context"
	"fmt"
	"log/slog"

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
		b.verified(ctx, nil, p)
		return b.Refresh(ctx)
	}
	if said != "" {
		err := b.verifyContent(ctx, p)
		b.verified(ctx, err, p)
		if err != nil {
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
		return fault.New(commonv1.Reason_REASON_PROFILE_UNVERIFIED, "", fault.Cause(err))
	}
	return b.verify(ctx, endpoints)
}

// verified keeps whether the configured content was verified. A content that was not is logged once.
func (b *Book) verified(ctx context.Context, failure error, p *commonv1.Profile) {
	b.mu.Lock()
	known := b.unverified == p.GetFingerprint()
	b.unverified, b.failure = "", failure
	if failure != nil {
		b.unverified = p.GetFingerprint()
	}
	b.mu.Unlock()
	if failure == nil {
		return
	}
	b.refusals.Inc()
	if !known {
		b.deps.Logger.ErrorContext(ctx, "the configured profile is not taken, since its own trust does not verify its "+
			"endpoints; the former one goes on", slog.String("profile", p.GetName()),
			slog.String("fingerprint", p.GetFingerprint()), obs.Err(failure))
	}
}

// Configured returns fault profile_unverified while the content that this replica is configured with is not taken,
// since its trust does not verify its own endpoints.
func (b *Book) Configured(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failure
}
