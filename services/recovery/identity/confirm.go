package identity

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/identity/opened"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Confirm decides about a batch of Readys in one transaction, and returns the results in the order of the requests.
func (s *Identities) Confirm(ctx context.Context, sessions []*recoveryv1.ConfirmSession) ([]*recoveryv1.ConfirmResult,
	Moment, error,
) {
	var results []*recoveryv1.ConfirmResult
	var moment Moment
	var counted int
	noting, appended := events.Noting(ctx)
	err := pg.InTx(noting, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if results, moment, counted, err = s.confirm(ctx, tx, sessions); err != nil {
			return err
		}
		return failpoint.Hit("recovery.confirm_sessions.before_commit")
	})
	if err != nil {
		return nil, Moment{}, fmt.Errorf("confirm sessions: %w", err)
	}
	if counted > 0 {
		s.deps.Changed.Notify()
	}
	if appended() { // a further session on the same certificate is no event
		s.deps.Wake.Notify()
	}
	if err := failpoint.Hit("recovery.confirm_sessions.after_commit"); err != nil {
		return nil, Moment{}, err
	}
	return results, moment, nil
}

func (s *Identities) confirm(ctx context.Context, tx pgx.Tx,
	sessions []*recoveryv1.ConfirmSession,
) ([]*recoveryv1.ConfirmResult, Moment, int, error) {
	var nodeIDs, sessionIDs, serials []string
	for _, c := range sessions {
		nodeIDs, sessionIDs, serials = append(nodeIDs, c.GetNodeId()), append(sessionIDs, c.GetSessionId()),
			append(serials, c.GetSerial())
	}
	fail := func(err error) ([]*recoveryv1.ConfirmResult, Moment, int, error) { return nil, Moment{}, 0, err }
	records, err := Lock(ctx, tx, nodeIDs...)
	if err != nil {
		return fail(err)
	}
	moment, err := ReadMoment(ctx, tx)
	if err != nil {
		return fail(err)
	}
	known, err := opened.Load(ctx, tx, sessionIDs)
	if err != nil {
		return fail(err)
	}
	uses, err := loadUses(ctx, tx, serials)
	if err != nil {
		return fail(err)
	}
	if err := MarkEnded(ctx, tx, records); err != nil {
		return fail(err)
	}
	results := make([]*recoveryv1.ConfirmResult, 0, len(sessions))
	changed := map[string]*Record{}
	var order []*Record
	var promotions []promotion
	var missing suspects
	admitted := map[string]*recoveryv1.ConfirmResult{} // by node: the last one
	for _, c := range sessions {
		result := &recoveryv1.ConfirmResult{SessionId: c.GetSessionId()}
		results = append(results, result)
		r := records[c.GetNodeId()]
		if r == nil {
			result.Denial = denial(ctx, rollback.Soften(commonv1.Reason_REASON_IDENTITY_UNKNOWN, moment.RolledBack))
			missing.add(c.GetNodeId(), commonv1.Reason_REASON_IDENTITY_UNKNOWN, judge.CertificateUse{}, &result.Denial)
			continue
		}
		ready := judge.Ready{
			InstanceID: c.GetNodeInstanceId(), Generation: c.GetGeneration(), Session: c.GetSessionId(),
			Certificate: uses[c.GetSerial()].Use(r),
		}
		row := known[c.GetSessionId()]
		// The session must be this node's, welcomed, and ready on the certificate it was opened with.
		if row != nil && row.NodeID == r.NodeID && row.InstanceID == r.InstanceID && row.Verdict == verdictWelcome &&
			row.Serial == c.GetSerial() {
			ready.Opened = row.Generation
		}
		verdict := judge.Confirm(r.Standing(moment.Era), r.ConfirmedSession, ready)
		if !verdict.Admitted {
			result.Denial = denial(ctx, rollback.Soften(verdict.Reason, moment.RolledBack))
			missing.add(c.GetNodeId(), verdict.Reason, ready.Certificate, &result.Denial)
			continue
		}
		result.Admitted, admitted[r.NodeID] = true, result
		if verdict.Again {
			continue
		}
		if r.ConfirmedSession != c.GetSessionId() {
			result.SupersededSessionId = r.ConfirmedSession
		}
		if n := len(r.JoinKeys); n > 0 {
			r.JoinKeys = r.JoinKeys[n-1:] // the generation is the last one issued, and the node has stored it
		}
		plain := r.Confirmed > 0 && r.CurrentSerial == c.GetSerial()
		r.Confirmed, r.ConfirmedSession, r.ReplacedNonce = c.GetGeneration(), c.GetSessionId(), row.ReplacesNonce
		promotions = append(promotions, promotion{record: r, serial: c.GetSerial()})
		if changed[r.NodeID] == nil {
			r.plain = true
			changed[r.NodeID] = r
			order = append(order, r)
		}
		r.plain = r.plain && plain
	}
	first := firstReady(promotions)
	if err := promote(ctx, tx, promotions); err != nil {
		return fail(err)
	}
	if err := confirmTokens(ctx, tx, first); err != nil {
		return fail(err)
	}
	if err := noteSessions(ctx, tx, promotions, first); err != nil {
		return fail(err)
	}
	if err := correlate(ctx, tx, admitted); err != nil {
		return fail(err)
	}
	if err := missing.brake(ctx, tx, s.limits(), moment); err != nil {
		return fail(err)
	}
	if _, err := Save(ctx, tx, order...); err != nil {
		return fail(err)
	}
	return results, moment, len(order), nil
}

// ReportChallenge closes a challenge. An answer that proves a copy, or a lost join state, puts the node on hold, since
// recovery cannot tell which of two holders is the right one. In rollback mode no node is put on hold: what the
// database has of the two may be older than both. In a wave of lost join states no node is put on hold for a lost join
// state.
func (s *Identities) ReportChallenge(ctx context.Context, req *recoveryv1.ReportChallengeRequest) (*commonv1.Denial,
	error,
) {
	var reason commonv1.Reason
	held := false
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if reason, held, err = s.reportChallenge(ctx, tx, req); err != nil {
			return err
		}
		return failpoint.Hit("recovery.report_challenge.before_commit")
	})
	if err != nil {
		return nil, fmt.Errorf("report challenge: %w", err)
	}
	if held {
		s.committed()
		s.deps.Logger.WarnContext(ctx, "node put on hold", slog.String(obs.KeyNodeID, req.GetNodeId()),
			slog.String(obs.KeyReason, names.Of(reason)),
			slog.String("remote_address", req.GetRemoteAddress()))
	}
	return denial(ctx, reason), nil
}

func (s *Identities) reportChallenge(ctx context.Context, tx pgx.Tx,
	req *recoveryv1.ReportChallengeRequest,
) (commonv1.Reason, bool, error) {
	r, err := LockOne(ctx, tx, req.GetNodeId())
	if err != nil {
		return 0, false, err
	}
	m, err := ReadMoment(ctx, tx)
	if err != nil {
		return 0, false, err
	}
	known, err := opened.Load(ctx, tx, []string{req.GetSessionId()})
	if err != nil {
		return 0, false, err
	}
	if err := MarkEnded(ctx, tx, map[string]*Record{r.NodeID: r}); err != nil {
		return 0, false, err
	}
	row := known[req.GetSessionId()]
	switch {
	case row == nil || row.NodeID != r.NodeID || row.Verdict != verdictChallenge:
		// A report about a challenge that was never sent is no evidence.
		return 0, false, fault.New(commonv1.Reason_REASON_SESSION_UNKNOWN, "")
	case row.Unreadable:
		return commonv1.Reason_REASON_RECORD_UNREADABLE, false, nil
	case row.Answer != commonv1.Reason_REASON_UNSPECIFIED:
		return rollback.Soften(row.Answer, m.RolledBack), false, nil
	}
	reason := commonv1.Reason_REASON_SESSION_SUPERSEDED
	if row.InstanceID == r.InstanceID {
		reason = judge.Challenge(r.Standing(m.Era), row.FenceEpoch, r.FenceEpoch, row.PutFor, req.GetAnswered())
	}
	if reason, err = s.brakeHold(ctx, tx, r, rollback.Soften(reason, m.RolledBack)); err != nil {
		return 0, false, err
	}
	if err := opened.Answer(ctx, tx, row.SessionID, reason); err != nil {
		return 0, false, err
	}
	switch reason { // every other reason closes the stream and no more
	case commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED:
		r.Hold(AlarmClone, "a second holder of the key answered a challenge with an old generation", m.Now, m.Era)
	case commonv1.Reason_REASON_JOIN_STATE_LOST:
		r.Hold(AlarmJoinState, "the holder of the key has no valid join state", m.Now, m.Era)
	default:
		return reason, false, nil
	}
	_, err = Save(ctx, tx, r)
	return reason, true, err
}
