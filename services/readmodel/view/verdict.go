package view

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

var judgedThrough = pg.Define(pg.RoleReadmodel, "view.judged_through", `
	SELECT (SELECT j.through FROM mesh.judged j WHERE j.service = 'recovery')`)

// verdictsStaleSince adds to s.with a query for the time up to which recovery has judged everything, if that is too
// long ago; zero if verdicts are up to date, or if recovery has never noted such a time. The result is set once the
// list's rows have been read.
func (s *Snapshot) verdictsStaleSince() *time.Time {
	at := &time.Time{}
	s.with.Queue(judgedThrough).QueryRow(func(row pgx.Row) error {
		var through *time.Time
		if err := row.Scan(&through); err != nil {
			return fmt.Errorf("read how far nodes were judged: %w", err)
		}
		*at = status.StaleSince(through, s.Now)
		return nil
	})
	return at
}

// present returns a verdict without the period that it ended, which is part of the history. It changes v, which may
// stand for several nodes, so that all of them lose it.
func present(v *recoveryv1.NodeVerdict) *recoveryv1.NodeVerdict {
	if v != nil {
		v.Ended = nil
	}
	return v
}

var verdictOfControlPlane = pg.Define(pg.RoleReadmodel, "view.verdict_of_control_plane", `
	SELECT (SELECT v.body FROM readmodel.verdict v WHERE v.node_id = '00000000-0000-0000-0000-000000000000')`)

// verdictOfAll adds to s.with a query for the verdict about the control plane; nil if there is none. The result is set
// once the list's rows have been read.
func (s *Snapshot) verdictOfAll() **recoveryv1.NodeVerdict {
	found := new(*recoveryv1.NodeVerdict)
	s.with.Queue(verdictOfControlPlane).QueryRow(func(row pgx.Row) error {
		var body []byte
		err := row.Scan(&body)
		if err == nil && body != nil {
			*found, err = decode[recoveryv1.NodeVerdict](body)
		}
		if err != nil {
			return fmt.Errorf("read the verdict about the control plane: %w", err)
		}
		return nil
	})
	return found
}

const verdictsOfNode list.Condition = "x.node_id = ?::uuid"

var verdictLayout = list.Layout{
	Name: "node verdicts", Columns: "x.body", From: "readmodel.verdict_period x", ID: "x.period_id",
	Conditions: []list.Condition{verdictsOfNode},
}

var listNodeVerdicts = pg.DefineDynamic(pg.RoleReadmodel, "view.list_node_verdicts", verdictLayout.Compose,
	verdictLayout.Samples()...)

// NodeVerdicts returns one page of the times for which a node, by name, id or a part of the id, was not healthy, newest
// first. It refuses a scope that is bound to a tenant.
func (s *Snapshot) NodeVerdicts(ctx context.Context, node string, page list.Page) ([]*recoveryv1.VerdictPeriod, string,
	error,
) {
	if !s.scope.Everything() {
		return nil, "", list.OperatorsOnly()
	}
	id, err := s.find().IDOf(ctx, readmodelv1.ObjectKind_OBJECT_KIND_NODE, node)
	if err != nil {
		return nil, "", err
	}
	l := list.Request{Layout: &verdictLayout, Statement: listNodeVerdicts}
	l.And(verdictsOfNode, list.OptionalID(id))
	return run(ctx, s, l, page, fromBody[recoveryv1.VerdictPeriod])
}
