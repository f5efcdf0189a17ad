package enrol

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
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
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// The default and the longest lifetime of an operator's token.
const (
	DefaultTokenLife = time.Hour
	MaxTokenLife     = 24 * time.Hour
)

// Bundle is what an operator is given for a node. The token's text is returned here and stored nowhere.
type Bundle struct {
	NodeID    string
	Token     string
	ExpiresAt time.Time
	Profile   *commonv1.Profile // of the node: the version that is active now
	Pos       string

	profile string // of the node, by name
}

// IssueBootstrap makes a node known and issues its token. It is given for a new name, for a node that is pending, that
// is on hold (the token ends the hold), or whose certificate was never used; an earlier token of the node that was not
// used is revoked. A repetition with the same idempotency key by the same person returns the same token id with a new
// secret while the token is unused; the secret of the first answer, which was lost, is invalid then. A profile becomes
// the node's; without a name a node keeps the one it has, and a new node has the default.
func (e *Enroller) IssueBootstrap(ctx context.Context, name, profile string, life time.Duration, idempotencyKey,
	by string,
) (Bundle, error) {
	if life == 0 {
		life = DefaultTokenLife
	}
	if life < time.Second || life > MaxTokenLife {
		return Bundle{}, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "a bootstrap token lives at most 24 hours",
			fault.Unmet("valid_for: between 1s and 24h"))
	}
	var out Bundle
	_, err := e.deps.Profiles.Active(ctx, profile)
	if err == nil {
		err = pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			if out, err = e.issue(ctx, tx, name, profile, life, idempotencyKey, by); err != nil {
				return err
			}
			return failpoint.Hit("recovery.issue_bootstrap.before_commit")
		})
	}
	if pg.IsUnique(err, "identity_name") || pg.IsUnique(err, "token_idempotency") {
		return Bundle{}, fault.New(commonv1.Reason_REASON_CONFLICT, "", fault.Cause(err))
	}
	if err != nil {
		refused := audit.Entry{Action: "node.bootstrap.issue", Actor: by, SubjectType: "node", SubjectID: name}
		return Bundle{}, fmt.Errorf("issue bootstrap token: %w", e.deps.Audit.Refuse(ctx, refused, err))
	}
	e.committed()
	if out.Profile, err = e.deps.Profiles.Active(ctx, out.profile); err != nil {
		return Bundle{}, fmt.Errorf("issue bootstrap token: %w", err)
	}
	e.deps.Logger.InfoContext(ctx, "bootstrap token issued", slog.String(obs.KeyNodeID, out.NodeID), slog.String("by", by),
		slog.Time("expires_at", out.ExpiresAt))
	return out, nil
}

func (e *Enroller) issue(ctx context.Context, tx pgx.Tx, name, profile string, life time.Duration, idempotencyKey,
	by string,
) (Bundle, error) {
	if err := rollback.Refuse(ctx, tx); err != nil {
		return Bundle{}, err
	}
	tokenID := ""
	if idempotencyKey != "" {
		earlier, err := pg.One[issuedToken](ctx, tx, readIssued, by, idempotencyKey)
		tokenID = earlier.ID
		switch {
		case pg.IsNoRows(err):
		case err != nil:
			return Bundle{}, fmt.Errorf("look for the same request: %w", err)
		case earlier.Name != name || earlier.Kind != KindBootstrap:
			return Bundle{}, fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
		case earlier.State != "issued":
			return Bundle{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the token of this request is "+earlier.State,
				fault.Unmet("the token is "+earlier.State+", not unused"),
				fault.Remedy("ask again with another idempotency key"))
		}
	}
	r, err := identity.GetByName(ctx, tx, name)
	if err != nil {
		return Bundle{}, err
	}
	if r == nil {
		r = &identity.Record{NodeID: ids.New(), Name: name, Profile: profile, StateBy: by, StateReason: "made known"}
		if _, err := identity.Insert(ctx, tx, r); err != nil {
			return Bundle{}, err
		}
	} else if err := mayBootstrap(r); err != nil {
		return Bundle{}, err
	}
	moved := profile != "" && profile != r.Profile
	if moved && tokenID != "" {
		return Bundle{}, fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
	}
	r.Profile = cmp.Or(profile, r.Profile)
	out := Bundle{NodeID: r.NodeID}
	out.profile = r.Profile
	issued, err := writeToken(ctx, tx, newToken{
		kind: KindBootstrap, nodeID: r.NodeID, again: tokenID, life: life, key: idempotencyKey, by: by,
	})
	if err != nil {
		return Bundle{}, err
	}
	out.Token, out.ExpiresAt = issued.text, issued.expires
	r.StateReason, r.StateBy = "bootstrap token issued", by
	save := identity.SaveQuietly
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		r.StateReason = "enrolled, and never connected: another bootstrap token was issued, and takes the place of its " +
			"certificate as it is used"
		if r.NextSerial == "" {
			r.StateReason = "its certificates were ended: a bootstrap token was issued, which gives it another identity"
		}
		save = identity.Save // people see it
	}
	if moved {
		save = identity.Save // replicas of nodeapi offer the node its profile
	}
	if out.Pos, err = save(ctx, tx, r); err != nil {
		return Bundle{}, err
	}
	_, err = e.deps.Audit.Record(ctx, tx, audit.Entry{
		Action: "node.bootstrap.issue", Actor: by, SubjectType: "node", SubjectID: r.NodeID, NodeID: r.NodeID,
		Details: map[string]any{
			"name": name, "expires_at": out.ExpiresAt, "again": tokenID != "", "profile": e.deps.Profiles.Name(r.Profile),
		},
	})
	return out, err
}

// newToken is a token to issue.
type newToken struct {
	kind    Kind
	nodeID  string
	again   string // the id of the token of the same request; empty: there is none
	life    time.Duration
	key, by string
}

// writtenToken is a token that was issued, with its text.
type writtenToken struct {
	id, text string
	expires  time.Time
}

// writeToken writes the row of an operator's token, and revokes the operators' tokens of the node that were not used.
func writeToken(ctx context.Context, tx pgx.Tx, t newToken) (writtenToken, error) {
	out := writtenToken{id: t.again}
	if out.id == "" {
		out.id = ids.New()
	}
	text, hash, err := newOperatorToken(t.kind, out.id)
	if err != nil {
		return writtenToken{}, err
	}
	out.text = text
	if _, err := pg.Exec(ctx, tx, revokeEarlier, t.nodeID, out.id); err != nil {
		return writtenToken{}, fmt.Errorf("revoke earlier token: %w", err)
	}
	if t.again != "" {
		out.expires, err = pg.Value[time.Time](ctx, tx, renewToken, out.id, hash, t.life.Seconds())
	} else {
		out.expires, err = pg.Value[time.Time](ctx, tx, insertOperator, out.id, t.nodeID, hash, t.by, t.key,
			t.life.Seconds(), string(t.kind))
	}
	if pg.IsNoRows(err) {
		return writtenToken{}, fault.New(commonv1.Reason_REASON_CONFLICT, "")
	}
	if err != nil {
		return writtenToken{}, fmt.Errorf("write token: %w", err)
	}
	return out, nil
}

// mayBootstrap returns nil if an operator may be given a token for a node that exists, else the refusal.
func mayBootstrap(r *identity.Record) error {
	switch {
	case r.LaunchedInstanceID != "":
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the node is a workspace's instance",
			fault.Unmet("the node belongs to a workspace: no operator enrolled it"),
			fault.Remedy("recreate the workspace"))
	case r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
		r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		return nil
	case r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE && r.CurrentSerial == "":
		return nil // no session was ever ready on its certificate, or it has none
	case r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		return fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, "a node of that name exists and is "+names.Of(r.State),
			fault.Conflicting(r.NodeID),
			fault.Remedy("for a new identity of the machine: `gpuaas nodes retire NODE --reason TEXT`, then ask again; to "+
				"keep this one: reactivate the node; or choose another name"))
	default:
		return fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, "a node of that name exists and is "+names.Of(r.State),
			fault.Conflicting(r.NodeID),
			fault.Remedy("to bring that node back: `gpuaas nodes bundle NODE --reason TEXT`; for another machine choose "+
				"another name, or hold or retire the node first"))
	}
}
