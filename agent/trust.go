package agent

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// noteTrust keeps whether the node API was verified, and reports whether it has not been for the dwell: other trust
// is to be asked of recovery then.
func (a *Agent) noteTrust(ctx context.Context, verified bool) bool {
	if verified {
		a.warn(ctx, "end of the dwell of trust not recorded", a.noted(a.recovery.Trusted()))
		return false
	}
	over, err := a.recovery.Untrusted()
	a.warn(ctx, "begin of the dwell of trust not recorded", a.noted(err))
	return over
}

// bootstrapTrust makes one attempt to get the trust that is current from recovery, which is reached over the trust that
// is pinned for enrolment and over nothing else. Where that brings no trust, the next attempt is a dwell away, and the
// session is tried again meanwhile, since the trust on disk may have been repaired. It waits if the attempt cannot be
// recorded, if recovery refuses this host for good, and as long as recovery asks for. It returns nil if the caller is
// to try again.
func (a *Agent) bootstrapTrust(ctx context.Context, cause error) error {
	if a.store.Token() != "" && !a.operatorFailed {
		return a.enrolAgain(ctx, cause) // an operator's token comes first
	}
	a.operatorFailed = false
	why := reasonOf(cause)
	node, ok := a.store.Node()
	if ok && !a.recovery.Allowed(node.AutoRecovery) {
		a.untrusted(ctx, codeBlocked, "automatic recovery is off by the policy (node.auto_recovery): an operator must "+
			"issue a bundle ("+why+")")
		return nil
	}
	if _, err := a.store.RecoveryTokens(); err != nil {
		a.untrusted(ctx, codeTokenMissing, err.Error()+": an operator must issue a bundle ("+why+")")
		return nil //nolint:nilerr // it is recorded, and the session is tried again
	}
	if err := a.noted(a.recovery.Begin()); err != nil {
		if suppressed, ok := errors.AsType[*attempts.SuppressedError](err); ok {
			a.untrusted(ctx, codeBlocked, suppressed.Error()+" ("+why+")")
			return nil
		}
		return a.blocked(ctx, codeStateFile, "an attempt to recover cannot be recorded: "+err.Error())
	}
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "asking recovery for the trust that is current",
		slog.String("node_id", node.NodeID), slog.String("correlation_id", a.diag.Correlation()),
		slog.String("cause", why))
	attempt, err := a.enrol.BootstrapTrust(ctx)
	a.ended(ctx, attempt)
	switch {
	case err != nil:
		return a.waitIfStopped(ctx, err)
	case attempt.Outcome == enrol.Succeeded && attempt.Trusted:
		a.warn(ctx, "end of the dwell of trust not recorded", a.noted(a.recovery.Trusted()))
		a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "trust taken from recovery")
		return nil
	case attempt.Outcome == enrol.Succeeded:
		a.untrusted(ctx, codeBlocked, "recovery was reached, and its profile does not verify its own endpoints either: "+
			"the profile must be repaired ("+why+")")
		return nil
	case attempt.Untrusted:
		a.untrusted(ctx, codeBlocked, bothStale+" ("+why+")")
		return nil
	default:
		return a.sleep(ctx, attempt.Wait)
	}
}

const bothStale = "neither the trust for the node API nor the one pinned for enrolment verifies its server: an " +
	"operator must repair the profile or issue a bundle"

// untrusted records why trust cannot be bootstrapped, and begins the dwell anew, after which the next attempt is due.
func (a *Agent) untrusted(ctx context.Context, code commonv1.DiagnosticCode, detail string) {
	a.warn(ctx, "begin of the dwell of trust not recorded", a.noted(a.recovery.DwellAnew()))
	wait := a.recovery.TrustDwell()
	a.meters.Retry(code)
	recorded := a.record(ctx, code, detail, wait)
	a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "trust not bootstrapped", append([]slog.Attr{
		slog.String("code", names.Of(code)), slog.String("detail", detail), slog.Duration("next_attempt", wait),
	}, recorded.Attrs()...)...)
}

// trustFromDisk waits until the trust bundle for the node API can be read. Where it cannot for the dwell, recovery is
// asked for it as for trust that verifies nothing.
func (a *Agent) trustFromDisk(ctx context.Context) (*pki.Bundle, error) {
	for {
		roots, err := pki.LoadBundle(a.store.BundlePath())
		if err == nil {
			return roots, nil
		}
		if a.noteTrust(ctx, false) {
			if err := a.bootstrapTrust(ctx, err); err != nil {
				return nil, err
			}
			if roots, err := pki.LoadBundle(a.store.BundlePath()); err == nil {
				return roots, nil
			}
		}
		if err := a.blocked(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED,
			"trust bundle for the node API: "+err.Error()); err != nil {
			return nil, err
		}
	}
}

// dwellOf returns the dwell of trust in a policy; zero: it has none.
func dwellOf(policy *commonv1.NodePolicy) time.Duration {
	if policy.GetTrustDwell().CheckValid() != nil {
		return 0
	}
	return policy.GetTrustDwell().AsDuration()
}
