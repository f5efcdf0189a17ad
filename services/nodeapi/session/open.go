package session

import (
	"context"
	"crypto/rand"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
)

// invalidWait is how long an agent waits after its frame was refused, since the same build sends the same frame again.
const invalidWait = 30 * time.Second

// open takes the stream from its first frame to Admitted.
func (h *handler) open(ctx context.Context) error {
	arrived := h.server.budgets.wait(h.who, h.sess)
	frame, err := h.recv()
	arrived()
	h.conn.Place().Heard()
	if err != nil {
		return err
	}
	hello := frame.GetHello()
	if hello == nil {
		return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "the first frame is not Hello")
	}
	h.server.deps.Metrics.Frame("hello")
	if hello.GetNodeId() != h.sess.Identity.NodeID {
		return fault.New(commonv1.Reason_REASON_IDENTITY_MISMATCH, "Hello names another node than the certificate does")
	}
	proven := func() bool { return h.server.isProven(hello) }
	if wait := h.server.budgets.charge(h.who, proven, wallclock.Now()); wait > 0 {
		h.overBudget = true
		return rateLimited(wait)
	}
	h.hello = hello
	h.server.deps.Roster.Opening(h.sess)
	answered := h.working()
	res, err := h.server.openings.Do(ctx, &recoveryv1.OpenSession{
		SessionId: h.sess.ID, NodeId: hello.GetNodeId(), NodeInstanceId: hello.GetNodeInstanceId(),
		Serial: h.sess.Identity.Serial, JoinState: hello.GetJoinState(), ReplicaId: h.server.cfg.ReplicaID,
		BootId: hello.GetBootId(), MachineId: hello.GetHost().GetMachineId(), RemoteAddress: h.sess.Identity.Remote,
		AgentVersion: hello.GetAgentVersion(), ReplacesNonce: hello.GetReplacesNonce(),
		KeySha256: pki.KeySHA256(h.leaf),
	})
	answered()
	if err != nil {
		return err
	}
	switch res.GetVerdict() {
	case recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME:
		h.server.budgets.noteDecision(h.who, nil, wallclock.Now())
		return h.welcome(ctx, res)
	case recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE:
		return h.challenge(ctx, time.AfterFunc)
	default:
		if res.GetDenial() == nil {
			return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the session cannot be opened now")
		}
		denial := fault.FromDenial(res.GetDenial())
		h.server.budgets.noteDecision(h.who, denial, wallclock.Now())
		return denial
	}
}

func (h *handler) welcome(ctx context.Context, res *recoveryv1.OpenResult) error {
	if err := failpoint.Hit("nodeapi.open.before_welcome"); err != nil {
		return err
	}
	hello := h.hello
	nonce := h.sess.ID + "." + rand.Text()[:16]
	h.join = res.GetJoinState()
	facts := roster.AgentFacts{
		Version: hello.GetAgentVersion(), Protocol: hello.GetProtocolVersion(), LedgerID: hello.GetLedgerId(),
		BootID: hello.GetBootId(), Host: hello.GetHost(), Profile: boundedProfile(hello.GetProfile()),
		Diags:     hello.GetDiagnostics(),
		TaskTypes: hello.GetTaskTypes(),
		Recovery:  bounds.Recovery(hello.GetRecovery()),
	}
	h.sess.Welcomed(hello.GetNodeInstanceId(), res.GetGeneration(), res.GetFenceEpoch(), nonce, hello.GetReplacesNonce(),
		facts)
	h.host.reported(hello.GetHost())
	h.clock.Begin(h.server.cfg.Clock, h.server.lim.ClockTolerance)
	h.policy = h.server.deps.Policy()
	h.sess.SetInterval(h.policy.GetHeartbeatInterval().AsDuration())
	h.listed, h.rooted = h.server.cfg.TaskKeys.get(), h.server.cfg.ServiceRoots.get()
	h.sess.SendInline(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Welcome{Welcome: &nodev1.Welcome{
		Generation: res.GetGeneration(), JoinState: res.GetJoinState(), Nonce: nonce, SessionId: h.sess.ID,
		TaskKeys: h.listed.GetTaskKeys().GetKeys(), ServiceRoots: h.rooted.GetServiceRoots(),
		Policy: h.policy, ServerTime: timestamppb.New(h.server.cfg.Clock.Now()),
		ProfileFingerprint: h.server.announcedProfile(h.sess),
	}}})
	h.conn.Place().Await()
	return h.ready(ctx, res.GetGeneration())
}

// challenge asks a session that presented an old generation for a signature. An answer in time proves a second live
// copy of the node. No answer means a dead connection, such as one that a replica has kept from before it was paused.
// The clock decides what is in time; the timer that after starts, which may be late, only ends the wait.
func (h *handler) challenge(ctx context.Context, after func(time.Duration, func()) *time.Timer) error {
	nonce := make([]byte, 32)
	_, _ = rand.Read(nonce)
	asked := wallclock.Now()
	h.sess.SendInline(h.server.challengeFrame(nonce))
	h.conn.Place().Await()
	answered := make(chan bool, 1)
	timer := after(h.server.lim.Challenge, func() {
		select {
		case answered <- false:
			// The read below ends with the connection.
			_ = h.sess.Identity.Conn.Close()
		default:
		}
	})
	defer timer.Stop()
	ok := h.readAnswer(nonce) && wallclock.Now().Sub(asked) <= h.server.lim.Challenge
	select {
	case answered <- ok:
	default:
		ok = false // the time was up first
	}
	report, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	res, err := h.server.deps.Authority.ReportChallenge(report, &recoveryv1.ReportChallengeRequest{
		SessionId: h.sess.ID, NodeId: h.sess.Identity.NodeID, NodeInstanceId: h.hello.GetNodeInstanceId(), Answered: ok,
		JoinState: h.hello.GetJoinState(), RemoteAddress: h.sess.Identity.Remote,
	})
	if err != nil {
		return err
	}
	if res.GetDenial() == nil {
		return fault.New(commonv1.Reason_REASON_CHALLENGE_FAILED, "the session presented an old generation")
	}
	return fault.FromDenial(res.GetDenial())
}

func (h *handler) readAnswer(nonce []byte) bool {
	for {
		frame, err := h.recv()
		if err != nil {
			return false
		}
		if a := frame.GetChallengeAnswer(); a != nil {
			return string(a.GetNonce()) == string(nonce) &&
				joinstate.VerifyChallenge(h.leaf.PublicKey, nonce, h.sess.Identity.NodeID, a.GetSignature()) == nil
		}
		if frame.GetHeartbeat() == nil {
			return false
		}
	}
}
