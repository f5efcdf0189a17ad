package enrol

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/instance"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// BundleToken is the token of a bundle for a node that exists. Its text is returned here and stored nowhere.
type BundleToken struct {
	NodeID, InstanceID, Name string // of the node
	TokenID, Token           string
	IssuedAt, ExpiresAt      time.Time
	Pos                      string

	Profile *commonv1.Profile // of the node: the version that is active now
	profile string            // of the node, by name
}

// BundleRequest is a person's request for a bundle.
type BundleRequest struct {
	NodeID, Reason, Key, By string
	Life                    time.Duration // zero: DefaultTokenLife
}

// IssueBundle issues a token for a node that exists and is pending or active, or on hold for a lost join state alone:
// the token ends that hold, as a recovery token does. Earlier tokens of operators for the node that were not used are
// revoked. The node itself stays as it is until the token is used. A repetition with the same idempotency key by the
// same person returns the same token id with a new secret while the token is unused; the former secret is invalid then.
func (e *Enroller) IssueBundle(ctx context.Context, req BundleRequest) (BundleToken, error) {
	req.Reason = strings.TrimSpace(req.Reason)
	if req.Life == 0 {
		req.Life = DefaultTokenLife
	}
	entry := audit.Entry{
		Action: "node.bundle.issue", Actor: req.By, Reason: req.Reason, SubjectType: "node", SubjectID: req.NodeID,
		NodeID: req.NodeID,
	}
	var out BundleToken
	err := checkBundleRequest(req)
	if err == nil {
		err = pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			if out, err = e.issueBundle(ctx, tx, req, entry); err != nil {
				return err
			}
			return failpoint.Hit("recovery.issue_bundle.before_commit")
		})
	}
	if pg.IsUnique(err, "token_idempotency") {
		err = fault.New(commonv1.Reason_REASON_CONFLICT, "", fault.Cause(err))
	}
	if err != nil {
		return BundleToken{}, fmt.Errorf("issue bundle: %w", e.deps.Audit.Refuse(ctx, entry, err))
	}
	e.committed()
	if out.Profile, err = e.deps.Profiles.Active(ctx, out.profile); err != nil {
		return BundleToken{}, fmt.Errorf("issue bundle: %w", err)
	}
	e.deps.Logger.InfoContext(ctx, "bundle issued", slog.String(obs.KeyNodeID, out.NodeID), slog.String("by", req.By),
		slog.Time("expires_at", out.ExpiresAt))
	return out, nil
}

func checkBundleRequest(req BundleRequest) error {
	switch {
	case req.Reason == "":
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	case !ids.Valid(req.NodeID):
		return fault.NoSuch("node", req.NodeID)
	case req.Life < time.Second || req.Life > MaxTokenLife:
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the token of a bundle lives at most 24 hours",
			fault.Unmet("valid_for: between 1s and 24h"))
	}
	return nil
}

func (e *Enroller) issueBundle(ctx context.Context, tx pgx.Tx, req BundleRequest, entry audit.Entry) (BundleToken,
	error,
) {
	if err := rollback.Refuse(ctx, tx); err != nil {
		return BundleToken{}, err
	}
	r, err := identity.LockOne(ctx, tx, req.NodeID)
	if err != nil {
		return BundleToken{}, err
	}
	tokenID, err := sameBundle(ctx, tx, req)
	if err != nil {
		return BundleToken{}, err
	}
	if err := mayBundle(ctx, tx, r); err != nil {
		return BundleToken{}, err
	}
	m, err := identity.ReadMoment(ctx, tx)
	if err != nil {
		return BundleToken{}, err
	}
	out := BundleToken{NodeID: r.NodeID, InstanceID: r.InstanceID, Name: r.Name, IssuedAt: m.Now, profile: r.Profile}
	issued, err := writeToken(ctx, tx, newToken{
		kind: KindBundle, nodeID: r.NodeID, again: tokenID, life: req.Life, key: req.Key, by: req.By,
	})
	if err != nil {
		return BundleToken{}, err
	}
	out.TokenID, out.Token, out.ExpiresAt = issued.id, issued.text, issued.expires
	if kind, ok := actionOf(KindBundle, r.InstanceID != ""); ok {
		_, err := actions.Issued(ctx, tx, actions.Beginning{
			NodeID: r.NodeID, Kind: kind, Requester: req.By, Within: req.Life,
		})
		if err != nil {
			return BundleToken{}, err
		}
	}
	entry.Details = map[string]any{
		"name": r.Name, "state": names.Of(r.State), "expires_at": out.ExpiresAt, "again": tokenID != "",
		"bundle_id": out.TokenID,
	}
	out.Pos, err = e.deps.Audit.Record(ctx, tx, entry)
	return out, err
}

// sameBundle returns the token of an earlier request with the same key, empty for none.
func sameBundle(ctx context.Context, tx pgx.Tx, req BundleRequest) (string, error) {
	if req.Key == "" {
		return "", nil
	}
	earlier, err := pg.One[issuedToken](ctx, tx, readIssued, req.By, req.Key)
	switch {
	case pg.IsNoRows(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("look for the same request: %w", err)
	case earlier.Kind != KindBundle || earlier.NodeID != req.NodeID:
		return "", fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
	case earlier.State != "issued":
		return "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the token of this request is "+earlier.State,
			fault.Unmet("the token is "+earlier.State+", not unused"),
			fault.Remedy("ask again with another idempotency key"))
	}
	return earlier.ID, nil
}

// mayBundle returns nil if an operator may be given a bundle for a node, else the refusal.
func mayBundle(ctx context.Context, tx pgx.Tx, r *identity.Record) error {
	switch reason := bundleRefusal(r); reason {
	case commonv1.Reason_REASON_UNSPECIFIED:
	case commonv1.Reason_REASON_IDENTITY_RETIRED:
		return fault.New(reason, "", fault.Remedy("enrol the machine as a new node with `gpuaas nodes enroll`"))
	case commonv1.Reason_REASON_IDENTITY_HELD, commonv1.Reason_REASON_IDENTITY_QUARANTINED,
		commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED:
		next := "find out why, and reactivate the node with `gpuaas nodes reactivate NODE`; then ask for the bundle again"
		switch {
		case identity.Copied(r.Alarm):
			next = "two hosts may have the node's identity: find the second one; then a person with the security role " +
				"reactivates the node with `gpuaas nodes reactivate NODE`, which ends the certificates and tokens of both, and " +
				"the bundle, asked for again, gives the real machine a new identity; or retire the node, and enrol the machine " +
				"as another one with `gpuaas nodes enroll`"
		case reason == commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED:
			next = "find out why; then a person with the security role reactivates the node with `gpuaas nodes reactivate " +
				"NODE`, and the bundle is asked for again"
		}
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the node is "+names.Of(r.State)+", and no bundle brings it back",
			fault.Unmet(names.Of(reason)+": the identity is "+names.Of(r.State)+", and neither pending nor active"),
			fault.Remedy(next))
	default:
		return fault.New(reason, "")
	}
	if r.LaunchedInstanceID == "" {
		return nil
	}
	return presentEpoch(ctx, tx, r)
}

// bundleRefusal returns why a node in its state may not enrol with the token of a bundle; unspecified if it may. The
// states are those of a recovery token, and pending.
func bundleRefusal(r *identity.Record) commonv1.Reason {
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING {
		return commonv1.Reason_REASON_UNSPECIFIED
	}
	return identity.RecoveryRefusal(r)
}

// presentEpoch refuses an instance whose epoch, or whose place in its epoch, another instance has.
func presentEpoch(ctx context.Context, tx pgx.Tx, r *identity.Record) error {
	highest, err := instance.HighestEpoch(ctx, tx, r.WorkspaceID)
	if err != nil {
		return err
	}
	if r.Epoch < highest.Number || highest.InstanceID != r.LaunchedInstanceID {
		return fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "")
	}
	return nil
}

// checkBundle decides whether a node may have a certificate for the token of a bundle, and whether it keeps its node
// instance: a host that has the node's join state does, unless an alarm says that two hosts may have it.
func (e *Enroller) checkBundle(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	if r.LaunchedInstanceID != "" {
		if done, refused, err := e.checkLaunched(ctx, tx, r); err != nil || refused != nil {
			return done, refused, err
		}
	}
	switch {
	case a.token.State == "expired" || a.token.State == "issued" && !m.Now.Before(a.token.ExpiresAt):
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	case a.token.State == "revoked":
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token has been revoked")
	}
	if reason := bundleRefusal(r); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return nil, nil, fault.New(reason, "")
	}
	if a.token.State == "used" {
		done, err := repeatOf(ctx, tx, r, a)
		if err != nil || done != nil {
			return done, nil, err
		}
		return e.reused(ctx, tx, r, a, m)
	}
	if err := unusedKey(ctx, tx, r, a); err != nil {
		return nil, nil, err
	}
	a.continues = e.continuesWith(r, a, m)
	if m.RolledBack && !a.continues && r.InstanceID != "" {
		// What the database knows of the node may be older than the node, and no second node instance may follow from it.
		return nil, rollback.Refusal(), nil
	}
	return nil, nil, nil
}

// continuesWith reports whether a host with the token of a bundle is the node instance that the node has: it presents a
// join state with which that node instance could open a session, and no alarm says that another host may have it too.
func (e *Enroller) continuesWith(r *identity.Record, a *redemption, m identity.Moment) bool {
	if r.InstanceID == "" || identity.Copied(r.Alarm) {
		return false
	}
	presented := identity.Present(e.deps.JoinStates, r, a.joinState)
	return presented.Form == judge.FormSigned && judge.Recover(r.Standing(m.Era), presented).Continue
}

// storeBundle makes the certificate of a bundle count. All recovery tokens of the node's earlier life end. An
// instance's launch secret counts as used with the same key from now on.
func (e *Enroller) storeBundle(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption, c *claim,
	s identity.Serial, m identity.Moment,
) error {
	if a.continues != e.continuesWith(r, a, m) || a.continues && c.instanceID != r.InstanceID {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "") // decided while the authority signed
	}
	if r.LaunchedInstanceID != "" {
		if err := presentEpoch(ctx, tx, r); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, followLaunch, r.LaunchedInstanceID, a.key, s.Serial); err != nil {
			return fmt.Errorf("use launch secret: %w", err)
		}
	}
	if err := useOnce(ctx, tx, r, a, s); err != nil {
		return err
	}
	if a.continues {
		return identity.Continue(ctx, tx, r, s, "recovery", "enrolled again by an operator's bundle", m)
	}
	return identity.Activate(ctx, tx, r, c.instanceID, s, "recovery", "enrolled anew by an operator's bundle", m)
}
