package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/identity/opened"
	"github.com/gpuaas/mesh/services/recovery/keys"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Keys sign join states and verify them. The set may change while it is used.
type Keys interface {
	SigningID() string
	SignWith(keyID string, state joinstate.State) ([]byte, error)
	Verify(signed []byte) (joinstate.State, error)
}

// Deps are the dependencies of Identities.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Keys   Keys
	// Replica names this process in incidents.
	Replica string
	// Wake is notified after commits that appended events, Changed after those that change the authority view, Notices
	// after those that lifecycle must be notified of.
	Wake, Changed, Notices *events.Signal
	// Audit records certificates that were refused because they are not the ones issued. Nil: they are only logged.
	Audit *audit.Log
	// Policy has the limits of a wave of refusals. Nil: the defaults.
	Policy policy.Reader
}

// Identities decides about sessions and states of nodes. Safe for concurrent use.
type Identities struct {
	deps Deps
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps) (*Identities, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Keys == nil {
		return nil, errors.New("identities need a logger, a pool and join state keys")
	}
	return &Identities{deps: deps}, nil
}

// committed notifies the loops that must read what was just committed: the sequencer, the readers of the authority view
// and the loop that notifies lifecycle of decisions.
func (s *Identities) committed() {
	s.deps.Wake.Notify()
	s.deps.Changed.Notify()
	s.deps.Notices.Notify()
}

// present verifies the join state of a Hello.
func (s *Identities) present(r *Record, signed []byte) judge.Presented {
	return Present(s.deps.Keys, r, signed)
}

// Verifier verifies join states.
type Verifier interface {
	Verify(signed []byte) (joinstate.State, error)
}

// Present verifies the join state that a node presents.
func Present(keys Verifier, r *Record, signed []byte) judge.Presented {
	if len(signed) == 0 {
		return judge.Presented{Form: judge.FormAbsent}
	}
	state, err := keys.Verify(signed)
	if fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN) {
		if claimed, err := joinstate.Peek(signed); err == nil && claimed.NodeInstanceID != r.InstanceID {
			// The state names an earlier enrolment, which cannot be verified. It counts as no state, which any holder of the key
			// may present. Otherwise a node that was enrolled anew because a signing key is lost for good would wait for ever.
			return judge.Presented{Form: judge.FormForeign}
		}
		keyID, _ := joinstate.KeyID(signed) // Verify has read it
		return judge.Presented{Form: judge.FormUnknownKey, KeyID: keyID}
	}
	switch {
	case err != nil, state.NodeID != r.NodeID:
		return judge.Presented{Form: judge.FormUnreadable}
	case state.NodeInstanceID != r.InstanceID:
		return judge.Presented{Form: judge.FormForeign, Generation: state.Generation, Era: state.Era}
	default:
		return judge.Presented{Form: judge.FormSigned, Generation: state.Generation, Era: state.Era, Serial: state.Serial}
	}
}

const (
	verdictWelcome   = "welcome"
	verdictChallenge = "challenge"
)

// Open decides about a batch of Hellos in one transaction, and returns the results in the order of the requests.
func (s *Identities) Open(ctx context.Context, sessions []*recoveryv1.OpenSession) ([]*recoveryv1.OpenResult, Moment,
	error,
) {
	var batch *opening
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		batch = &opening{identities: s, ctx: ctx}
		if err := batch.run(tx, sessions); err != nil {
			return err
		}
		return failpoint.Hit("recovery.open_sessions.before_commit")
	})
	if err != nil {
		return nil, Moment{}, fmt.Errorf("open sessions: %w", err)
	}
	if len(batch.changed) > 0 {
		s.committed()
	}
	if batch.reported {
		s.deps.Wake.Notify()
	}
	if batch.mode != nil {
		rollback.Log(ctx, s.deps.Logger, batch.mode)
	}
	for _, r := range batch.rolledBack {
		s.deps.Logger.ErrorContext(ctx, "a node remembers more than the database", slog.String(obs.KeyNodeID, r.NodeID),
			slog.String(obs.KeyReason, names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK)),
			slog.Int64("adopted_generation", r.Confirmed))
	}
	for _, o := range batch.forged {
		s.reportForged(ctx, o)
	}
	if waiting := batch.unknown; len(waiting) > 0 {
		s.deps.Logger.ErrorContext(ctx, "join states are signed by a key that this replica does not hold; their nodes wait",
			slog.String("key_id", waiting[0].KeyID), slog.Int("nodes", len(waiting)))
	}
	if err := failpoint.Hit("recovery.open_sessions.after_commit"); err != nil {
		return nil, Moment{}, err
	}
	return batch.results, batch.moment, nil
}

// opening is the state of one call of Open.
type opening struct {
	identities *Identities
	ctx        context.Context //nolint:containedctx // of the one transaction that this value lives in
	moment     Moment
	records    map[string]*Record
	serials    map[string]Serial
	known      map[string]*opened.Row
	newRows    []*opened.Row
	keyID      string             // of the key that signs
	issued     map[string]*Record // nodes of which only the issued generation was raised
	changed    []*Record
	rolledBack []*Record
	reported   bool                      // the event of a retired instance was appended
	forged     []*recoveryv1.OpenSession // whose certificate has an issued serial and another key
	evidence   []rollback.Evidence
	unknown    []keys.Unknown // join states that this replica cannot verify
	mode       *rollback.Mode // the rollback mode, if this batch set it; else nil
	suspects   suspects
	results    []*recoveryv1.OpenResult
}

func (b *opening) run(tx pgx.Tx, sessions []*recoveryv1.OpenSession) error {
	var nodeIDs, sessionIDs, serials []string
	for _, o := range sessions {
		nodeIDs, sessionIDs, serials = append(nodeIDs, o.GetNodeId()), append(sessionIDs, o.GetSessionId()),
			append(serials, o.GetSerial())
	}
	var err error
	if b.records, err = Lock(b.ctx, tx, nodeIDs...); err != nil {
		return err
	}
	// Everything below is read under the locks.
	if b.moment, err = ReadMoment(b.ctx, tx); err != nil {
		return err
	}
	if b.known, err = opened.Load(b.ctx, tx, sessionIDs); err != nil {
		return err
	}
	if b.serials, err = loadUses(b.ctx, tx, serials); err != nil {
		return err
	}
	if err := MarkEnded(b.ctx, tx, b.records); err != nil {
		return err
	}
	b.issued = map[string]*Record{}
	b.keyID = b.identities.deps.Keys.SigningID()
	for _, o := range sessions {
		result, err := b.one(tx, o)
		if err != nil {
			return err
		}
		b.results = append(b.results, result)
		if err := b.woken(tx, o); err != nil {
			return err
		}
	}
	if err := opened.Insert(b.ctx, tx, b.newRows); err != nil {
		return err
	}
	if err := b.report(tx); err != nil {
		return err
	}
	appended, err := keys.ReportUnknown(b.ctx, tx, b.identities.deps.Replica, b.unknown)
	if err != nil {
		return err
	}
	b.reported = b.reported || appended
	if err := b.suspects.brake(b.ctx, tx, b.identities.limits(), b.moment); err != nil {
		return err
	}
	for _, r := range b.changed {
		delete(b.issued, r.NodeID)
	}
	if err := raiseIssued(b.ctx, tx, b.issued, b.keyID); err != nil {
		return err
	}
	_, err = Save(b.ctx, tx, b.changed...)
	return err
}

func (b *opening) one(tx pgx.Tx, o *recoveryv1.OpenSession) (*recoveryv1.OpenResult, error) {
	r := b.records[o.GetNodeId()]
	if r == nil {
		return b.refused(o, nil, commonv1.Reason_REASON_IDENTITY_UNKNOWN, judge.CertificateUse{}), nil
	}
	if before := b.known[o.GetSessionId()]; before != nil {
		return b.again(o, r, before)
	}
	certificate := b.serials[o.GetSerial()]
	if certificate.forgedBy(o) {
		b.forged = append(b.forged, o)
		return b.denied(o, r, commonv1.Reason_REASON_SERIAL_UNKNOWN), nil
	}
	presented := b.identities.present(r, o.GetJoinState())
	verdict := judge.Open(r.Standing(b.moment.Era), judge.Hello{
		InstanceID: o.GetNodeInstanceId(), Serial: o.GetSerial(), Presented: presented, Certificate: certificate.Use(r),
	})
	row := &opened.Row{
		SessionID: o.GetSessionId(), NodeID: r.NodeID, InstanceID: r.InstanceID, Serial: o.GetSerial(),
		FenceEpoch: r.FenceEpoch, Era: b.moment.Era, ReplacesNonce: o.GetReplacesNonce(), Facts: o,
	}
	switch verdict.Ruling {
	case judge.RulingChallenge:
		row.Verdict, row.PutFor = verdictChallenge, verdict.Reason
	case judge.RulingWelcome:
		if err := b.adopt(tx, r, o, presented, verdict); err != nil {
			return nil, err
		}
		r.Issued = int64(ids.NextWithEra(ids.Generation(r.Issued), b.moment.Era))
		b.issued[r.NodeID] = r
		row.Verdict, row.Generation = verdictWelcome, r.Issued
		row.KeyID = b.keyID
		r.JoinKeys = joinkeys.With(r.JoinKeys, row.KeyID)
	case judge.RulingDeny:
		if verdict.Reason == commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN {
			b.unknown = append(b.unknown, keys.Unknown{KeyID: presented.KeyID, NodeID: r.NodeID})
		}
		return b.refused(o, r, verdict.Reason, certificate.Use(r)), nil
	default:
		return b.refused(o, r, verdict.Reason, certificate.Use(r)), nil
	}
	b.newRows = append(b.newRows, row)
	b.known[row.SessionID] = row
	return b.again(o, r, row)
}

// woken reports a retired instance that opens a session.
func (b *opening) woken(tx pgx.Tx, o *recoveryv1.OpenSession) error {
	r := b.records[o.GetNodeId()]
	if r == nil || r.Ended() == commonv1.Reason_REASON_UNSPECIFIED {
		return nil
	}
	reported, err := ReportWoken(b.ctx, tx, r,
		Caller{RemoteAddress: o.GetRemoteAddress(), MachineID: o.GetMachineId(), BootID: o.GetBootId()})
	b.reported = b.reported || reported
	return err
}

// again returns the result that the session's row records, so that a repeated request gets the same answer as the
// first.
func (b *opening) again(o *recoveryv1.OpenSession, r *Record, row *opened.Row) (*recoveryv1.OpenResult, error) {
	if row.NodeID != o.GetNodeId() || row.InstanceID != o.GetNodeInstanceId() {
		return b.denied(o, r, commonv1.Reason_REASON_IDENTITY_MISMATCH), nil
	}
	if reason := r.Standing(b.moment.Era).Refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return b.denied(o, r, reason), nil
	}
	if row.Unreadable {
		return b.denied(o, r, commonv1.Reason_REASON_RECORD_UNREADABLE), nil
	}
	result := &recoveryv1.OpenResult{SessionId: o.GetSessionId(), Era: row.Era, FenceEpoch: r.FenceEpoch}
	if row.Verdict == verdictChallenge {
		if row.Answer != commonv1.Reason_REASON_UNSPECIFIED {
			return b.denied(o, r, row.Answer), nil
		}
		result.Verdict = recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE
		return result, nil
	}
	signed, err := b.identities.deps.Keys.SignWith(row.KeyID, joinstate.State{
		NodeID: row.NodeID, NodeInstanceID: row.InstanceID, Generation: row.Generation, Serial: row.Serial, Era: row.Era,
	})
	if err != nil {
		return nil, fmt.Errorf("sign join state: %w", err)
	}
	result.Verdict, result.Generation, result.JoinState = recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME, row.Generation,
		signed
	return result, nil
}
