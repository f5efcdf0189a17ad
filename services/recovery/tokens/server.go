package tokens

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// MaxExtension is how far ahead an extension may reach.
const MaxExtension = 30 * 24 * time.Hour

// defaultPage is how many tokens a page has if its request names no size.
const defaultPage = 100

// beforeAll sorts after every id: a list goes from the newest token back.
const beforeAll = "ffffffff-ffff-ffff-ffff-ffffffffffff"

// Deps are the dependencies of a Server.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Policy policy.Reader
	// Profiles returns the names of the profiles to which tokens are bound.
	Profiles func() []string
	Wake     *events.Signal // notified after commits that appended events
	Audit    *audit.Log     // records refusals; nil: none are recorded
}

// Server implements TokenService. Safe for concurrent use.
type Server struct{ deps Deps }

// NewServer checks the dependencies.
func NewServer(deps Deps) (*Server, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Policy == nil || deps.Profiles == nil {
		return nil, errors.New("token server needs a logger, a pool, the policy and the profiles")
	}
	return &Server{deps: deps}, nil
}

// listed is a token with what its age is judged by.
type listed struct {
	Row
	Weights
	NodeName string `db:"node_name" expr:"i.name"`
}

// extension is one decision to extend.
type extension struct {
	ID      string    `db:"extension_id" expr:"@.extension_id::text"`
	Profile string    `db:"profile"`
	Until   time.Time `db:"until_at"`
	Reason  string    `db:"reason"`
	By      string    `db:"decided_by"`
	At      time.Time `db:"decided_at"`
}

// aged are the columns of Weights for the token t.
var aged = `, i.name AS node_name, mesh.clock() AS now, ` + creditSQL("COALESCE(t.counted_since, t.issued_at)") +
	` AS credit, ` + extendedSQL("t.profile") + ` AS extended`

var (
	listTokens = pg.Define(pg.RoleRecovery, "tokens.list", `
		SELECT `+pg.Columns[Row]("t")+aged+` FROM recovery.recovery_token t JOIN recovery.identity i USING (node_id)
		WHERE t.token_id < $1::uuid ORDER BY t.token_id DESC LIMIT $2`)

	listOfNode = pg.Define(pg.RoleRecovery, "tokens.list_of_node", `
		SELECT `+pg.Columns[Row]("t")+aged+` FROM recovery.recovery_token t JOIN recovery.identity i USING (node_id)
		WHERE t.node_id = $3::uuid AND t.token_id < $1::uuid ORDER BY t.token_id DESC LIMIT $2`)

	readNodeOf = pg.Define(pg.RoleRecovery, "tokens.read_node", `
		SELECT t.node_id::text FROM recovery.recovery_token t WHERE t.token_id = $1`)

	insertExtension = pg.Define(pg.RoleRecovery, "tokens.extend", `
		INSERT INTO recovery.token_extension AS e (extension_id, profile, until_at, reason, decided_by)
		VALUES ($1, $2, $3, $4, $5) RETURNING `+pg.Columns[extension]("e"))

	listExtensions = pg.Define(pg.RoleRecovery, "tokens.list_extensions", `
		SELECT DISTINCT ON (e.profile) `+pg.Columns[extension]("e")+` FROM recovery.token_extension e
		ORDER BY e.profile, e.decided_at DESC LIMIT 100`)
)

// ListTokens returns a page of tokens, the newest first, and on the first page the extensions in force.
func (s *Server) ListTokens(ctx context.Context, req *recoveryv1.ListTokensRequest) (*recoveryv1.ListTokensResponse,
	error,
) {
	size, before := int(req.GetPageSize()), beforeAll
	if size == 0 {
		size = defaultPage
	}
	if token := req.GetPageToken(); token != "" {
		if !ids.Valid(token) {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
				fault.Unmet("page_token: not from this list"))
		}
		before = token
	}
	out := &recoveryv1.ListTokensResponse{}
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := s.page(ctx, tx, req.GetNodeId(), before, size+1)
		if err != nil {
			return err
		}
		out.Items, out.NextPageToken = nil, ""
		if len(rows) > size {
			rows = rows[:size]
			out.NextPageToken = rows[size-1].ID
		}
		maxAge := s.deps.Policy.Current().RecoveryTokenMaxAge()
		for _, row := range rows {
			_, err := names.Parse[commonv1.TokenState](row.State)
			aside.Note(ctx, "recovery_token", row.ID, err)
			out.Items = append(out.Items, row.proto(maxAge))
		}
		if req.GetPageToken() != "" {
			return nil
		}
		out.Extensions, err = extensions(ctx, tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list recovery tokens: %w", pg.Fault(err))
	}
	return out, nil
}

func (s *Server) page(ctx context.Context, tx pgx.Tx, nodeID, before string, size int) ([]listed, error) {
	switch {
	case nodeID == "":
		return pg.All[listed](ctx, tx, listTokens, before, size)
	case !ids.Valid(nodeID):
		return nil, fault.NoSuch("node", nodeID)
	default:
		return pg.All[listed](ctx, tx, listOfNode, before, size, nodeID)
	}
}

func extensions(ctx context.Context, tx pgx.Tx) ([]*recoveryv1.TokenExtension, error) {
	rows, err := pg.All[extension](ctx, tx, listExtensions)
	if err != nil {
		return nil, fmt.Errorf("list extensions: %w", err)
	}
	m, err := identity.ReadMoment(ctx, tx)
	if err != nil {
		return nil, err
	}
	var out []*recoveryv1.TokenExtension
	for _, row := range rows {
		if row.Until.After(m.Now) {
			out = append(out, row.proto())
		}
	}
	return out, nil
}

// RevokeTokens ends one token, or all of a node that are not ended. The node keeps its certificate.
func (s *Server) RevokeTokens(ctx context.Context, req *recoveryv1.RevokeTokensRequest) (
	*recoveryv1.RevokeTokensResponse, error,
) {
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	entry := audit.Entry{
		Action: "token.revoke", Actor: by, Reason: reason, SubjectType: "node", SubjectID: req.GetNodeId(),
		NodeID: req.GetNodeId(),
	}
	if req.GetTokenId() != "" {
		entry.SubjectType, entry.SubjectID = "recovery_token", req.GetTokenId()
	}
	out := &recoveryv1.RevokeTokensResponse{}
	err := checkRevoke(req, reason)
	if err == nil {
		err = pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
			return s.revoke(ctx, tx, req, entry, out)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("revoke recovery tokens: %w", s.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	s.deps.Wake.Notify()
	s.deps.Logger.InfoContext(ctx, "recovery tokens revoked", slog.Int("tokens", len(out.GetTokens())),
		slog.String("by", by))
	return out, nil
}

func checkRevoke(req *recoveryv1.RevokeTokensRequest, reason string) error {
	switch {
	case reason == "":
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	case (req.GetTokenId() == "") == (req.GetNodeId() == ""):
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "either a token or a node is named",
			fault.Unmet("token_id, node_id: exactly one of them"))
	case !ids.Valid(req.GetTokenId() + req.GetNodeId()):
		return fault.NoSuch("token or node", req.GetTokenId()+req.GetNodeId())
	}
	return nil
}

func (s *Server) revoke(ctx context.Context, tx pgx.Tx, req *recoveryv1.RevokeTokensRequest, entry audit.Entry,
	out *recoveryv1.RevokeTokensResponse,
) error {
	if err := rollback.Refuse(ctx, tx); err != nil {
		return err
	}
	nodeID := req.GetNodeId()
	if req.GetTokenId() != "" {
		var err error
		nodeID, err = pg.Value[string](ctx, tx, readNodeOf, req.GetTokenId())
		if pg.IsNoRows(err) {
			return fault.NoSuch("recovery token", req.GetTokenId())
		}
		if err != nil {
			return fmt.Errorf("read node of recovery token: %w", err)
		}
	}
	r, err := identity.LockOne(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	var rows []Row
	if req.GetTokenId() != "" {
		rows, err = pg.All[Row](ctx, tx, endToken, req.GetTokenId(), EndedOperator)
	} else {
		rows, err = EndAll(ctx, tx, nodeID, EndedOperator)
	}
	if err != nil {
		return fmt.Errorf("end recovery tokens: %w", err)
	}
	if len(rows) == 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no recovery token is there to revoke",
			fault.Unmet("the token, or each of the node's, has ended already"),
			fault.Remedy("there is nothing to do: no token of it is taken any more; `gpuaas tokens list` shows how each ended"))
	}
	out.Tokens = nil
	ended := make([]string, len(rows))
	for i, row := range rows {
		ended[i] = row.ID
		out.Tokens = append(out.Tokens, listed{Row: row, NodeName: r.Name}.proto(0))
	}
	entry.NodeID, entry.Details = nodeID, map[string]any{"recovery_ids": ended}
	out.Pos, err = s.deps.Audit.Record(ctx, tx, entry)
	return err
}

// ExtendTokens records that the tokens of a profile are good until a time. No token's row changes.
func (s *Server) ExtendTokens(ctx context.Context, req *recoveryv1.ExtendTokensRequest) (
	*recoveryv1.ExtendTokensResponse, error,
) {
	by, reason, until := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason()), req.GetUntil().AsTime()
	entry := audit.Entry{
		Action: "token.extend", Actor: by, Reason: reason, SubjectType: "profile", SubjectID: req.GetProfile(),
		Details: map[string]any{"until": until},
	}
	out := &recoveryv1.ExtendTokensResponse{}
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		if err := s.checkExtend(req, reason, until, m); err != nil {
			return err
		}
		row, err := pg.One[extension](ctx, tx, insertExtension, ids.New(), req.GetProfile(), until, reason, by)
		if err != nil {
			return fmt.Errorf("insert extension: %w", err)
		}
		out.Extension = row.proto()
		out.Pos, err = s.deps.Audit.Record(ctx, tx, entry)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("extend recovery tokens: %w", s.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	s.deps.Wake.Notify()
	s.deps.Logger.InfoContext(ctx, "recovery tokens extended", slog.String("profile", req.GetProfile()),
		slog.Time("until", until), slog.String("by", by))
	return out, nil
}

func (s *Server) checkExtend(req *recoveryv1.ExtendTokensRequest, reason string, until time.Time,
	m identity.Moment,
) error {
	switch {
	case m.RolledBack:
		return rollback.Refusal()
	case reason == "":
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	case !slices.Contains(s.deps.Profiles(), req.GetProfile()):
		return fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no profile of that name",
			fault.Remedy("the profiles are "+strings.Join(s.deps.Profiles(), ", ")))
	case !until.After(m.Now), until.After(m.Now.Add(MaxExtension)):
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "an extension ends between now and 30 days from now",
			fault.Unmet("until: between now and 30 days from now"))
	}
	return nil
}

// proto returns a token as responses carry it. One that is too old now is shown as expired, whatever its row says: an
// extension makes it good again.
func (l listed) proto(maxAge time.Duration) *recoveryv1.RecoveryToken {
	state := aside.Value[commonv1.TokenState]("recovery_token", l.ID, l.State)
	out := &recoveryv1.RecoveryToken{
		TokenId: l.ID, NodeId: l.NodeID, NodeName: l.NodeName, NodeInstanceId: l.InstanceID, Family: l.Family,
		Profile: l.Profile, State: state, Since: timestamppb.New(l.StateAt), EndedBy: l.EndedBy,
		IssuedAt: timestamppb.New(l.IssuedAt), Serial: l.Serial, UsedSerial: l.UsedSerial,
	}
	if l.CountedSince != nil {
		out.CountedSince = timestamppb.New(*l.CountedSince)
	}
	if l.State == StateIssued {
		until := timestamppb.New(l.GoodUntil(l.Since(), maxAge))
		if l.Now.Before(until.AsTime()) {
			out.GoodUntil = until
		} else {
			out.State, out.Since = commonv1.TokenState_TOKEN_STATE_EXPIRED, until
		}
	}
	return out
}

func (e extension) proto() *recoveryv1.TokenExtension {
	return &recoveryv1.TokenExtension{
		ExtensionId: e.ID, Profile: e.Profile, Until: timestamppb.New(e.Until), Reason: e.Reason, By: e.By,
		At: timestamppb.New(e.At),
	}
}
