package unheard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// shortDwell is the dwell of trust of this drill: longer than it takes to see that the fault took.
const shortDwell = 10 * time.Second

// HostTrust is row 8: the roots by which an agent verifies the node API are replaced by others on its host.
func HostTrust() kit.Drill {
	return kit.Drill{
		Name: "host-trust-drift", Slow: true, // the detector and its mutation are those of pre-auth-blind-spot
		Injects: "the file of the roots by which the agent of a machine verifies the node API is replaced by one with " +
			"other roots, and the agent, whose machine serves a workspace, is killed and started again; and once more with " +
			"a trust.dwell_seconds of 10",
		Sees: "by the API alone `agent_down`; once the record on the host is brought, `server_tls_untrusted`; the workload " +
			"serves",
		Recovers: "the file is put back, as a bundle does: the agent opens a session by itself with the certificate that " +
			"it had; and once more by itself, with the roots that recovery gives it over those pinned for enrolment",
		Needs: "its own mesh: it replaces a file of a machine and reads the record there",
		Expect: kit.Verdict{
			Reason: "server_tls_untrusted", UserState: "recovering", Owner: "profile", Next: "bundle",
		},
		Mutation: staleRecord,
		FailsAt:  stage.Detected,
		Mutate:   ignoreRecords,
		Run:      runHostTrust,
	}
}

func runHostTrust(ctx context.Context, r *kit.Run) error {
	u, err := prepareUnheard(ctx, r)
	if err != nil {
		return err
	}
	defer r.Leave(ctx, u.held.ID)
	f, err := replaceable(u, u.held.Machine.TrustFile())
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = f.restore() }() // as it is, unless the drill failed
	if err := u.distrusts(ctx, f); err != nil {
		return err
	}
	if err := u.alone(ctx); err != nil {
		return err
	}
	if err := u.bring(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED); err != nil {
		return err
	}
	if err := u.detect(ctx); err != nil {
		return err
	}
	if err := f.restore(); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("the file is as it was")
	if err := u.back(ctx); err != nil {
		return err
	}
	if r.Control == kit.None {
		if err := u.repairsItself(ctx, f); err != nil {
			return err
		}
	}
	return r.Retire(ctx, u.held.ID)
}

// distrusts replaces the roots for the node API and kills the agent, which is started again.
func (u *unheard) distrusts(ctx context.Context, f *roots) error {
	return u.r.Inject(ctx, fmt.Sprintf("%s replaced, and the agent of %s, process %d, killed", f.file,
		u.held.Machine.Name(), u.pid),
		func(context.Context) error { return errors.Join(f.replace(), u.held.Machine.Kill9()) },
		func(ctx context.Context) error {
			return errors.Join(f.replaced(), untrustedBy(ctx, u.c.Plan.Addresses.Agents, f.file), host.Gone(u.pid, u.agent))
		})
}

// repairsItself is the drill once more, in which the file is not put back: the agent enrols again over the roots that
// are pinned for enrolment, and takes those for the node API from the answer.
func (u *unheard) repairsItself(ctx context.Context, f *roots) error {
	r, m := u.r, u.r.Mesh
	back, err := dwellsShortly(ctx, r, u.held, shortDwell)
	defer back()
	if err != nil {
		return stage.At(stage.Good, err)
	}
	u.pid = u.held.Machine.PID()
	u.agent = host.Kernel(u.pid)
	if err := u.distrusts(ctx, f); err != nil {
		return err
	}
	err = r.Recovered(ctx, "the node connected with another serial and the roots of the profile, admitted and normal; "+
		"the workspace serves",
		func(ctx context.Context) error {
			if err := f.has(f.good); err != nil {
				return err
			}
			return u.serves(ctx)
		})
	if err != nil {
		return err
	}
	after, err := m.Node(ctx, u.held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	was, is := u.was.GetIdentity(), after.GetIdentity()
	before, now := u.was.GetSession().GetRecovery(), after.GetSession().GetRecovery()
	if is.GetCurrentSerial() == was.GetCurrentSerial() || is.GetNodeInstanceId() != was.GetNodeInstanceId() ||
		now.GetSuccesses() != before.GetSuccesses()+1 {
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v; the agent reports %v, before %v", is, was,
			now, before))
	}
	r.Evidence(after.GetSession().GetSessionId())
	return nil
}
