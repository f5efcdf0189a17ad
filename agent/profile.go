package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/mesh/agent/endpoints"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

const codeProfileRefused = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED

// profileAgain is how long a profile that was given up is refused when it is offered again.
const profileAgain = time.Hour

// maxFingerprint bounds the fingerprint of a profile, as the answer's field does.
const maxFingerprint = 128

// dialled has over which unconfirmed profiles sessions were opened, by fingerprint.
type dialled struct {
	mu       sync.Mutex
	opening  string // of the last dial; empty: the profile was confirmed
	admitted string
}

// endpoint returns host:port of the node API, and notes over which profile the session opens that is dialled now.
func (a *Agent) endpoint() (string, error) {
	// The fingerprint is read first: if a profile is stored in between, the session over it counts for none.
	fingerprint := a.store.UnconfirmedProfile()
	a.over.mu.Lock()
	a.over.opening = fingerprint
	a.over.mu.Unlock()
	return envfile.HostPort(a.store.Env().Get(envfile.APIURL))
}

// profileAdmitted confirms the profile over which a session was admitted.
func (a *Agent) profileAdmitted(ctx context.Context) {
	a.over.mu.Lock()
	fingerprint := a.over.opening
	a.over.admitted = fingerprint
	a.over.mu.Unlock()
	if fingerprint == "" {
		return
	}
	// After an error takeProfiles tries again.
	a.warn(ctx, "profile not confirmed", a.noted(a.store.ConfirmProfile(fingerprint)))
}

// profileOffered hands an offered profile to the loop that takes them. One that waits there is replaced.
func (a *Agent) profileOffered(_ context.Context, profile *commonv1.Profile) {
	select {
	case <-a.offers:
	default:
	}
	select {
	case a.offers <- profile:
	default:
	}
}

// givenUp is a profile over which no session was admitted.
type givenUp struct {
	fingerprint string
	until       time.Duration // by the monotonic clock
}

// takeProfiles takes offered profiles, one at a time, and goes back to the former one if no session is admitted over
// one that was taken, until ctx ends.
func (a *Agent) takeProfiles(ctx context.Context) error {
	bound := time.NewTimer(a.cfg.ProfileWithin)
	defer bound.Stop()
	if a.store.UnconfirmedProfile() == "" {
		bound.Stop()
	}
	var former givenUp
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case profile := <-a.offers:
			if a.takeProfile(ctx, profile, former) {
				bound.Reset(a.cfg.ProfileWithin)
			}
		case <-bound.C:
			fingerprint := a.store.UnconfirmedProfile()
			if fingerprint == "" {
				continue
			}
			done, back := a.confirmOrRevertProfile(ctx, fingerprint)
			if !done {
				bound.Reset(a.cfg.ProfileWithin)
			}
			if back {
				former = givenUp{fingerprint: fingerprint, until: a.clock.Elapsed() + profileAgain}
			}
		}
	}
}

// takeProfile takes an offered profile or refuses it, and sends the answer. It reports whether a session is to be
// admitted over it, if it is there.
func (a *Agent) takeProfile(ctx context.Context, profile *commonv1.Profile, former givenUp) bool {
	fingerprint := profile.GetFingerprint()
	anew, err := a.tryProfile(ctx, profile, former)
	_, half := errors.AsType[*storeError](err)
	answer := &nodev1.ProfileAnswer{
		Fingerprint: strings.ToValidUTF8(fingerprint[:min(len(fingerprint), maxFingerprint)], ""),
	}
	if err != nil {
		answer.Refused = fault.ToDenial(err, "")
	}
	answer.Profile = a.profile()
	a.answerProfile(ctx, answer)
	if err != nil || !anew {
		return half
	}
	a.rootsChanged(ctx)
	a.redial(ctx)
	return true
}

// storeError is the refusal of a profile that was not stored. The part that was written may still take effect: a change
// that cannot be ended may be finished later.
type storeError struct{ refusal error }

func (e *storeError) Error() string { return e.refusal.Error() }
func (e *storeError) Unwrap() error { return e.refusal }

// tryProfile stores a profile whose endpoints are verified with the trust that it brings, the whole of it durably, and
// reports whether the node API has another endpoint or other trust now. An error is a fault; it is recorded as a
// diagnostic, unless the profile is only older than the one held. With any but a *storeError nothing has changed.
func (a *Agent) tryProfile(ctx context.Context, profile *commonv1.Profile, former givenUp) (bool, error) {
	node, ok := a.store.Node()
	if !ok {
		return false, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "this host is no node yet")
	}
	switch fingerprint := profile.GetFingerprint(); {
	case fingerprint == "" || len(fingerprint) > maxFingerprint:
		return false, a.profileRefused(ctx, commonv1.Reason_REASON_INVALID_ARGUMENT,
			fmt.Sprintf("the profile has a fingerprint of %d bytes", len(fingerprint)))
	case fingerprint == node.ProfileFingerprint:
		return false, nil
	case profile.GetVersion() <= node.ProfileVersion && (node.ProfileName == "" || profile.GetName() == node.ProfileName):
		// Numbers of two names tell nothing of each other. A node has the profile that the control plane says it has.
		a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "older profile not taken",
			slog.Int64("version", profile.GetVersion()), slog.Int64("held", node.ProfileVersion))
		return false, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			fmt.Sprintf("the node has version %d of its profile, and %d was offered", node.ProfileVersion,
				profile.GetVersion()))
	case fingerprint == former.fingerprint && a.clock.Elapsed() < former.until:
		return false, a.profileRefused(ctx, commonv1.Reason_REASON_PROFILE_UNVERIFIED,
			"no session was admitted over this profile a while ago")
	}
	tested, err := a.store.Replacing(profile)
	if err == nil {
		err = endpoints.Verify(ctx, tested, endpoints.Options{TrustDomain: node.TrustDomain, Now: a.clock.Now})
	}
	if err != nil {
		return false, a.profileRefused(ctx, commonv1.Reason_REASON_PROFILE_UNVERIFIED, err.Error())
	}
	anew, err := a.store.StoreProfile(profile)
	if errors.Is(err, identity.ErrProfileIncomplete) {
		return false, a.profileRefused(ctx, commonv1.Reason_REASON_PROFILE_UNVERIFIED, err.Error())
	}
	if err != nil {
		return false, &storeError{a.profileRefused(ctx, commonv1.Reason_REASON_UNAVAILABLE, a.noted(err).Error())}
	}
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "profile taken", slog.String("name", profile.GetName()),
		slog.Int64("version", profile.GetVersion()), slog.String("fingerprint", profile.GetFingerprint()))
	if !anew {
		a.warn(ctx, "profile not confirmed", a.noted(a.store.ConfirmProfile(profile.GetFingerprint())))
	}
	_, err = a.diag.End(codeProfileRefused)
	a.warn(ctx, "diagnostic not ended", a.noted(err))
	return anew, nil
}

// profileRefused records why a profile is not taken and returns the fault.
func (a *Agent) profileRefused(ctx context.Context, reason commonv1.Reason, detail string) error {
	const most = 512
	detail = strings.ToValidUTF8(detail[:min(len(detail), most)], "")
	a.meters.Retry(codeProfileRefused)
	a.record(ctx, codeProfileRefused, detail, 0)
	a.deps.Logger.LogAttrs(ctx, slog.LevelError, "profile not taken", slog.String("reason", names.Of(reason)),
		slog.String("detail", detail))
	return fault.New(reason, detail)
}

// confirmOrRevertProfile confirms a profile over which a session was admitted, and goes back to the former one
// otherwise. It reports whether that is on disk, and whether the former one is back.
func (a *Agent) confirmOrRevertProfile(ctx context.Context, fingerprint string) (bool, bool) {
	a.over.mu.Lock()
	admitted := a.over.admitted == fingerprint
	a.over.mu.Unlock()
	if admitted {
		err := a.noted(a.store.ConfirmProfile(fingerprint))
		a.warn(ctx, "profile not confirmed", err)
		return err == nil, false
	}
	back, err := a.store.RevertProfile()
	if err != nil {
		a.record(ctx, codeStateFile, "the former profile is not back: "+a.noted(err).Error(), 0)
		a.warn(ctx, "former profile not back", err)
		return false, false
	}
	if !back {
		return true, false
	}
	refusal := a.profileRefused(ctx, commonv1.Reason_REASON_PROFILE_UNVERIFIED,
		fmt.Sprintf("no session was admitted over the profile within %s: the former one is back", a.cfg.ProfileWithin))
	a.answerProfile(ctx, &nodev1.ProfileAnswer{
		Fingerprint: fingerprint, Refused: fault.ToDenial(refusal, ""), Profile: a.profile(),
	})
	a.rootsChanged(ctx)
	a.redial(ctx)
	return true, true
}

// answerProfile gives the session an answer. Without a session the next Hello has the profile that is held.
func (a *Agent) answerProfile(ctx context.Context, answer *nodev1.ProfileAnswer) {
	client := a.session()
	if client == nil {
		return
	}
	if err := client.AnswerProfile(answer); err != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelDebug, "answer to a profile not sent", slog.Any("error", err))
	}
}

// rootsChanged has sessions verified from now on by the trust bundle as it is on disk.
func (a *Agent) rootsChanged(ctx context.Context) {
	a.mu.Lock()
	roots := a.roots
	a.mu.Unlock()
	if roots == nil {
		return
	}
	if _, err := roots.Reload(); err != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "trust bundle not read again", slog.Any("error", err))
	}
}

// redial opens a session to the endpoint as it is now.
func (a *Agent) redial(ctx context.Context) {
	a.mu.Lock()
	client := a.client
	a.mu.Unlock()
	if client != nil {
		client.Redial(ctx)
	}
}
