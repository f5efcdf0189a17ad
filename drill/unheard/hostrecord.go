package unheard

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/hostrecord"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// staleRecord is the mutation of drills whose verdict follows from the record of a host.
const staleRecord = "the replicas of recovery are started anew with a host_record_fresh of a millisecond: a record " +
	"that a person brings is over before anything is concluded from it; the fault is as before"

var ignoreRecords = act.Restarted(act.Recovery, "GPUAAS_RECOVERY_HOST_RECORD_FRESH=1ms")

// unheard is a machine that serves a workspace, and whose agent is to lose the control plane.
type unheard struct {
	r    *kit.Run
	c    *cluster.Cluster
	held mesh.Held
	was  *readmodelv1.Node
	// pid and agent are of the process before the fault.
	pid   int
	agent host.Process
}

// prepareUnheard places a workspace on a machine. The caller calls r.Leave with its id.
func prepareUnheard(ctx context.Context, r *kit.Run) (*unheard, error) {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return nil, err
	}
	held, err := mesh.PlaceOnMachine(ctx, r.Mesh, c)
	if err != nil {
		return nil, stage.At(stage.Good, err)
	}
	r.About(held.ID, held.Node)
	u := &unheard{r: r, c: c, held: held, pid: held.Machine.PID()}
	if u.was, err = r.Mesh.Node(ctx, held.Node); err != nil {
		return nil, stage.At(stage.Good, err)
	}
	r.Evidence(u.was.GetIdentity().GetNodeInstanceId(), u.was.GetSession().GetSessionId())
	u.agent = host.Kernel(u.pid)
	return u, nil
}

// node returns the verdict on the node as the API shows it. It is an error unless its reason is the given one.
func (u *unheard) node(ctx context.Context, reason string) (*readmodelv1.Node, error) {
	node, err := u.r.Mesh.Node(ctx, u.held.Node)
	if err == nil && (node.GetConnected() || node.GetReason() != reason) {
		err = fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(),
			names.Of(node.GetUserState()), node.GetReason())
	}
	return node, err
}

// alone waits until the API, which has nothing but the agent's silence, names that.
func (u *unheard) alone(ctx context.Context) error {
	budget := time.Duration(u.r.Result.DetectionBudgetSeconds * float64(time.Second))
	err := await.Until(ctx, "the API to miss the agent", budget, func(ctx context.Context) error {
		_, err := u.node(ctx, "agent_down")
		return err
	})
	if err != nil {
		return stage.At(stage.Detected, err)
	}
	u.r.Note("by the API alone the node is agent_down")
	return nil
}

// bring runs the agent's program on the machine until its record has a code, and brings what it prints, as
// `gpuaas nodes diag NODE --file` does; and once more, which must change nothing.
func (u *unheard) bring(ctx context.Context, code commonv1.DiagnosticCode) error {
	var records []*recoveryv1.HostRecord
	err := await.Until(ctx, "the host's record to have "+names.Of(code), await.Patience, func(ctx context.Context) error {
		printed, err := u.held.Machine.Diagnose(ctx)
		if err != nil {
			return err
		}
		if records, err = hostrecord.Read(bytes.NewReader(printed)); err != nil {
			return err
		}
		if !slices.ContainsFunc(records, func(r *recoveryv1.HostRecord) bool {
			// One of an earlier fault may be there still, and explains nothing of this one.
			return r.GetCode() == names.Of(code) && r.GetEndedAt() == nil && !r.GetLastSeenAt().AsTime().Before(u.r.FaultAt)
		}) {
			return fmt.Errorf("it has %d other entries", len(records))
		}
		return nil
	})
	if err != nil {
		return stage.At(stage.Detected, err)
	}
	merge := func(ctx context.Context) (*readmodelv1.MergeDiagnosticsResponse, error) {
		return u.r.Mesh.Client.Diagnostics.MergeDiagnostics(ctx,
			&readmodelv1.MergeDiagnosticsRequest{Node: u.held.Machine.Name(), Records: records})
	}
	first, err := await.Answer(ctx, "the record to be taken", merge)
	if err != nil {
		return stage.At(stage.Detected, err)
	}
	u.r.Note("the record of the host, of %d entries, was brought: it explains %v", len(records),
		first.GetMerged().GetExplains())
	if u.r.Control != kit.None {
		return nil
	}
	again, err := await.Answer(ctx, "the record to be taken again", merge)
	if err == nil && again.GetMerged().GetChanged() {
		err = errors.New("the same record once more is taken for a new one")
	}
	return stage.At(stage.Detected, err)
}

// detect waits for the verdict of the row, which must name what the host recorded.
func (u *unheard) detect(ctx context.Context) error {
	err := u.r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		node, err := u.node(ctx, u.r.Drill.Expect.Reason)
		v := kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		if err == nil && !slices.ContainsFunc(node.GetVerdict().GetEvidence(), func(e *recoveryv1.Evidence) bool {
			return e.GetSource() == commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST && e.GetDetail() != ""
		}) {
			err = errors.New("the verdict names no evidence of the host")
		}
		u.r.Evidence(node.GetVerdict().GetCorrelationId())
		return v, err
	})
	if err != nil {
		return err
	}
	if err := u.r.Check(ctx); err != nil {
		return err
	}
	if err := mesh.Answers(ctx, u.held.URL); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the workload does not serve while its agent is away: %w", err))
	}
	return nil
}

// recovered waits until the agent is back by itself, checks that its identity is as it was, and ends the workspace.
func (u *unheard) recovered(ctx context.Context) error {
	if err := u.back(ctx); err != nil {
		return err
	}
	return u.r.Retire(ctx, u.held.ID)
}

// serves returns nil once the node is connected and normal and its workspace serves.
func (u *unheard) serves(ctx context.Context) error {
	if err := act.Connected(ctx, u.r.Mesh, u.held.Node); err != nil {
		return err
	}
	ws, err := u.r.Mesh.Workspace(ctx, u.held.ID)
	if err != nil {
		return err
	}
	return u.r.Mesh.Serving(ctx, u.held.ID, ws.GetEpoch())
}

// back waits until the agent is back by itself, and checks that its identity is as it was.
func (u *unheard) back(ctx context.Context) error {
	r := u.r
	err := r.Recovered(ctx, "the node connected with the same serial, admitted and normal; the workspace serves", u.serves)
	if err != nil {
		return err
	}
	after, err := r.Mesh.Node(ctx, u.held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	was, is := u.was.GetIdentity(), after.GetIdentity()
	if is.GetCurrentSerial() != was.GetCurrentSerial() || is.GetNodeInstanceId() != was.GetNodeInstanceId() ||
		is.GetMints() != was.GetMints() {
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v", is, was))
	}
	r.Evidence(after.GetSession().GetSessionId())
	return nil
}

// untrustedBy checks, by a handshake of the drill's own, that a server's certificate does not verify with the roots in
// a file.
func untrustedBy(ctx context.Context, addr, roots string) error {
	text, err := os.ReadFile(roots) // of our own mesh
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return fmt.Errorf("%s has no roots", roots)
	}
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, //nolint:gosec // the certificate is verified below
	}}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	shown := conn.(*tls.Conn).ConnectionState().PeerCertificates
	between := x509.NewCertPool()
	for _, cert := range shown[1:] {
		between.AddCert(cert)
	}
	_, err = shown[0].Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); !unknown {
		return fmt.Errorf("the certificate that %s shows verifies: %v", addr, err) //nolint:errorlint // nil, or another one
	}
	return nil
}
