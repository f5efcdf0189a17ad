package drill

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// hostTrust is row 8: the roots by which an agent verifies the node API are replaced by others on its host.
func hostTrust() kit.Drill {
	return kit.Drill{
		Name: "host-trust-drift",
		Injects: "the file of the roots by which the agent of a machine verifies the node API is replaced by one with " +
			"other roots, and the agent, whose machine serves a workspace, is killed and started again",
		Sees: "by the API alone `agent_down`; once the record on the host is brought, `server_tls_untrusted`; the workload " +
			"serves",
		Recovers: "the file is put back, as a bundle does: the agent opens a session by itself with the certificate that " +
			"it had",
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
	file := u.held.Machine.TrustFile()
	good, err := os.ReadFile(file) // of our own mesh
	if err != nil {
		return stage.At(stage.Good, err)
	}
	other, err := foreign(u.c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	old, err := os.ReadFile(other.ServiceRoots()) // of our own mesh
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = pki.WriteFile(file, good) }() // as it is, unless the drill failed
	err = r.Inject(ctx, fmt.Sprintf("%s replaced, and the agent of %s, process %d, killed", file, u.held.Machine.Name(),
		u.pid),
		func(context.Context) error { return errors.Join(pki.WriteFile(file, old), u.held.Machine.Kill9()) },
		func(ctx context.Context) error {
			now, err := os.ReadFile(file) // of our own mesh
			if err != nil {
				return err
			}
			if !bytes.Equal(now, old) {
				return fmt.Errorf("%s is not as it was written", file)
			}
			return errors.Join(untrustedBy(ctx, u.c.Plan.Addresses.Agents, file), host.Gone(u.pid, u.agent))
		})
	if err != nil {
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
	if err := pki.WriteFile(file, good); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("the file is as it was")
	return u.recovered(ctx)
}
