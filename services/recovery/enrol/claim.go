package enrol

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// claim is an enrolment lease: the right of one attempt to have a certificate signed for a node.
type claim struct {
	id         string
	nodeID     string
	instanceID string // of the node, if the attempt makes a new one
	profile    string // of the node, by name

	dbTime time.Time // when it was taken, by the database's clock
	taken  time.Time // the same by this process's monotonic clock
}

// now returns the database's time.
func (c *claim) now() time.Time { return c.dbTime.Add(time.Since(c.taken)) }

// takeClaim takes the enrolment lease of a node for one attempt. The caller has the lock on the node's row. by is the
// token of the attempt, the zero token for a renewal, and key the hash of the public key that is to be certified. An
// earlier attempt whose lease has run out is abandoned; a certificate that it had signed becomes an orphan. If another
// attempt's lease stands, takeClaim returns fault enrollment_in_flight.
func takeClaim(ctx context.Context, tx pgx.Tx, r *identity.Record, by token, key []byte, lease time.Duration,
	now time.Time,
) (*claim, error) {
	earlier, err := pg.One[enrolmentLease](ctx, tx, readClaim, r.NodeID)
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return nil, fmt.Errorf("look for an enrolment in flight: %w", err)
	case earlier.Until.After(now):
		return nil, fault.New(commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT, "",
			fault.RetryAfter(min(earlier.Until.Sub(now), time.Second)))
	default:
		if err := endClaim(ctx, tx, earlier.ID, "abandoned", "", "its lease ran out"); err != nil {
			return nil, err
		}
	}
	c := &claim{
		id: ids.New(), nodeID: r.NodeID, instanceID: ids.New(), profile: r.Profile, dbTime: now, taken: time.Now(),
	}
	tokenID, recoveryID := by.ID, ""
	if by.Kind == KindRecovery {
		tokenID, recoveryID = "", by.ID
	}
	_, err = pg.Exec(ctx, tx, insertClaim, c.id, tokenID, r.NodeID, key, lease.Seconds(), recoveryID)
	if err != nil {
		return nil, fmt.Errorf("claim enrolment: %w", err)
	}
	return c, nil
}

// endClaim ends an enrolment lease that still stands; fault conflict if it does not.
func endClaim(ctx context.Context, q pg.Querier, id, state, serial, failure string) error {
	tag, err := pg.Exec(ctx, q, closeClaim, id, state, serial, failure)
	if err != nil {
		return fmt.Errorf("end enrolment: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "")
	}
	return nil
}

// stored returns what the end of a transaction that stores a signed certificate means for the caller: nil, or an error
// that begins with what was done. A certificate that was not stored is recorded as an orphan.
func (e *Enroller) stored(ctx context.Context, c *claim, serial, what string, err error) error {
	switch {
	case err == nil:
		e.committed()
		return nil
	case errors.Is(err, pg.ErrCommitUnknown):
		// The caller asks again with the same key, and gets the certificate if the transaction was committed.
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.Cause(err))
	}
	err = errors.Join(err, e.orphan(context.WithoutCancel(ctx), c, serial, err))
	if fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
		// Another attempt took over after this attempt's lease had run out.
		return fault.New(commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT, "", fault.Cause(err))
	}
	return fmt.Errorf("%s: %w", what, err)
}

// orphan records, on the attempt that had it signed, a certificate that was signed and is not accepted.
func (e *Enroller) orphan(ctx context.Context, c *claim, serial string, why error) error {
	_, err := pg.Exec(ctx, e.deps.Pool, recordOrphan, c.id, serial, why.Error())
	if err != nil {
		return fmt.Errorf("record orphan certificate: %w", err)
	}
	return nil
}

// release ends the lease of an attempt whose signing failed, so that the next attempt need not wait until the lease
// runs out. It does not end with the request's context.
func (e *Enroller) release(ctx context.Context, c *claim, why error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := endClaim(ctx, e.deps.Pool, c.id, "failed", "", fault.From(why).Public); err != nil {
		// The lease runs out by itself.
		e.deps.Logger.DebugContext(ctx, "claim not released", slog.Any(obs.KeyError, err))
	}
}

// stateRefusal returns why a node in this state may be given no certificate, nil if it may. If held is true, a hold is
// no reason to refuse: a person issued the token to end it.
func stateRefusal(r *identity.Record, held bool) error {
	switch r.State {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE:
		return nil
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		if held {
			return nil
		}
		return fault.New(commonv1.Reason_REASON_IDENTITY_HELD, "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		return fault.New(commonv1.Reason_REASON_IDENTITY_RETIRED, "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
	}
	return fault.New(commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, "")
}
