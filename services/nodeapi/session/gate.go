package session

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// raising is the report of an admitted session to lifecycle. After an outage each session of a fleet waits with one, so
// it has no goroutine and keeps the report in its encoded form: the messages of Hello have many times the size, and lie
// among what lives as long as the session, so that their memory would not go back.
type raising struct {
	sess   *roster.Session
	keys   *agentKeys
	report []byte   // the lifecyclev1.SessionReady, without the keys
	held   []string // the keys that were reported with the last call
	pause  time.Duration
}

// raiseGate reports the session to lifecycle until lifecycle accepts it or the session has ended. It does not block the
// reader.
func (h *handler) raiseGate(ctx context.Context, generation int64) error {
	report, err := h.server.reports.Keep(&lifecyclev1.SessionReady{
		NodeId: h.sess.Identity.NodeID, NodeInstanceId: h.hello.GetNodeInstanceId(), SessionId: h.sess.ID,
		Generation: generation, JoinState: h.join, LedgerId: h.hello.GetLedgerId(),
		TasksInFlight: h.hello.GetTasksInFlight(), TaskTypes: h.hello.GetTaskTypes(), Host: h.hello.GetHost(),
	})
	if err == nil {
		h.server.raise(ctx, &raising{sess: h.sess, keys: h.keys, report: report, pause: minRaise})
	}
	return err
}

// minRaise and maxRaise bound the pause after which a session is reported again. Each pause is twice the one before it.
const (
	minRaise = 50 * time.Millisecond
	maxRaise = 2 * time.Second
)

// raise sends a session's report with one of the next calls.
func (s *Server) raise(ctx context.Context, r *raising) {
	s.readies.Post(ctx, r, func(res *lifecyclev1.SessionReadyResult, err error) {
		if err == nil && res.GetAccepted() {
			raised := func() {
				s.gateRaised(r.sess, res)
				if r.keys.gateRaised(r.held) {
					s.reportKeys(ctx, r.sess, r.keys)
				}
			}
			if len(res.GetCancel()) > 0 { // sending many waits for the agent
				s.deps.Roster.Go(raised)
			} else {
				raised()
			}
			return
		}
		// A call that failed is logged once for all its sessions, unless it was refused for what one has.
		level := slog.LevelDebug
		if batch.Refused(err) {
			level = slog.LevelWarn
		}
		if err == nil && res.GetDenial() != nil {
			err = fault.FromDenial(res.GetDenial())
			if res.GetDenial().GetAction() != commonv1.Action_ACTION_WAIT {
				r.sess.Close(res.GetDenial())
				return
			}
			// Lifecycle may learn of a new node from recovery only after the node has connected, so the first refusals are
			// expected.
			if r.pause >= time.Second || !fault.Has(err, commonv1.Reason_REASON_NODE_NOT_ADMITTED) {
				level = slog.LevelWarn
			}
		}
		if ctx.Err() != nil || r.sess.Gone() {
			return
		}
		s.deps.Logger.Log(ctx, level, "gate not raised", slog.String("node_id", r.sess.Identity.NodeID),
			slog.Any("error", err))
		pause := r.pause
		r.pause = min(2*pause, maxRaise)
		time.AfterFunc(pause, func() { s.raise(ctx, r) })
	})
}

// readyBatch reports sessions to lifecycle once the view of recovery is fresh. It leaves out those that have ended.
func (s *Server) readyBatch(ctx context.Context, waiting []*raising) ([]*lifecyclev1.SessionReadyResult, error) {
	if err := s.deps.View.WaitFresh(ctx); err != nil {
		return nil, err
	}
	var reqs []*lifecyclev1.SessionReady
	var of []int // of waiting
	for i, r := range waiting {
		if r.sess.Gone() {
			continue
		}
		req := &lifecyclev1.SessionReady{}
		if err := proto.Unmarshal(r.report, req); err != nil {
			return nil, fmt.Errorf("decode the report of a session: %w", err)
		}
		r.held = r.keys.current()
		req.TaskKeyIds = r.held
		reqs, of = append(reqs, req), append(of, i)
	}
	out := make([]*lifecyclev1.SessionReadyResult, len(waiting))
	if len(reqs) == 0 {
		return out, nil
	}
	res, err := s.deps.Gate.SessionsReady(ctx,
		&lifecyclev1.SessionsReadyRequest{ReplicaId: s.cfg.ReplicaID, Sessions: reqs})
	if err == nil && len(res.GetResults()) != len(reqs) {
		err = fmt.Errorf("%w: %d for %d", batch.ErrLength, len(res.GetResults()), len(reqs))
	}
	if err != nil {
		return nil, fmt.Errorf("raise gates: %w", err)
	}
	for i, result := range res.GetResults() {
		out[of[i]] = result
	}
	return out, nil
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
