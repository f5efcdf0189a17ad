package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	codeBlocked      = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
	codeTokenMissing = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING
)

// errLost means that this host is a node and none of its certificates can be read.
var errLost = errors.New("no certificate is held")

// openRecovery opens the record of automatic recovery. A file that cannot be read as one is set aside and reported.
func (a *Agent) openRecovery(ctx context.Context) error {
	var err error
	if a.recovery, err = attempts.Open(attempts.Config{
		Dir: a.cfg.StateDir, Wall: a.clock.Wall, Elapsed: a.clock.Elapsed, Now: a.clock.Now, Room: a.spare,
	}); err != nil {
		return err
	}
	if aside := a.recovery.SetAside(); aside != nil {
		a.problems(ctx, "recovery",
			[]string{attempts.File + " was set aside and a new record begins: " + aside.Error()})
	}
	return nil
}

// enrolAgain makes one attempt to get an accepted certificate, and waits after a failure. An operator's token is used
// first. If that fails, the recovery token has the next turn: an operator's token that was left behind and is too old
// must not keep a node away. It returns nil if the caller is to try again.
func (a *Agent) enrolAgain(ctx context.Context, cause error) error {
	byRecovery := a.mayRecover() && (a.store.Token() == "" || a.operatorFailed)
	a.operatorFailed = false
	_, isNode := a.store.Node()
	if byRecovery || a.store.Token() == "" && isNode {
		return a.recoverIdentity(ctx, cause)
	}
	wait, err := a.enrol.Attempt(ctx)
	if err != nil {
		return a.waitIfStopped(ctx, err)
	}
	a.operatorFailed = wait > 0
	if wait == 0 {
		a.warn(ctx, "end of the failures not recorded", a.recovery.ClearFailures())
		return nil
	}
	return a.sleep(ctx, wait)
}

// recoverIdentity makes one attempt to get an accepted certificate with a recovery token, if that is allowed now, and
// waits otherwise. It returns nil if the caller is to try again.
func (a *Agent) recoverIdentity(ctx context.Context, cause error) error {
	cause = cmp.Or(cause, errLost)
	why := reasonOf(cause)
	node, ok := a.store.Node()
	id, _ := errors.AsType[*session.IdentityError](cause)
	for _, serial := range a.rejected(id) {
		a.warn(ctx, "refusal of the identity not recorded", a.noted(a.recovery.Refused(serial, why)))
	}
	switch {
	case id != nil && id.Action == commonv1.Action_ACTION_REBUNDLE:
		return a.blocked(ctx, codeBlocked,
			"only an operator's bundle brings this host back: `gpuaas nodes bundle` ("+why+")")
	case ok && !a.recovery.Allowed(node.AutoRecovery):
		return a.blocked(ctx, codeBlocked,
			"automatic recovery is off by the policy (node.auto_recovery): an operator must issue a bundle, "+
				"`gpuaas nodes bundle` ("+why+")")
	}
	if _, err := a.store.RecoveryTokens(); err != nil {
		return a.blockedFor(ctx, max(a.reportMissing(ctx, err, why), a.slow()), codeTokenMissing,
			err.Error()+": an operator must issue a bundle, `gpuaas nodes bundle` ("+why+")")
	}
	if errors.Is(cause, errLost) { // no session's failure was recorded, with which the outage begins
		a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED, why, 0)
	}
	if err := a.noted(a.recovery.Begin()); err != nil {
		if suppressed, ok := errors.AsType[*attempts.SuppressedError](err); ok {
			return a.blocked(ctx, codeBlocked, suppressed.Error()+" ("+why+")")
		}
		return a.blocked(ctx, codeStateFile, "an attempt to recover cannot be recorded: "+err.Error())
	}
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "recovering the identity", slog.String("node_id", node.NodeID),
		slog.String("node_instance_id", node.InstanceID), slog.String("correlation_id", a.diag.Correlation()),
		slog.String("cause", why))
	attempt, err := a.enrol.Recover(ctx)
	a.ended(ctx, attempt)
	switch {
	case err != nil:
		return a.waitIfStopped(ctx, err)
	case attempt.Outcome == enrol.Succeeded:
		return nil
	case attempt.Untrusted:
		return a.blocked(ctx, codeBlocked, "the trust that is pinned for enrolment does not verify its server: an operator "+
			"must issue a bundle ("+why+")")
	}
	// The next attempt comes after a session was refused again, so that what the control plane has repaired meanwhile
	// needs none.
	return a.sleep(ctx, attempt.Wait)
}

// reportMissing reports to enrolment that this host has no recovery token to send, where its certificate has expired:
// recovery's own records may still have a token that it would accept, and the node would be expected back for as long.
// lack is the error of identity.Store.RecoveryTokens, why the reason of the refusal. It returns the wait to the next.
func (a *Agent) reportMissing(ctx context.Context, lack error, why string) time.Duration {
	cert := a.store.Certificate()
	node, ok := a.store.Node()
	if !ok || cert == nil || why != names.Of(commonv1.Reason_REASON_CERTIFICATE_EXPIRED) &&
		a.clock.Now().Before(cert.Leaf.NotAfter) {
		return 0
	}
	may, err := a.recovery.BeginMissing()
	a.warn(ctx, "an attempt to tell enrolment that no recovery token is held not recorded", a.noted(err))
	if !may {
		return 0
	}
	out := a.enrol.ReportMissing(ctx, node.NodeID, cert, errors.Is(lack, identity.ErrRecoveryKeyLost))
	a.warn(ctx, "what enrolment was told not recorded", a.noted(a.recovery.EndMissing(out.Noted, out.Counts)))
	return out.Wait
}

// rejected returns the serials of the certificates that were refused: those that the session names, else that of the
// certificate in use.
func (a *Agent) rejected(id *session.IdentityError) []string {
	if id != nil && len(id.Rejected) > 0 {
		return id.Rejected
	}
	if cert := a.store.Certificate(); cert != nil {
		return []string{pki.SerialString(cert.Leaf.SerialNumber)}
	}
	return nil
}

// ended records what an attempt to recover has come to.
func (a *Agent) ended(ctx context.Context, attempt enrol.Recovery) {
	var err error
	if cert := a.store.Certificate(); attempt.Outcome == enrol.Succeeded && cert != nil {
		err = a.recovery.Recovered(attempt.Outcome, pki.SerialString(cert.Leaf.SerialNumber), cert.Leaf.NotAfter)
	} else {
		err = a.recovery.End(attempt.Outcome, attempt.Counts)
	}
	a.warn(ctx, "outcome of a recovery not recorded", a.noted(err))
}

// mayRecover reports whether this host has a recovery token that may be sent, or would have one but for its key.
func (a *Agent) mayRecover() bool {
	_, err := a.store.RecoveryTokens()
	return err == nil || errors.Is(err, identity.ErrRecoveryKeyLost)
}

// policyReceived keeps on disk what a policy says about automatic recovery.
func (a *Agent) policyReceived(policy *commonv1.NodePolicy) {
	err := a.recovery.SetPolicy(policy.GetAutoRecovery(), policy.GetRecoveryAttemptsPerHour())
	if a.noted(err) != nil {
		a.deps.Logger.Error("policy of automatic recovery not kept", slog.Any("error", err))
	}
	if err := a.noted(a.recovery.SetTrustDwell(dwellOf(policy))); err != nil {
		a.deps.Logger.Error("policy of trust not kept", slog.Any("error", err))
	}
}

// slow returns a wait after an error that only an operator can clear.
func (a *Agent) slow() time.Duration { return a.cfg.SlowRetry/2 + a.jitter(a.cfg.SlowRetry/2) }
