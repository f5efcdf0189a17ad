package nodeapitest

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// ReportChallenge records how a challenge ended.
func (p *Backend) ReportChallenge(_ context.Context,
	req *recoveryv1.ReportChallengeRequest,
) (*recoveryv1.ReportChallengeResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("ReportChallenge")
	p.challenges = append(p.challenges, req)
	reason := commonv1.Reason_REASON_CHALLENGE_FAILED
	if req.GetAnswered() {
		reason = commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED
	}
	return &recoveryv1.ReportChallengeResponse{Denial: fault.ToDenial(fault.New(reason, ""), "")}, nil
}

// RenewCertificate returns the result of the hook Renew.
func (p *Backend) RenewCertificate(_ context.Context,
	req *recoveryv1.RenewCertificateRequest,
) (*recoveryv1.RenewCertificateResponse, error) {
	p.mu.Lock()
	p.count("RenewCertificate")
	renew := p.Renew
	p.mu.Unlock()
	if renew == nil {
		return nil, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "")
	}
	return renew(req)
}

func (w *watcher) put(f *recoveryv1.WatchAuthorityResponse) {
	w.frames = append(w.frames, f)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// WatchAuthority sends a snapshot, then deltas, and answers pings after them.
func (p *Backend) WatchAuthority(ctx context.Context,
	stream *connect.BidiStream[recoveryv1.WatchAuthorityRequest, recoveryv1.WatchAuthorityResponse],
) error {
	first, err := stream.Receive()
	if err != nil || first.GetSubscribe() == nil {
		return errors.Join(errors.New("no subscription"), err)
	}
	w := &watcher{wake: make(chan struct{}, 1)}
	p.mu.Lock()
	p.count("WatchAuthority")
	part := &recoveryv1.AuthoritySnapshotPart{}
	for _, n := range p.nodes {
		part.Nodes = append(part.Nodes, proto.CloneOf(n))
	}
	w.put(&recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Snapshot{Snapshot: part}})
	w.put(&recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_SnapshotEnd{
		SnapshotEnd: &recoveryv1.AuthoritySnapshotEnd{Sequence: p.sequence},
	}})
	p.putProfilesLocked(w)
	if p.issuers != nil {
		w.put(issuersFrame(p.issuers))
	}
	p.watchers[w] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.watchers, w)
		p.mu.Unlock()
	}()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() { // ends with the stream, which ends when this method returns
		for {
			frame, err := stream.Receive()
			if err != nil {
				cancel(err)
				return
			}
			p.mu.Lock()
			if !p.silent {
				w.put(&recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Pong{
					Pong: &recoveryv1.AuthorityPong{PingId: frame.GetPing().GetPingId(), Sequence: p.sequence},
				}})
			}
			p.mu.Unlock()
		}
	}()
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return nil
		}
		p.mu.Lock()
		frames := w.frames
		w.frames = nil
		p.mu.Unlock()
		for _, f := range frames {
			if err := stream.Send(f); err != nil {
				return err
			}
		}
	}
}

type gates struct {
	lifecyclev1connect.UnimplementedGateServiceHandler
	backend *Backend
}

// SessionsReady raises every gate that the hook does not refuse.
func (g gates) SessionsReady(_ context.Context,
	req *lifecyclev1.SessionsReadyRequest,
) (*lifecyclev1.SessionsReadyResponse, error) {
	p := g.backend
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("SessionsReady")
	res := &lifecyclev1.SessionsReadyResponse{}
	for _, s := range req.GetSessions() {
		out := &lifecyclev1.SessionReadyResult{SessionId: s.GetSessionId(), Accepted: true}
		if p.Gate != nil {
			out.Denial = p.Gate(s)
			out.Accepted = out.GetDenial() == nil
		}
		if out.GetAccepted() {
			p.readies = append(p.readies, s)
			if p.Stop != nil {
				out.Cancel = p.Stop(s)
			}
			if p.Runs != nil {
				out.MayRun, out.RunListed = p.Runs(s), true
			}
		}
		res.Results = append(res.Results, out)
	}
	return res, nil
}

// KeysHeld records the keys of tasks that agents hold.
func (g gates) KeysHeld(_ context.Context, req *lifecyclev1.KeysHeldRequest) (*lifecyclev1.KeysHeldResponse, error) {
	p := g.backend
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("KeysHeld")
	res := &lifecyclev1.KeysHeldResponse{}
	for _, s := range req.GetSessions() {
		p.held[s.GetSessionId()] = s.GetKeyIds()
		res.SessionIds = append(res.SessionIds, s.GetSessionId())
	}
	return res, nil
}

type tasks struct {
	lifecyclev1connect.UnimplementedTaskServiceHandler
	backend *Backend
}

// WatchWork passes hints on.
func (t tasks) WatchWork(ctx context.Context, _ *lifecyclev1.WatchWorkRequest,
	stream *connect.ServerStream[lifecyclev1.WatchWorkResponse],
) error {
	p := t.backend
	ch := make(chan *lifecyclev1.WatchWorkResponse, 256)
	p.mu.Lock()
	p.count("WatchWork")
	p.hints[ch] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.hints, ch)
		p.mu.Unlock()
	}()
	if err := stream.Send(&lifecyclev1.WatchWorkResponse{}); err != nil {
		return err
	}
	for {
		select {
		case m := <-ch:
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// LeaseTasks hands out what was queued.
func (t tasks) LeaseTasks(_ context.Context, req *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse,
	error,
) {
	p := t.backend
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("LeaseTasks")
	res := &lifecyclev1.LeaseTasksResponse{}
	for _, n := range req.GetNodes() {
		queue := p.work[n.GetNodeId()]
		take := min(len(queue), int(n.GetMaxTasks()))
		for _, task := range queue[:take] {
			task.SessionId = n.GetSessionId()
			res.Tasks = append(res.Tasks, task)
		}
		if p.work[n.GetNodeId()] = queue[take:]; len(queue) > take {
			res.More = append(res.More, n.GetNodeId())
		}
	}
	return res, nil
}

// ReportTasks records and acknowledges, unless the hook fails.
func (t tasks) ReportTasks(_ context.Context, req *lifecyclev1.ReportTasksRequest) (*lifecyclev1.ReportTasksResponse,
	error,
) {
	p := t.backend
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count("ReportTasks")
	if p.Report != nil {
		if err := p.Report(req); err != nil {
			return nil, err
		}
	}
	res := &lifecyclev1.ReportTasksResponse{}
	for _, r := range req.GetReports() {
		p.reports = append(p.reports, r)
		one := &lifecyclev1.NodeReportResult{NodeId: r.GetNodeId(), SessionId: r.GetSessionId()}
		for _, result := range r.GetResults() {
			if p.Refuse != nil {
				if refusal := p.Refuse(result); refusal != nil {
					one.Refused = append(one.Refused, refusal)
					continue
				}
			}
			one.Acknowledged = append(one.Acknowledged, result.GetTask())
		}
		res.Results = append(res.Results, one)
	}
	return res, nil
}
