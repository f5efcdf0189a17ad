package enrol

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"regexp"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// kindAttempted is the kind of the events about attempts to enrol.
const kindAttempted = "enrollment.attempted"

// noteAttempt returns the version of the next report about a node and an outcome; no row if one was made within the
// minute.
var noteAttempt = pg.Define(pg.RoleRecovery, "enrol.note_attempt", `
	INSERT INTO recovery.enrollment_attempt AS a (node_id, outcome, reported_at, version)
	SELECT i.node_id, $2, mesh.clock(), 1 FROM recovery.identity i WHERE i.node_id = $1
	ON CONFLICT (node_id, outcome) DO UPDATE SET reported_at = mesh.clock(), version = a.version + 1
		WHERE a.reported_at <= mesh.clock() - interval '1 minute'
	RETURNING version`)

// correlationText matches what an agent may give as the correlation of its failures.
var correlationText = regexp.MustCompile(`^[A-Za-z0-9-]{8,64}$`)

// correlated returns a context with the correlation id that an agent gave, if it has the form of one.
func correlated(ctx context.Context, given string) context.Context {
	if !correlationText.MatchString(given) {
		return ctx
	}
	return obs.With(ctx, obs.Correlation{CorrelationID: given})
}

// passes reports whether a refusal tells nothing about the node, and passes by itself.
func passes(err error) bool {
	switch fault.ReasonOf(err) {
	case commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT, commonv1.Reason_REASON_RATE_LIMITED,
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_CONFLICT, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_UNSPECIFIED, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE,
		commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK, commonv1.Reason_REASON_RECORDS_MISSING:
		return true
	default:
		return false
	}
}

// attempt is one attempt to enrol, after its proof unless it is unverified.
type attempt struct {
	nodeID  string
	way     Kind
	outcome commonv1.Reason // unspecified for a certificate that was issued
	// given is the correlation id that the agent gave, and correlation that of the recovery action that it belongs to.
	given, correlation string
	// unverified reports that the caller has not proven to be the node, and keyLost that it says that its recovery key is
	// lost.
	unverified, keyLost bool
}

// name returns the name under which attempts of one outcome are counted: what others claim of a node does not hide what
// the node has proven.
func (a attempt) name() string {
	if a.unverified {
		return names.Of(a.outcome) + " (unverified)"
	}
	return names.Of(a.outcome)
}

// reportAttempt appends the event of an attempt, unless one of the same outcome was appended within the minute. One
// that was refused is noted on the recovery action that is open.
func reportAttempt(ctx context.Context, tx pgx.Tx, a attempt) error {
	version, err := pg.Value[int64](ctx, tx, noteAttempt, a.nodeID, a.name())
	if pg.IsNoRows(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("note attempt: %w", err)
	}
	if a.outcome != commonv1.Reason_REASON_UNSPECIFIED && !a.unverified {
		if a.correlation, err = noteRefused(ctx, tx, a); err != nil {
			return err
		}
	}
	_, err = events.Append(ctx, tx, events.Event{
		Kind: kindAttempted, AggregateType: "enrollment_attempt", AggregateID: a.nodeID + "/" + a.name(),
		AggregateVersion: version,
		Payload: &recoveryv1.EnrollmentAttempted{
			NodeId: a.nodeID, Way: string(a.way), Outcome: a.outcome, Count: version, AttemptCorrelationId: a.given,
			Unverified: a.unverified, KeyLost: a.keyLost,
		},
		Correlation: events.Correlation{CorrelationID: cmp.Or(a.correlation, a.given), NodeID: a.nodeID},
	})
	if err != nil {
		return fmt.Errorf("report attempt: %w", err)
	}
	return nil
}

// reportRefusal reports a refused attempt. What fails here only loses evidence.
func (e *Enroller) reportRefusal(ctx context.Context, a attempt, refusal error) {
	if refusal == nil || passes(refusal) {
		return
	}
	noting, appended := events.Noting(ctx)
	err := pg.InTx(noting, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		a.outcome, a.given = fault.ReasonOf(refusal), obs.From(ctx).CorrelationID
		return reportAttempt(ctx, tx, a)
	})
	if err != nil {
		e.deps.Logger.WarnContext(ctx, "attempt to enrol not reported", slog.String(obs.KeyNodeID, a.nodeID),
			slog.Any(obs.KeyError, err))
		return
	}
	if appended() {
		e.deps.Wake.Notify()
	}
}
