package unheard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// oldHosts are endpoints at which nothing answers any more: the agent's old host family.
const oldHosts = "https://127.0.0.1:1"

// EndpointDrift is row 7: an agent's endpoints are those of an old host family.
func EndpointDrift() kit.Drill {
	return kit.Drill{
		Name: "endpoint-profile-drift", Slow: true,
		Injects: "the endpoints of a machine's agent, whose machine serves a workspace, are set to those of an old host " +
			"family, where nothing answers; the agent is killed and started again",
		Sees: "by the API alone `agent_down`; once the record on the host is brought, `endpoint_profile_drift`; the " +
			"workload serves",
		Recovers: "a bundle for the node is issued: spoiled, and without its digest spoiled too, it changes nothing on the " +
			"host; whole, it rewrites endpoints and trust together after they were tested, and the agent is back as the same " +
			"node instance with another certificate",
		Needs: "its own mesh: it writes the environment file of a machine and runs the agent's program there",
		Expect: kit.Verdict{
			Reason: "endpoint_profile_drift", UserState: "operator_action_required", Owner: "profile", Next: "bundle",
		},
		Mutation: staleRecord,
		FailsAt:  stage.Detected,
		Mutate:   ignoreRecords,
		Run:      runEndpointDrift,
	}
}

func runEndpointDrift(ctx context.Context, r *kit.Run) error {
	u, err := prepareUnheard(ctx, r)
	if err != nil {
		return err
	}
	defer r.Leave(ctx, u.held.ID)
	api, enrol, err := u.held.Machine.Endpoints()
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer r.Finally(ctx, func(ctx context.Context) { // the agent runs and has its endpoints, unless the drill failed
		if now, _, err := u.held.Machine.Endpoints(); err == nil && now == oldHosts {
			_ = u.held.Machine.Stop(ctx)
			_ = u.held.Machine.PointAt(api, enrol)
		}
		_ = u.held.Machine.Start()
	})
	err = r.Inject(ctx, fmt.Sprintf("the endpoints of %s set from %s to %s, and its agent, process %d, killed",
		u.held.Machine.Name(), api, oldHosts, u.pid),
		func(context.Context) error {
			return errors.Join(u.held.Machine.PointAt(oldHosts, oldHosts), u.held.Machine.Kill9())
		},
		func(ctx context.Context) error {
			if now, _, err := u.held.Machine.Endpoints(); err != nil || now != oldHosts {
				return errors.Join(err, fmt.Errorf("the host has %s as the node API", now))
			}
			return errors.Join(unusedAddress(ctx, strings.TrimPrefix(oldHosts, "https://")), host.Gone(u.pid, u.agent))
		})
	if err != nil {
		return err
	}
	if err := u.alone(ctx); err != nil {
		return err
	}
	if err := u.bring(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT); err != nil {
		return err
	}
	if err := u.detect(ctx); err != nil {
		return err
	}
	if err := u.takeBundle(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	if now, then, err := u.held.Machine.Endpoints(); err != nil || now == oldHosts || then == oldHosts {
		return stage.At(stage.Recover, errors.Join(err, fmt.Errorf("the bundle left %s and %s, was %s and %s", now, then,
			api, enrol)))
	}
	if err := u.held.Machine.Start(); err != nil {
		return stage.At(stage.Recover, err)
	}
	return u.enrolledAgain(ctx)
}

// takeBundle issues a bundle for the node and takes it on the host, after it was tried there spoiled.
func (u *unheard) takeBundle(ctx context.Context) error {
	if err := u.held.Machine.Stop(ctx); err != nil {
		return err
	}
	issued, err := await.Answer(ctx, "a bundle for the node", func(ctx context.Context) (*readmodelv1.IssueBundleResponse,
		error,
	) {
		return u.r.Mesh.Client.Bundles.IssueBundle(ctx, &readmodelv1.IssueBundleRequest{
			NodeId: u.held.Node, Reason: "its endpoints are those of the old hosts", IdempotencyKey: u.held.ID,
		})
	})
	if err != nil {
		return err
	}
	u.r.Evidence(issued.GetTokenId())
	spoiled := slices.Clone(issued.GetArchive())
	spoiled[len(spoiled)/2] ^= 1
	for _, digest := range []string{issued.GetDigest(), ""} {
		if out, err := u.held.Machine.TakeBundle(ctx, spoiled, digest); err == nil {
			return fmt.Errorf("a bundle of which a bit was turned was taken: %s", out)
		}
		if now, _, err := u.held.Machine.Endpoints(); err != nil || now != oldHosts {
			return errors.Join(err, fmt.Errorf("a refused bundle left %s as the node API", now))
		}
	}
	node, err := u.r.Mesh.Node(ctx, u.held.Node)
	if err != nil {
		return err
	}
	if serial := node.GetIdentity().GetCurrentSerial(); serial != u.was.GetIdentity().GetCurrentSerial() {
		return fmt.Errorf("the certificate is %s before the bundle was used", serial)
	}
	// The host trusts the key that signs bundles, so it needs no digest.
	if _, err := u.held.Machine.TakeBundle(ctx, issued.GetArchive(), ""); err != nil {
		return err
	}
	u.r.Note("a bundle for %s was taken on its host; spoiled it was refused", issued.GetNodeName())
	return nil
}

// enrolledAgain waits until the agent is back, and checks that it is the same node instance with another certificate.
func (u *unheard) enrolledAgain(ctx context.Context) error {
	r, m := u.r, u.r.Mesh
	err := r.Recovered(ctx, "the node connected as the same node instance with another serial, admitted and normal; the "+
		"workspace serves", func(ctx context.Context) error {
		if err := act.Connected(ctx, m, u.held.Node); err != nil {
			return err
		}
		ws, err := m.Workspace(ctx, u.held.ID)
		if err != nil {
			return err
		}
		return m.Serving(ctx, u.held.ID, ws.GetEpoch())
	})
	if err != nil {
		return err
	}
	after, err := m.Node(ctx, u.held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	was, is := u.was.GetIdentity(), after.GetIdentity()
	if is.GetNodeInstanceId() != was.GetNodeInstanceId() || is.GetCurrentSerial() == was.GetCurrentSerial() {
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v", is, was))
	}
	r.Evidence(after.GetSession().GetSessionId(), is.GetCurrentSerial())
	return r.Retire(ctx, u.held.ID)
}

// unusedAddress checks, by a connection of the drill's own, that nothing listens at an address.
func unusedAddress(ctx context.Context, address string) error {
	const patience = 2 * time.Second
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", address)
	if err == nil {
		return errors.Join(fmt.Errorf("something listens at %s", address), conn.Close())
	}
	return nil
}
