package watchdog

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/silence"
)

// run is the stored facts of a run that may matter to a rule.
type run struct {
	ID, Kind, State, Phase, Step       string
	Stalled                            bool
	StuckReason, Requester, CancelBy   string
	ErrorCode, Error, Layer, ParentRun string
	CreatedAt                          time.Time
	FinishedAt                         *time.Time
}

// over reports whether a run has stopped going forward: it is being undone, or it has ended.
func (r *run) over() bool {
	return r != nil && (r.Phase == "undo" || r.State == "compensating" || r.FinishedAt != nil)
}

// reach is whether a workspace's instance can be reached, as far as replicas of nodeapi have listened.
type reach int

const (
	reachUnknown reach = iota // no replica listens, or the silence is still too short
	reachServing
	reachLost
)

// subject is the stored state of one workspace.
type subject struct {
	WorkspaceID, TenantID, Tenant, Name string
	State                               commonv1.WorkspaceState
	StateAt                             time.Time
	Epoch                               int64
	RunID                               string
	Placement, NodeID                   string
	RegisterFailures                    int32
	RegisterSince                       *time.Time
	LastErrorCode, LastError            string
	Run                                 *run   // the workspace's present or last run, if it may matter to a rule
	Op                                  *run   // the operation that its open record follows
	Instance                            string // state of the present epoch's instance; empty if there is none
	Reach                               reach
	LostSince                           time.Time // for reachLost: since when
	CloseReason                         string
	Identity                            string // state of the node's identity; empty if recovery has none
	// EmptiedAt is since when its machine is known to have nothing of it; nil: it is not.
	EmptiedAt *time.Time
}

func (s *subject) path() string { return s.Tenant + "/" + s.Name }

func (s *subject) static() bool { return s.Placement == placementStatic }

// emptied reports whether its shared machine is connected and has nothing of it.
func (s *subject) emptied() bool { return s.EmptiedAt != nil && s.static() && s.Reach == reachServing }

// unit returns the id of the unit that fails as one: a workspace with its own instance, or a shared machine with all
// its workspaces.
func (s *subject) unit() string {
	if s.static() && s.NodeID != "" {
		return s.NodeID
	}
	return s.WorkspaceID
}

const runFieldsSQL = `%[1]s.run_id, %[1]s.kind, %[1]s.state, %[1]s.phase, %[1]s.step, %[1]s.stalled,
	%[1]s.stuck_reason, %[1]s.requester, %[1]s.cancel_by, %[1]s.error_code, %[1]s.error, %[1]s.error_layer,
	%[1]s.parent_run, %[1]s.created_at, %[1]s.finished_at`

// upToDate is the greatest age in seconds of unread events at which sessions and beats still count as of one time.
// Sessions come as events and beats are read from their table: a node whose session moved while its events were unread
// would seem to be served by a replica that has gone.
const upToDate = "15"

// loadSuspects reads every workspace in which something may be wrong, and every one that has an open record. Silence
// counts from the time since which some replica of nodeapi has listened without a gap, see replicas.ListeningSince.
// Active workspaces that no replica serves are found by the few replicas that are named as serving: the workspaces
// without one, and those of each replica that has fallen silent. While no replica listens this is no evidence, and none
// of them is read, since that would be the whole fleet.
var loadSuspects = pg.Define(pg.RoleRecovery, "watchdog.load_subjects", `
WITH RECURSIVE listening AS (
	SELECT `+replicas.ListeningSince()+` AS since
), fresh AS (
	SELECT p.replica_id FROM mesh.replica p WHERE `+replicas.Listens("p")+`
), server AS (
	(SELECT w.served_by FROM recovery.watch_workspace w
		WHERE w.state = 'active' AND w.served_by IS NOT NULL ORDER BY w.served_by LIMIT 1)
	UNION ALL
	SELECT (SELECT w.served_by FROM recovery.watch_workspace w
		WHERE w.state = 'active' AND w.served_by > s.served_by ORDER BY w.served_by LIMIT 1)
	FROM server s WHERE s.served_by IS NOT NULL
), wanted AS (
	SELECT c.workspace_id FROM recovery.recovery_record c WHERE c.ended_at IS NULL
	UNION SELECT r.workspace_id FROM recovery.watch_run r WHERE r.stalled
	UNION SELECT w.workspace_id FROM recovery.watch_workspace w WHERE w.register_failures > 0
	UNION SELECT e.workspace_id FROM recovery.watch_emptied e
	UNION SELECT w.workspace_id FROM recovery.watch_workspace w
		WHERE EXISTS (SELECT FROM fresh) AND w.state = 'active' AND w.served_by IS NULL
	UNION SELECT u.workspace_id FROM server s CROSS JOIN LATERAL (
			SELECT w.workspace_id FROM recovery.watch_workspace w WHERE w.state = 'active' AND w.served_by = s.served_by) u
		WHERE EXISTS (SELECT FROM fresh) AND s.served_by NOT IN (SELECT f.replica_id FROM fresh f)
)
SELECT w.workspace_id::text, w.tenant_id::text, w.tenant, w.name, w.state, w.state_at, w.epoch, w.run_id,
	COALESCE(NULLIF(i.placement, ''), w.placement), COALESCE(w.node_id, i.node_id)::text,
	w.register_failures, w.register_failing_since, w.last_error_code, w.last_error, v.node_id IS NOT NULL,
	EXISTS (SELECT FROM fresh) AND `+events.UnreadSQL("recovery", ConsumerName)+` <= `+upToDate+`,
	COALESCE(lost.since, i.started_at, w.state_at), (SELECT l.since FROM listening l), COALESCE(lost.reason, ''),
		COALESCE(d.state, ''), COALESCE(i.state, ''),
	(SELECT min(e.since) FROM recovery.watch_emptied e
		WHERE e.workspace_id = w.workspace_id AND e.node_id = w.node_id AND e.since > w.state_at),
	`+fmt.Sprintf(runFieldsSQL, "r")+`
FROM wanted x
JOIN recovery.watch_workspace w USING (workspace_id)
LEFT JOIN recovery.watch_instance i ON i.workspace_id = w.workspace_id AND i.epoch = w.epoch
LEFT JOIN LATERAL (
	SELECT s.node_id FROM recovery.watch_session s JOIN fresh f USING (replica_id)
	WHERE s.node_id = COALESCE(w.node_id, i.node_id) AND s.serving LIMIT 1
) v ON true
LEFT JOIN LATERAL (
	SELECT max(CASE WHEN s.serving THEN COALESCE(p.beat_at, s.since) ELSE s.since END) AS since,
		(array_agg(s.close_reason ORDER BY s.generation DESC, s.version DESC))[1] AS reason
	FROM recovery.watch_session s LEFT JOIN mesh.replica p USING (replica_id)
		WHERE s.node_id = COALESCE(w.node_id, i.node_id)
) lost ON true
LEFT JOIN recovery.identity d ON d.node_id = COALESCE(w.node_id, i.node_id)
LEFT JOIN recovery.watch_run r ON r.run_id = w.run_id
ORDER BY w.workspace_id`)

// readRuns reads runs by their ids. It is a statement of its own, since the open records, which name the runs, are few
// when the plan of loadSuspects is made and may be the whole fleet when it is used.
var readRuns = pg.Define(pg.RoleRecovery, "watchdog.read_runs", `
	SELECT `+fmt.Sprintf(runFieldsSQL, "o")+` FROM recovery.watch_run o WHERE o.run_id = ANY($1::text[])`)

// replicaListens reports whether some replica of nodeapi listens.
var replicaListens = pg.Define(pg.RoleRecovery, "watchdog.replica_listens", `
	SELECT EXISTS (SELECT FROM mesh.replica p WHERE `+replicas.Listens("p")+`)`)

// nullRun scans the columns of an outer join.
type nullRun struct {
	id, kind, state, phase, step, reason, requester, cancel, code, text, layer, parent *string
	stalled                                                                            *bool
	created, finished                                                                  *time.Time
}

func (n *nullRun) targets() []any {
	return []any{
		&n.id, &n.kind, &n.state, &n.phase, &n.step, &n.stalled, &n.reason, &n.requester, &n.cancel, &n.code, &n.text,
		&n.layer, &n.parent, &n.created,
		&n.finished,
	}
}

func (n *nullRun) run() *run {
	if n.id == nil {
		return nil
	}
	return &run{
		ID: *n.id, Kind: *n.kind, State: *n.state, Phase: *n.phase, Step: *n.step, Stalled: *n.stalled,
		StuckReason: *n.reason, Requester: *n.requester, CancelBy: *n.cancel, ErrorCode: *n.code, Error: *n.text,
		Layer: *n.layer, ParentRun: *n.parent, CreatedAt: *n.created,
		FinishedAt: n.finished,
	}
}

// loadSubjects returns the subjects that loadSuspects reads, in the order of the workspaces' ids.
func loadSubjects(ctx context.Context, tx pgx.Tx, staleAfter time.Duration, now time.Time) ([]*subject, error) {
	rows, err := pg.Query(ctx, tx, loadSuspects)
	if err != nil {
		return nil, fmt.Errorf("read what may be wrong: %w", err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*subject, error) {
		s := &subject{}
		var state string
		var node *string
		var served, listening bool
		var heard, since *time.Time
		var present nullRun
		targets := append([]any{
			&s.WorkspaceID, &s.TenantID, &s.Tenant, &s.Name, &state, &s.StateAt, &s.Epoch, &s.RunID, &s.Placement, &node,
			&s.RegisterFailures, &s.RegisterSince, &s.LastErrorCode, &s.LastError, &served, &listening, &heard, &since,
			&s.CloseReason,
			&s.Identity,
			&s.Instance,
			&s.EmptiedAt,
		}, present.targets()...)
		if err := row.Scan(targets...); err != nil {
			return nil, err
		}
		var err error
		// A state that this build does not know becomes unspecified, in which no rule acts.
		if s.State, err = names.Parse[commonv1.WorkspaceState](state); err != nil {
			aside.Note(ctx, "watchdog.workspace", s.WorkspaceID, err)
		}
		if node != nil {
			s.NodeID = *node
		}
		s.Run = present.run()
		rule := silence.Rule{After: staleAfter}
		if listening && since != nil {
			rule.ListeningSince = *since
		}
		switch {
		case served:
			s.Reach = reachServing
		case heard != nil && rule.Down(*heard, now):
			s.Reach, s.LostSince = reachLost, *heard
			if since.After(*heard) {
				s.LostSince = *since
			}
		}
		return s, nil
	})
	if err != nil {
		return nil, fmt.Errorf("read what may be wrong: %w", err)
	}
	return out, nil
}

// loadOperations returns the operations that open records follow, by their ids.
func loadOperations(ctx context.Context, tx pgx.Tx, records map[string]*record) (map[string]*run, error) {
	var followed []string
	for _, r := range records {
		if r.Following {
			followed = append(followed, r.OperationID)
		}
	}
	if len(followed) == 0 {
		return nil, nil
	}
	rows, err := pg.Query(ctx, tx, readRuns, followed)
	if err != nil {
		return nil, fmt.Errorf("read operations: %w", err)
	}
	out := make(map[string]*run, len(followed))
	var op nullRun
	if _, err := pgx.ForEachRow(rows, op.targets(), func() error { out[*op.id] = op.run(); return nil }); err != nil {
		return nil, fmt.Errorf("read operations: %w", err)
	}
	return out, nil
}

// loadOpen returns the open records by workspace. With lock it locks their rows, which a round must do that writes.
func loadOpen(ctx context.Context, tx pgx.Tx, lock bool) (map[string]*record, error) {
	statement := readOpenRecords
	if lock {
		statement = lockOpenRecords
	}
	rows, err := pg.All[recordRow](ctx, tx, statement)
	if err != nil {
		return nil, fmt.Errorf("read open recoveries: %w", err)
	}
	out := make(map[string]*record, len(rows))
	// A record that this build cannot read stays open, and is left to a replica whose build can.
	list, err := aside.Rows(ctx, "watchdog.recovery", rows, func(r recordRow) string { return r.ID },
		func(r recordRow) (*record, error) { return r.read() })
	if err != nil {
		return nil, err
	}
	for _, r := range list {
		out[r.WorkspaceID] = r
	}
	return out, nil
}
