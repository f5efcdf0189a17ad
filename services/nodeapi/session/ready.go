package session

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
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
	h.listed, h.rooted, h.policy = nil, nil, nil
	h.server.offerAdmitted(h.sess)
	h.raiseGate(ctx, generation)
	h.hello = nil // an idle session keeps what it needs
	return nil
}

// raiseGate reports the session to lifecycle until lifecycle accepts it or the session has ended. It does not block the
// reader.
func (h *handler) raiseGate(ctx context.Context, generation int64) {
	s, sess, hello, join, keys := h.server, h.sess, h.hello, h.join, h.keys
	h.join = nil
	s.deps.Roster.Go(func() {
		pause := 50 * time.Millisecond
		for !sess.Gone() && s.deps.View.WaitFresh(ctx) == nil {
			held := keys.current()
			res, err := s.readies.Do(ctx, &lifecyclev1.SessionReady{
				NodeId: sess.Identity.NodeID, NodeInstanceId: hello.GetNodeInstanceId(), SessionId: sess.ID, Generation: generation,
				JoinState: join, LedgerId: hello.GetLedgerId(), TasksInFlight: hello.GetTasksInFlight(),
				TaskTypes:  hello.GetTaskTypes(),
				Host:       hello.GetHost(),
				TaskKeyIds: held,
			})
			if err == nil && res.GetAccepted() {
				s.gateRaised(sess, res)
				if keys.gateRaised(held) {
					s.reportKeys(ctx, sess, keys)
				}
				return
			}
			if err == nil && res.GetDenial() != nil {
				err = fault.FromDenial(res.GetDenial())
				if res.GetDenial().GetAction() != commonv1.Action_ACTION_WAIT {
					sess.Close(res.GetDenial())
					return
				}
			}
			if ctx.Err() != nil {
				return
			}
			// Lifecycle may learn of a new node from recovery only after the node has connected, so the first refusals are
			// expected.
			level := slog.LevelWarn
			if pause < time.Second && fault.Has(err, commonv1.Reason_REASON_NODE_NOT_ADMITTED) {
				level = slog.LevelDebug
			}
			s.deps.Logger.Log(ctx, level, "gate not raised", slog.String("node_id", sess.Identity.NodeID),
				slog.Any("error", err))
			select {
			case <-time.After(pause):
				pause = min(2*pause, 2*time.Second)
			case <-ctx.Done():
			}
		}
	})
}

func (s *Server) gateRaised(sess *roster.Session, res *lifecyclev1.SessionReadyResult) {
	// The list is sent before any offer, so that a workload which a task starts is not checked against a list that was
	// made before it.
	sess.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_RunList{RunList: &nodev1.RunList{
		MayRun: res.GetMayRun(), Unlisted: !res.GetRunListed(),
	}}})
	if len(res.GetAcknowledged()) > 0 {
		sess.Send(
			&nodev1.ConnectResponse{
				Frame: &nodev1.ConnectResponse_TaskResultAck{TaskResultAck: &nodev1.TaskResultAck{Tasks: res.GetAcknowledged()}},
			},
		)
	}
	sess.SendAll(sess.Cancels(res.GetCancel(), 0, "not wanted any more"))
	sess.SetWorkReady()
	if sess.Gone() {
		// Consumers may have read the end of the session before lifecycle had its beginning, so the end is reported again.
		s.deps.Roster.RepeatClosed(sess)
		return
	}
	s.deps.Work.Ready(sess)
}
