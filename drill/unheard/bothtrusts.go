package unheard

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
)

// blockedDwell is the dwell of trust of this drill. It is short because an agent tries again ever more seldom: the
// attempt with which it finds that the dwell is over comes up to 30 s later once it has tried for long enough.
const blockedDwell = 5 * time.Second

// BothTrusts is row 9: the roots for the node API and those pinned for enrolment are replaced on a host.
func BothTrusts() kit.Drill {
	return kit.Drill{
		Name: "trust-drift-blocks-recovery", Slow: true,
		Injects: "the files of the roots by which the agent of a machine verifies the node API and enrolment are both " +
			"replaced by ones with other roots, and the agent, whose machine serves a workspace, is killed and started " +
			"again; trust.dwell_seconds is 5",
		Sees: "by the API alone `agent_down`; once the dwell is over and the record on the host is brought, " +
			"`recovery_enrollment_blocked` and operator_action_required; the workload serves; the agent asks no more than " +
			"once in each dwell",
		Recovers: "the roots for the node API are put back on the host: the agent opens a session by itself with the " +
			"certificate that it had",
		Needs: "its own mesh: it replaces files of a machine and reads the record there",
		Expect: kit.Verdict{
			Reason: "recovery_enrollment_blocked", UserState: "operator_action_required", Owner: "profile", Next: "bundle",
		},
		Mutation: staleRecord,
		FailsAt:  stage.Detected,
		Mutate:   ignoreRecords,
		Run:      runBothTrusts,
	}
}

func runBothTrusts(ctx context.Context, r *kit.Run) error {
	u, err := prepareUnheard(ctx, r)
	if err != nil {
		return err
	}
	defer r.Leave(ctx, u.held.ID)
	back, err := dwellsShortly(ctx, r, u.held, blockedDwell)
	defer back()
	if err != nil {
		return stage.At(stage.Good, err)
	}
	api, err := replaceable(u, u.held.Machine.TrustFile())
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = api.restore() }() // as it is, unless the drill failed
	enrolment, err := replaceable(u, u.held.Machine.RecoveryTrustFile())
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = enrolment.restore() }()
	at := u.c.Plan.Addresses
	err = r.Inject(ctx, fmt.Sprintf("%s and %s replaced, and the agent of %s, process %d, killed", api.file,
		enrolment.file, u.held.Machine.Name(), u.pid),
		func(context.Context) error {
			return errors.Join(api.replace(), enrolment.replace(), u.held.Machine.Kill9())
		},
		func(ctx context.Context) error {
			return errors.Join(api.replaced(), untrustedBy(ctx, at.Agents, api.file), enrolment.replaced(),
				untrustedBy(ctx, at.Enroll, enrolment.file), host.Gone(u.pid, u.agent))
		})
	if err != nil {
		return err
	}
	if err := u.alone(ctx); err != nil {
		return err
	}
	if err := u.bring(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED); err != nil {
		return err
	}
	if err := u.detect(ctx); err != nil {
		return err
	}
	if err := stage.At(stage.Recover, api.restore()); err != nil {
		return err
	}
	away := time.Since(r.FaultAt)
	r.Note("the roots for the node API are as they were; those for enrolment are not")
	if err := u.back(ctx); err != nil {
		return err
	}
	if err := u.asked(ctx, away); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, u.held.ID)
}

// asked checks, by what the agent reports on its return, that it tried to recover at least once, at most once in each
// dwell, and never with success.
func (u *unheard) asked(ctx context.Context, away time.Duration) error {
	node, err := u.r.Mesh.Node(ctx, u.held.Node)
	if err != nil {
		return err
	}
	was, is := u.was.GetSession().GetRecovery(), node.GetSession().GetRecovery()
	tried, most := is.GetAttempts()-was.GetAttempts(), int64(away/blockedDwell)+1
	if tried < 1 || tried > most || is.GetSuccesses() != was.GetSuccesses() {
		return fmt.Errorf("the agent tried %d times to recover within %s, %d with success", tried,
			away.Round(time.Second), is.GetSuccesses()-was.GetSuccesses())
	}
	u.r.Note("the agent tried %d times to recover within %s", tried, away.Round(time.Second))
	return nil
}

// dwellsShortly sets the dwell of trust and waits until the agent of a machine has kept it. The returned function sets
// what was before, and may be called if there is an error.
func dwellsShortly(ctx context.Context, r *kit.Run, held mesh.Held, dwell time.Duration) (func(), error) {
	before, _ := r.Policy.Get(policy.TrustDwellSeconds)
	back := func() {
		r.Finally(ctx, func(ctx context.Context) {
			r.Left("the policy", r.Mesh.SetPolicy(ctx, policy.TrustDwellSeconds, before))
		})
	}
	seconds := int(dwell / time.Second)
	if err := r.Mesh.SetPolicy(ctx, policy.TrustDwellSeconds, strconv.Itoa(seconds)); err != nil {
		return back, err
	}
	return back, await.Until(ctx, "the agent to know the dwell", await.Limit, func(context.Context) error {
		data, err := os.ReadFile(filepath.Join(held.Dir, "state", attempts.File)) // of our own mesh
		if err != nil {
			return err
		}
		var kept struct {
			Dwell int `json:"trust_dwell_seconds"`
		}
		if err := json.Unmarshal(data, &kept); err != nil {
			return err
		}
		if kept.Dwell != seconds {
			return fmt.Errorf("it has one of %d s", kept.Dwell)
		}
		return nil
	})
}

// roots are a file of roots on a machine, and ones of another mesh to replace it by.
type roots struct {
	file      string
	good, old []byte
}

// replaceable reads a file of roots of a machine.
func replaceable(u *unheard, file string) (*roots, error) {
	good, err := os.ReadFile(file) // of our own mesh
	if err != nil {
		return nil, err
	}
	other, err := act.Foreign(u.c)
	if err != nil {
		return nil, err
	}
	old, err := os.ReadFile(other.ServiceRoots()) // of our own mesh
	return &roots{file: file, good: good, old: old}, err
}

func (f *roots) replace() error { return pki.WriteFile(f.file, f.old) }

// restore puts the file back; it may be called several times.
func (f *roots) restore() error { return pki.WriteFile(f.file, f.good) }

// replaced returns nil while the file has the roots of the other mesh.
func (f *roots) replaced() error { return f.has(f.old) }

func (f *roots) has(want []byte) error {
	now, err := os.ReadFile(f.file) // of our own mesh
	if err == nil && !bytes.Equal(now, want) {
		err = fmt.Errorf("%s has other roots", f.file)
	}
	return err
}
