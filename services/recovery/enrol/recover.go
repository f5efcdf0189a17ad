package enrol

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/instance"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// limitOfHour returns the seconds until the oldest of a node's last recoveries is an hour old, if there were as many
// within the hour as the policy allows; no row if there were fewer.
var limitOfHour = pg.Define(pg.RoleRecovery, "enrol.read_limit_of_hour", `
	SELECT extract(epoch FROM e.started_at + interval '1 hour' - mesh.clock())::float8 FROM recovery.enrollment e
	WHERE e.node_id = $1 AND e.recovery_token_id IS NOT NULL AND e.state = 'done'
		AND e.started_at > mesh.clock() - interval '1 hour'
	ORDER BY e.started_at DESC OFFSET $2 LIMIT 1`)

// proveRecovery checks all of a recovery token that can be checked without changing anything: its signature, audience
// and time, and that the caller holds the recovery key and the key of the request.
func (e *Enroller) proveRecovery(ctx context.Context, presented Presented, req *recoveryv1.EnrollRequest) (*redemption,
	error,
) {
	claims, err := e.recovery.Verify(req.GetToken())
	if other, ok := errors.AsType[*ca.UnknownKeyError](err); ok {
		// The replicas of recovery have different keys if that key has signed this token; else it is not one of ours.
		ours, err := tokens.SignedBy(ctx, e.deps.Pool, other.TokenID, other.KeyID)
		switch {
		case err != nil:
			return nil, err
		case ours && e.recovery.Retired(other.KeyID):
			return nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "", fault.Cause(other))
		case ours:
			return nil, fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN, "", fault.Cause(other))
		}
		return nil, invalid("it is signed by another key")
	}
	if err != nil {
		return nil, err
	}
	m, err := identity.ReadMoment(ctx, e.deps.Pool)
	switch {
	case err != nil:
		return nil, err
	case claims.IssuedAt.After(m.Now):
		return nil, fault.New(commonv1.Reason_REASON_TOKEN_NOT_YET_VALID, "")
	case claims.Era > m.Era:
		return nil, rollback.Refusal() // of a history that the database has lost
	}
	parsed, err := ca.CheckCSR(req.GetCsr(), pki.NodeID(e.cfg.TrustDomain, claims.NodeID))
	if err != nil {
		return nil, err
	}
	key, err := keyOf(parsed)
	if err != nil {
		return nil, err
	}
	bound := sha256.Sum256(req.GetRecoveryPublicKey())
	switch {
	case subtle.ConstantTimeCompare(bound[:], claims.KeySHA256) != 1:
		return nil, invalid("it is bound to another recovery key")
	case bytes.Equal(bound[:], key):
		return nil, fault.New(commonv1.Reason_REASON_CSR_REFUSED, "the recovery key may certify nothing")
	}
	if err := recoverykey.Verify(req.GetRecoveryPublicKey(), req.GetToken(), req.GetCsr(),
		req.GetRecoveryProof()); err != nil {
		return nil, fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "", fault.Cause(err))
	}
	return &redemption{
		presented: presented, csr: req.GetCsr(), key: key, claims: claims, joinState: req.GetJoinState(),
		recoveryKey: req.GetRecoveryPublicKey(),
		token:       token{ID: claims.TokenID, Kind: KindRecovery, NodeID: claims.NodeID},
	}, nil
}

// lockRecovery reads the row of a recovery token into the redemption, under the lock on the node's row.
func (a *redemption) lockRecovery(ctx context.Context, tx pgx.Tx) error {
	row, found, err := tokens.Lock(ctx, tx, a.token.ID)
	switch {
	case err != nil:
		return err
	case !found:
		return invalid("it is not recorded")
	case !row.Is(a.claims):
		return invalid("it was replaced")
	}
	a.row = row
	a.token = token{
		ID: row.ID, Kind: KindRecovery, NodeID: row.NodeID, State: row.State, UsedKey: row.UsedKey,
		UsedSerial: row.UsedSerial,
	}
	return nil
}

// checkRecovery decides whether a node may have a certificate for a recovery token, and whether it keeps its node
// instance.
func (e *Enroller) checkRecovery(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	if r.LaunchedInstanceID != "" {
		if done, refused, err := e.checkLaunched(ctx, tx, r); err != nil || refused != nil {
			return done, refused, err
		}
	}
	if reason := identity.RecoveryRefusal(r); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return nil, nil, fault.New(reason, "")
	}
	if a.claims.Profile != e.deps.Profiles.Name(r.Profile) {
		return nil, nil, invalid("it is of another profile")
	}
	ruling := judge.Recover(r.Standing(m.Era), identity.Present(e.deps.JoinStates, r, a.joinState))
	if a.token.State == tokens.StateUsed {
		done, err := repeatOf(ctx, tx, r, a)
		if err != nil || done != nil {
			return done, nil, err
		}
		return e.reused(ctx, tx, r, a, m)
	}
	switch {
	case ruling.Reason != commonv1.Reason_REASON_UNSPECIFIED:
		return nil, nil, e.refuseOld(ctx, r, ruling.Reason)
	case a.token.State == tokens.StateExpired:
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	case a.token.State != tokens.StateIssued:
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token was ended: "+a.row.EndedBy)
	case m.RolledBack && !ruling.Continue:
		// What the database knows of the node may be older than the node, and no second node instance may follow from it.
		return nil, nil, rollback.Refusal()
	}
	if err := unusedKey(ctx, tx, r, a); err != nil {
		return nil, nil, err
	}
	a.continues = ruling.Continue
	return nil, nil, e.allowRecovery(ctx, tx, a)
}

// refuseOld refuses a node for the join state that it presents, and reports one that is a copy's.
func (e *Enroller) refuseOld(ctx context.Context, r *identity.Record, reason commonv1.Reason) error {
	if reason == commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED {
		e.deps.Logger.WarnContext(ctx, "a recovery token was presented with an old join state",
			slog.String(obs.KeyNodeID, r.NodeID), slog.Int64("confirmed", r.Confirmed))
	}
	return fault.New(reason, "")
}

// checkLaunched refuses an instance that has ended or was replaced.
func (e *Enroller) checkLaunched(ctx context.Context, tx pgx.Tx, r *identity.Record) (*repeat, error, error) {
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		return refuseEnded(ctx, tx, r)
	}
	highest, err := instance.HighestEpoch(ctx, tx, r.WorkspaceID)
	if err != nil {
		return nil, nil, err
	}
	if r.Epoch < highest.Number || highest.InstanceID != r.LaunchedInstanceID {
		return nil, fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, ""), nil
	}
	return nil, nil, nil
}

// allowRecovery refuses what the policy does not allow: recovery without a person, more recoveries of a node within an
// hour, a token that is too old.
func (e *Enroller) allowRecovery(ctx context.Context, tx pgx.Tx, a *redemption) error {
	set := e.deps.Policy.Current()
	if !set.AutoRecovery() {
		return fault.New(commonv1.Reason_REASON_AUTO_RECOVERY_OFF, "")
	}
	left, err := pg.Value[float64](ctx, tx, limitOfHour, a.token.NodeID, set.RecoveryAttemptsPerHour()-1)
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return fmt.Errorf("count recoveries of node: %w", err)
	default:
		return fault.New(commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED, "",
			fault.RetryAfter(max(time.Duration(left*float64(time.Second)), time.Second)))
	}
	w, err := tokens.Weigh(ctx, tx, &a.row)
	if err != nil {
		return err
	}
	if !w.Now.Before(w.GoodUntil(a.row.Since(), set.RecoveryTokenMaxAge())) {
		return fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	}
	return nil
}

// storeRecovery makes the certificate of a recovery count, if the node may still have it.
func (e *Enroller) storeRecovery(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption, c *claim,
	s identity.Serial, m identity.Moment,
) error {
	ruling := judge.Recover(r.Standing(m.Era), identity.Present(e.deps.JoinStates, r, a.joinState))
	if ruling.Reason != commonv1.Reason_REASON_UNSPECIFIED {
		return e.refuseOld(ctx, r, ruling.Reason)
	}
	if ruling.Continue != a.continues || a.continues && c.instanceID != r.InstanceID {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "") // decided while the authority signed
	}
	used, err := tokens.Use(ctx, tx, r.NodeID, a.token.ID, a.key, s.Serial)
	if err != nil {
		return err
	}
	if !used {
		return fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token was revoked meanwhile")
	}
	if a.continues {
		return identity.Continue(ctx, tx, r, s, "recovery", "recovered by its recovery token", m)
	}
	return identity.Activate(ctx, tx, r, c.instanceID, s, "recovery", "recovered by its recovery token", m)
}

// offer records the recovery token that comes with a certificate; nil if the agent gave no recovery key.
func (e *Enroller) offer(ctx context.Context, tx pgx.Tx, r *identity.Record, serial string, recoveryKey []byte,
	era int64,
) (*tokens.Row, error) {
	if len(recoveryKey) == 0 {
		return nil, nil
	}
	sum := sha256.Sum256(recoveryKey)
	keyID, signs := e.recovery.KeyID()
	row, ok, err := tokens.Offer(ctx, tx, tokens.Offered{
		NodeID: r.NodeID, InstanceID: r.InstanceID, Profile: e.deps.Profiles.Name(r.Profile), KeyID: keyID, Signs: signs,
		Serial: serial, KeySHA256: sum[:], Era: era, Ready: r.CurrentSerial == serial,
	})
	if err != nil || !ok {
		return nil, err
	}
	return &row, nil
}

// textOf returns the text of a token; empty for none.
func (e *Enroller) textOf(row *tokens.Row) (string, error) {
	if row == nil {
		return "", nil
	}
	text, err := e.recovery.Sign(row.KeyID, row.Claims())
	if other, ok := errors.AsType[*ca.UnknownKeyError](err); ok { // this replica has lost it since
		return "", fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN, "", fault.Cause(other))
	}
	return text, err
}

// checkRecoveryKey refuses a recovery key of a kind that is not known, or that the certificate request is for.
func checkRecoveryKey(public, csrKey []byte) error {
	if len(public) == 0 {
		return nil
	}
	if _, err := recoverykey.Parse(public); err != nil {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the recovery key cannot be read",
			fault.Unmet("recovery_public_key: a key of ECDSA or Ed25519"), fault.Cause(err))
	}
	if sum := sha256.Sum256(public); bytes.Equal(sum[:], csrKey) {
		return fault.New(commonv1.Reason_REASON_CSR_REFUSED, "the recovery key may certify nothing")
	}
	return nil
}
