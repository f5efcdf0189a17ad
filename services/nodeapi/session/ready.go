package session

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
)

// ready waits for the agent's Ready, which reports that the join state is on its disk, and has recovery confirm the
// session.
func (h *handler) ready(ctx context.Context, generation int64) error {
	for {
		frame, err := h.recv()
		if err != nil {
			return err
		}
		switch f := frame.GetFrame().(type) {
		case *nodev1.ConnectRequest_Ready:
			h.server.deps.Metrics.Frame("ready")
			if f.Ready.GetGeneration() != generation {
				return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "Ready names another generation than Welcome did")
			}
			h.keys = &agentKeys{reported: f.Ready.GetTaskKeyIds()}
			return h.confirm(ctx, generation)
		case *nodev1.ConnectRequest_Heartbeat:
			h.heartbeat(f.Heartbeat)
		case *nodev1.ConnectRequest_Goodbye:
			return errHungUp
		default:
			return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "the session is not admitted yet")
		}
	}
}

func (h *handler) confirm(ctx context.Context, generation int64) error {
	h.conn.Place().Heard()
	answered := h.working()
	res, err := h.server.confirms.Do(ctx, &recoveryv1.ConfirmSession{
		SessionId: h.sess.ID, NodeId: h.sess.Identity.NodeID, NodeInstanceId: h.hello.GetNodeInstanceId(),
		Generation: generation, Serial: h.sess.Identity.Serial,
	})
	answered()
	if err != nil {
		return err
	}
	if !res.GetAdmitted() {
		if res.GetDenial() == nil {
			return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the session cannot be confirmed now")
		}
		return fault.FromDenial(res.GetDenial())
	}
	if err := failpoint.Hit("nodeapi.confirm.before_admitted"); err != nil {
		return err
	}
	h.sess.Correlate(res.GetCorrelationId())
	h.conn.Leave()
	h.server.deps.Roster.Admit(h.sess)
	// A decision that came while the session was being opened did not end it: a later session may be confirmed since.
	if decided := h.server.deps.View.Get(h.sess.Identity.NodeID); decided != nil {
		h.server.deps.Roster.OnAuthority(decided)
	}
	h.sess.SendInline(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Admitted{Admitted: &nodev1.Admitted{
		Generation: generation, ServerTime: timestamppb.New(h.server.cfg.Clock.Now()), RunListFollows: true,
	}}})
	// The lists and the policy may have changed after Welcome was sent and before the session was among those that changes
	// are sent to.
	if frame := h.server.cfg.TaskKeys.get(); frame != h.listed && h.sess.Protocol() >= protocolTaskKeys {
		h.sess.SendInline(frame)
	}
	if frame := h.server.cfg.ServiceRoots.get(); frame != h.rooted {
		h.sess.SendInline(frame)
	}
	// Sent until nothing has changed meanwhile: the last frame that the agent gets has the last policy.
	for now := h.server.deps.Policy(); policyChanged(h.policy, now); now = h.server.deps.Policy() {
		h.policy = now
		h.sess.SetInterval(now.GetHeartbeatInterval().AsDuration())
		h.sess.SendInline(PolicyFrame(now))
	}
	h.server.offerAdmitted(h.sess)
	err = h.raiseGate(ctx, generation)
	h.opening = nil
	return err
}
