package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// stayEnrolled keeps this host enrolled and its session open: it enrols where it must, and tries again after every
// refusal that a person or the control plane can lift.
func (a *Agent) stayEnrolled(ctx context.Context) error {
	roots, err := a.enrolled(ctx)
	if err != nil {
		return err
	}
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_ = pki.Watch(watch, a.deps.Logger, a.cfg.TrustEvery, roots) // returns nil when its context ends
	}()
	defer func() { cancel(); <-watched }()
	for {
		if err := a.prepare(ctx, roots); err != nil {
			code := commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT
			if broken, ok := errors.AsType[*ledgerError](err); ok { // an operator's bundle would not help
				code = codeStateFile
				if room.IsFull(a.noted(broken)) {
					code = codeDiskFull
				}
			}
			if err := a.blocked(ctx, code, err.Error()); err != nil {
				return err
			}
			continue
		}
		node, _ := a.store.Node()
		err := a.client.Run(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := a.refused(ctx, err); err != nil {
			return err
		}
		if _, err := roots.Reload(); err != nil {
			a.deps.Logger.LogAttrs(ctx, slog.LevelError, "trust bundle not read again", slog.Any("error", err))
		}
		if again, _ := a.store.Node(); again.NodeID != node.NodeID {
			// The ledger, the gate of the tasks and the logger's attributes belong to the previous node.
			return fmt.Errorf("this host was enrolled as another node (%s, was %s): start the agent again", again.NodeID,
				node.NodeID)
		}
	}
}

// takeRoots stores the roots of services that follow from a list of the control plane. The watch reads the bundle again
// from its file within TrustEvery.
func (a *Agent) takeRoots(ctx context.Context, links []pki.RootLink) error {
	changed, err := a.store.TakeServiceRoots(links)
	if changed {
		a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "the roots of services changed")
	}
	return err
}

// enrolled waits until this host has an identity, and returns the trust bundle to use it with.
func (a *Agent) enrolled(ctx context.Context) (*pki.Bundle, error) {
	for !a.isEnrolled() {
		if err := a.enrolAgain(ctx, errLost); err != nil {
			return nil, err
		}
	}
	return a.trustFromDisk(ctx)
}

// isEnrolled reports whether this host has an identity, be its certificate good or not.
func (a *Agent) isEnrolled() bool {
	_, ok := a.store.Node()
	return ok && (a.store.Certificate() != nil || a.store.Other() != nil)
}

// waitIfStopped waits at the slow cadence after a refusal that only a person can lift. It returns every other error,
// which ends the agent.
func (a *Agent) waitIfStopped(ctx context.Context, err error) error {
	stop, ok := errors.AsType[*enrol.StopError](err)
	if !ok || ends(stop.Denial) {
		return a.replaced(ctx, err)
	}
	return a.blocked(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED,
		names.Of(stop.Denial.Reason)+": "+stop.Denial.Public)
}

// refused acts on a session's end that the session itself cannot repair: it enrols again with an operator's token, or
// recovers, or waits. It returns nil if the caller is to try again.
func (a *Agent) refused(ctx context.Context, err error) error {
	a.reloadEnv(ctx) // an operator may have brought a token meanwhile
	if stop, ok := errors.AsType[*session.StopError](err); ok {
		if ends(stop.Denial) {
			return a.replaced(ctx, err)
		}
		// Retired, copied, mismatched: this host cannot lift these refusals, but a person may, or may bring a bundle. The
		// agent waits for that instead of ending, since a host without an agent reports nothing.
		if a.store.Token() == "" {
			return a.blocked(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED,
				names.Of(stop.Denial.Reason)+": "+stop.Denial.Public)
		}
	}
	if _, ok := errors.AsType[*session.TrustError](err); ok {
		return a.bootstrapTrust(ctx, err)
	}
	return a.enrolAgain(ctx, err)
}

func (a *Agent) blocked(ctx context.Context, code commonv1.DiagnosticCode, detail string) error {
	return a.blockedFor(ctx, a.slow(), code, detail)
}

// blockedFor records why the agent cannot go on, waits and reads node-agent.env again; blocked at the slow cadence.
func (a *Agent) blockedFor(ctx context.Context, wait time.Duration, code commonv1.DiagnosticCode, detail string) error {
	a.meters.Retry(code)
	recorded := a.record(ctx, code, detail, wait)
	a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "waiting for an operator", append([]slog.Attr{
		slog.String("code", names.Of(code)), slog.String("detail", detail), slog.Duration("next_retry", wait),
	}, recorded.Attrs()...)...)
	return a.sleep(ctx, wait)
}

func (a *Agent) sleep(ctx context.Context, wait time.Duration) error {
	if !app.Sleep(ctx, wait) {
		return context.Cause(ctx)
	}
	a.reloadEnv(ctx)
	return nil
}

func (a *Agent) reloadEnv(ctx context.Context) {
	if err := a.store.ReloadEnv(); err != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "node-agent.env not read again", slog.Any("error", err))
	}
}

// ends reports whether a refusal is the end of this instance: its epoch has ended, or a later one has its workspace.
func ends(denial *fault.Error) bool {
	return denial.Reason == commonv1.Reason_REASON_EPOCH_SUPERSEDED || denial.Reason == commonv1.Reason_REASON_EPOCH_ENDED
}

// replaced returns ErrReplaced for a refusal that ends this instance, after it has stopped the instance's workloads:
// the instance that has the workspace now must not run beside them. Other errors are returned.
func (a *Agent) replaced(ctx context.Context, err error) error {
	if denial, ok := fault.As(err); ok && ends(denial) {
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn,
			"this instance has been replaced: its workloads are stopped, and then the agent ends",
			slog.String("reason", names.Of(denial.Reason)))
		a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED, names.Of(denial.Reason)+": "+denial.Public, 0)
		if stopErr := a.work.StopAll(ctx, process.DefaultGrace); stopErr != nil {
			return fmt.Errorf("stop the workloads of a replaced instance (%w): %w", err, stopErr)
		}
		return fmt.Errorf("%w: %w", ErrReplaced, err)
	}
	if stop, ok := errors.AsType[*enrol.StopError](err); ok {
		return fmt.Errorf("enrolment: %w", stop)
	}
	return err
}

func reasonOf(err error) string {
	if denial, ok := fault.As(err); ok {
		return names.Of(denial.Reason)
	}
	if id, ok := errors.AsType[*session.IdentityError](err); ok {
		return id.Cause.Error()
	}
	return err.Error()
}

// profile returns the endpoints of the control plane that this agent uses, and how it was installed.
func (a *Agent) profile() *commonv1.ProfileFacts {
	env := a.store.Env()
	node, _ := a.store.Node()
	host := func(name string) string {
		address, _ := envfile.HostPort(env.Get(name)) // empty if it cannot be read
		return address
	}
	return &commonv1.ProfileFacts{
		Name: node.ProfileName, Fingerprint: node.ProfileFingerprint,
		ApiHost: host(envfile.APIURL), RecoveryHost: host(envfile.RecoveryURL),
		TerminalHost: host(envfile.TerminalURL), InstallRoot: a.cfg.EtcDir, Unit: env.Get(envfile.InstallUnit),
		PackageSource: env.Get(envfile.PackageSource),
	}
}
