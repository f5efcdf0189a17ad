package dispatch

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// Enqueue queues a task as the function Enqueue does, or leases it at once to a session with a standing lease. After
// the commit of tx it offers the task or notifies the hub. If tx is not one of pg.InTx, nothing is leased, and the
// hub's next sweep gives the hint.
func (s *Server) Enqueue(ctx context.Context, tx pgx.Tx, spec task.Spec) (task.Row, error) {
	if !s.standing.has(spec.NodeID) {
		row, err := task.Enqueue(ctx, tx, spec)
		if err == nil {
			pg.OnEnd(tx, func(committed bool) {
				if committed {
					s.deps.Hub.Notify(spec.NodeID)
				}
			})
		}
		return row, err
	}
	made, err := spec.Make()
	if err != nil {
		return task.Row{}, err
	}
	var stored []queued
	registered := pg.OnEnd(tx, func(committed bool) {
		switch {
		case !committed:
		case stored == nil:
			s.deps.Hub.Notify(spec.NodeID)
		default:
			s.announce(stored)
		}
	})
	if !registered {
		return task.Enqueue(ctx, tx, spec)
	}
	list, err := s.insertQueued(ctx, tx, []*queued{{task: made}})
	if err != nil {
		return task.Row{}, err
	}
	if list[0].err != nil { // no such node, or it is retired: the task is queued and expires as any other
		return task.Enqueue(ctx, tx, spec)
	}
	stored = list
	return stored[0].row, nil
}

// Notify hints to replicas of nodeapi that a node has work. It is called after the commit that queued the work.
func (s *Server) Notify(nodeID string) { s.deps.Hub.Notify(nodeID) }
