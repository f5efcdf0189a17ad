package actions

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// defaultPage is how many actions a page has if its request names no size.
const defaultPage = 100

// beforeAll sorts after every id: a list goes from the newest action back.
const beforeAll = "ffffffff-ffff-ffff-ffff-ffffffffffff"

// listed is an action with the name of its node.
type listed struct {
	row
	NodeName string `db:"node_name" expr:"COALESCE(i.name, '')"`
}

var (
	listAll = pg.Define(pg.RoleRecovery, "actions.list", `
		SELECT `+pg.Columns[row]("a")+`, COALESCE(i.name, '') AS node_name
		FROM recovery.recovery_action a LEFT JOIN recovery.identity i USING (node_id)
		WHERE a.action_id < $1::uuid ORDER BY a.action_id DESC LIMIT $2`)

	listOfState = pg.Define(pg.RoleRecovery, "actions.list_of_state", `
		SELECT `+pg.Columns[row]("a")+`, COALESCE(i.name, '') AS node_name
		FROM recovery.recovery_action a LEFT JOIN recovery.identity i USING (node_id)
		WHERE a.state = $3 AND a.action_id < $1::uuid ORDER BY a.action_id DESC LIMIT $2`)

	listOfNode = pg.Define(pg.RoleRecovery, "actions.list_of_node", `
		SELECT `+pg.Columns[row]("a")+`, COALESCE(i.name, '') AS node_name
		FROM recovery.recovery_action a LEFT JOIN recovery.identity i USING (node_id)
		WHERE a.node_id = $3::uuid AND a.action_id < $1::uuid AND ($4 = '' OR a.state = $4)
		ORDER BY a.action_id DESC LIMIT $2`)
)

// Server implements ActionService. Safe for concurrent use.
type Server struct{ pool *pgxpool.Pool }

// NewServer returns the server.
func NewServer(pool *pgxpool.Pool) *Server { return &Server{pool: pool} }

// ListActions returns a page of actions, the newest first. One with a value of a newer build is listed with that value
// as it is stored.
func (s *Server) ListActions(ctx context.Context, req *recoveryv1.ListActionsRequest) (
	*recoveryv1.ListActionsResponse, error,
) {
	size, before := cmp.Or(int(req.GetPageSize()), defaultPage), cmp.Or(req.GetPageToken(), beforeAll)
	if !ids.Valid(before) && before != beforeAll {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
			fault.Unmet("page_token: not from this list"))
	}
	if req.GetNodeId() != "" && !ids.Valid(req.GetNodeId()) {
		return nil, fault.NoSuch("node", req.GetNodeId())
	}
	rows, err := s.page(ctx, req, before, size+1)
	if err != nil {
		return nil, fmt.Errorf("list recovery actions: %w", err)
	}
	out := &recoveryv1.ListActionsResponse{}
	if len(rows) > size {
		rows = rows[:size]
		out.NextPageToken = rows[size-1].ID
	}
	for _, r := range rows {
		item, err := r.message()
		if err != nil && !aside.Note(ctx, "recovery_action", r.ID, err) {
			return nil, err
		}
		item.NodeName = r.NodeName
		out.Items = append(out.Items, item)
	}
	return out, nil
}

func (s *Server) page(ctx context.Context, req *recoveryv1.ListActionsRequest, before string, most int) ([]listed,
	error,
) {
	state := names.OfSet(req.GetState())
	switch {
	case req.GetNodeId() != "":
		return pg.All[listed](ctx, s.pool, listOfNode, before, most, req.GetNodeId(), state)
	case state != "":
		return pg.All[listed](ctx, s.pool, listOfState, before, most, state)
	}
	return pg.All[listed](ctx, s.pool, listAll, before, most)
}
