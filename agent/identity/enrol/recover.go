package enrol

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptrace"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/agent/endpoints"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// Succeeded is the outcome of a recovery after which the identity is on disk.
const Succeeded = "succeeded"

// Recovery is what one attempt to recover has come to.
type Recovery struct {
	// Sent reports whether a verified server was reached, so that the request may have had an effect.
	Sent bool
	// Counts reports whether the attempt counts against the limit of an hour: a server that cannot be verified may be
	// hostile, and does not go away by being asked often.
	Counts bool
	// Untrusted reports whether the pinned trust did not verify the server of enrolment, or cannot be read.
	Untrusted bool
	// Trusted reports, of a success of BootstrapTrust, whether the profile of the reply was verified and taken.
	Trusted bool
	// Outcome is Succeeded, the reason of a refusal, or the diagnostic code of a failure.
	Outcome string
	// Wait is the least time until the next attempt; zero after a success.
	Wait time.Duration
}

// Recover sends one request with a recovery token, over the pinned way to enrolment. Each token goes with the same
// certificate request until it has been answered, and one that is refused is followed by the other one held. The
// diagnostic of a failure is on disk when Recover returns. An error is *StopError, ctx's cause, or, with nothing sent,
// the error of identity.Store.RecoveryTokens.
func (e *Enroller) Recover(ctx context.Context) (Recovery, error) { return e.recover(ctx, false) }

// BootstrapTrust does as Recover where the trust for the node API does not verify it. The profile that the reply brings
// is taken only if a connection to each of its endpoints verifies it, and recorded as refused otherwise; the
// certificate is taken in either case.
func (e *Enroller) BootstrapTrust(ctx context.Context) (Recovery, error) { return e.recover(ctx, true) }

func (e *Enroller) recover(ctx context.Context, trust bool) (Recovery, error) {
	tokens, err := e.deps.Store.RecoveryTokens()
	if err != nil {
		return Recovery{}, err
	}
	token := tokens[e.tokenIndex%len(tokens)]
	var reached atomic.Bool
	var taken *bool
	if trust {
		taken = new(bool)
	}
	err = e.recoverWith(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { reached.Store(true) },
	}), token, taken)
	out := Recovery{Sent: reached.Load(), Outcome: Succeeded, Trusted: taken != nil && *taken}
	out.Untrusted = endpoints.Untrusts(err) || errors.Is(err, ErrNotPinned) || errors.Is(err, pki.ErrIdentity)
	// A local file that cannot be read is no attempt.
	out.Counts = out.Sent && !busy(err) || out.Untrusted && !errors.Is(err, ErrNotPinned)
	if err == nil {
		e.tokenIndex = 0
		return out, nil
	}
	if ctx.Err() != nil {
		return Recovery{Sent: out.Sent, Counts: out.Counts, Outcome: "interrupted"}, context.Cause(ctx)
	}
	code := e.codeOf(err)
	out.Outcome = names.Of(code)
	if refusal, ok := fault.As(err); ok {
		out.Outcome = names.Of(refusal.Reason)
	}
	var terminal error
	out.Wait, terminal = e.decide(err)
	if tokenRefused(err) {
		if !fault.Has(err, commonv1.Reason_REASON_TOKEN_NOT_YET_VALID) {
			code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING
		}
		if e.tokenIndex++; e.tokenIndex%len(tokens) != 0 {
			out.Wait = time.Duration(e.cfg.Draw(int64(time.Second)))
		}
	}
	e.giveUp(ctx, token, err)
	out.Wait = max(out.Wait, time.Millisecond)
	recorded := e.record(ctx, code, detailOf(err), out.Wait)
	if terminal != nil {
		return out, terminal
	}
	e.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "not recovered", append([]slog.Attr{
		slog.String("code", names.Of(code)), slog.Any("error", err), slog.Duration("next_retry", out.Wait),
	}, recorded.Attrs()...)...)
	return out, nil
}

func (e *Enroller) recoverWith(ctx context.Context, token string, trusted *bool) error {
	recovery, key, err := e.deps.Store.RecoveringKey(token)
	if err != nil {
		return err
	}
	return e.send(ctx, credential{token: token, key: key, recovery: recovery, prove: true, trusted: trusted})
}

// giveUp removes what a refusal has made useless: a token that another key has used, or a key that will not be signed,
// since it is another node's or was certified before.
func (e *Enroller) giveUp(ctx context.Context, token string, refusal error) {
	var err error
	switch {
	case fault.Has(refusal, commonv1.Reason_REASON_TOKEN_CONSUMED):
		err = e.deps.Store.RefuseToken(token)
	case fault.Has(refusal, commonv1.Reason_REASON_KEY_REUSE), fault.Has(refusal, commonv1.Reason_REASON_CSR_REFUSED):
		err = e.deps.Store.DropRecoveringKey(token)
	}
	if err != nil {
		e.deps.Logger.LogAttrs(ctx, slog.LevelError, "refused recovery token not given up", slog.Any("error", err))
	}
}

// busy reports whether a request was refused without a decision about this host, such as during an outage of what the
// control plane needs. The waits of decide bound the requests that are refused so.
func busy(err error) bool {
	f, ok := fault.As(err)
	return ok && fault.ActionOf(err) == commonv1.Action_ACTION_WAIT &&
		f.Reason != commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED
}

// tokenRefused reports whether the token itself was refused, so that the other one may be accepted.
func tokenRefused(err error) bool {
	if errors.Is(err, identity.ErrRecoveryKeyLost) {
		return true
	}
	f, ok := fault.As(err)
	if !ok {
		return false
	}
	switch f.Reason { // every other refusal is not about the token
	case commonv1.Reason_REASON_TOKEN_INVALID, commonv1.Reason_REASON_TOKEN_EXPIRED,
		commonv1.Reason_REASON_TOKEN_CONSUMED, commonv1.Reason_REASON_TOKEN_NOT_YET_VALID,
		commonv1.Reason_REASON_CSR_REFUSED:
		return true
	default:
		return false
	}
}
