package collect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// writeNodes makes a node due at once, or at the given time.
var writeNodes = pg.Define(pg.RoleRecovery, "drift.write_nodes", `
	INSERT INTO recovery.judgement AS j (node_id, identity_state, session_id, generation, session_version, replica_id,
		silent_since, due_at, node_instance_id, serial, issuer, session_serial, serial_generation, probe_wanted, probe_due,
		probe_attempt, probe_note, probe_instance, probe_generation, probed_at, tasks_at)
	SELECT n.node_id, n.state, NULLIF(n.session_id, '')::uuid, n.generation, n.session_version,
		NULLIF(n.replica_id, '')::uuid, n.silent_since, CASE WHEN n.due THEN mesh.clock() ELSE n.due_at END,
		n.node_instance_id, n.serial, n.issuer, n.session_serial, n.serial_generation, n.probe_wanted, n.probe_due,
		n.probe_attempt, n.probe_note, n.probe_instance, n.probe_generation, n.probed_at, n.tasks_at
	FROM unnest($1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::timestamptz[],
		$8::boolean[], $9::timestamptz[], $10::text[], $11::text[], $12::text[], $13::text[], $14::bigint[],
		$15::boolean[], $16::timestamptz[], $17::integer[], $18::text[], $19::text[], $20::bigint[], $21::timestamptz[],
		$22::timestamptz[])
		AS n (node_id, state, session_id, generation, session_version, replica_id, silent_since, due, due_at,
			node_instance_id, serial, issuer, session_serial, serial_generation, probe_wanted, probe_due, probe_attempt,
			probe_note, probe_instance, probe_generation, probed_at, tasks_at)
	ON CONFLICT (node_id) DO UPDATE SET identity_state = EXCLUDED.identity_state, session_id = EXCLUDED.session_id,
		generation = EXCLUDED.generation, session_version = EXCLUDED.session_version, replica_id = EXCLUDED.replica_id,
		silent_since = EXCLUDED.silent_since, due_at = EXCLUDED.due_at, node_instance_id = EXCLUDED.node_instance_id,
		serial = EXCLUDED.serial, issuer = EXCLUDED.issuer, session_serial = EXCLUDED.session_serial,
		serial_generation = EXCLUDED.serial_generation, probe_wanted = EXCLUDED.probe_wanted,
		probe_due = EXCLUDED.probe_due, probe_attempt = EXCLUDED.probe_attempt, probe_note = EXCLUDED.probe_note,
		probe_instance = EXCLUDED.probe_instance, probe_generation = EXCLUDED.probe_generation,
		probed_at = EXCLUDED.probed_at, tasks_at = EXCLUDED.tasks_at`)

// Save writes the rows of nodes, and the evidence about them, that have changed.
func Save(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	var changed []*Node
	var observed []*Kept
	for _, id := range IDsOf(nodes) {
		n := nodes[id]
		for _, e := range n.Evidence {
			if e.news() || e.version != e.written {
				observed = append(observed, e)
			}
		}
		if n.NodeRow != n.Stored || n.Due {
			changed = append(changed, n)
		}
	}
	if len(changed) > 0 {
		if err := pg.Queue(ctx, tx, writeNodes, nodeColumns(changed)...); err != nil {
			return fmt.Errorf("write nodes: %w", err)
		}
	}
	if err := saveFacts(ctx, tx, nodes); err != nil {
		return err
	}
	if err := saveProfiles(ctx, tx, nodes); err != nil {
		return err
	}
	return SaveEvidence(ctx, tx, observed)
}

// nodeColumns returns the arguments of writeNodes.
func nodeColumns(list []*Node) []any {
	text := func(n *Node) string { return n.NodeID }
	at := func(of func(*Node) *time.Time) []*time.Time { return column(list, of) }
	return []any{
		column(list, text),
		column(list, func(n *Node) string { return n.State }),
		column(list, func(n *Node) string { return n.SessionID }),
		column(list, func(n *Node) int64 { return n.Generation }),
		column(list, func(n *Node) int64 { return n.SessionVersion }),
		column(list, func(n *Node) string { return n.ReplicaID }),
		at(func(n *Node) *time.Time { return n.SilentSince }),
		column(list, func(n *Node) bool { return n.Due }),
		at(func(n *Node) *time.Time { return n.DueAt }),
		column(list, func(n *Node) string { return n.InstanceID }),
		column(list, func(n *Node) string { return n.Serial }),
		column(list, func(n *Node) string { return n.Issuer }),
		column(list, func(n *Node) string { return n.SessionSerial }),
		column(list, func(n *Node) int64 { return n.SerialGeneration }),
		column(list, func(n *Node) bool { return n.Wanted }),
		at(func(n *Node) *time.Time { return n.ProbeDue }),
		column(list, func(n *Node) int32 { return n.ProbeAttempt }),
		column(list, func(n *Node) string { return n.ProbeNote }),
		column(list, func(n *Node) string { return n.ProbeInstance }),
		column(list, func(n *Node) int64 { return n.ProbeGeneration }),
		at(func(n *Node) *time.Time { return n.ProbedAt }),
		at(func(n *Node) *time.Time { return n.TasksAt }),
	}
}

func column[T any](list []*Node, of func(*Node) T) []T {
	out := make([]T, len(list))
	for i, n := range list {
		out[i] = of(n)
	}
	return out
}
