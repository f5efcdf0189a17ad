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

// run is the stored facts of a run that may matter to a rule. It is read from recovery.watch_run, which may be joined
// to rows without a run: the id is empty then.
type run struct {
	ID          string     `db:"found_run_id" expr:"COALESCE(@.run_id, '')"`
	Kind        string     `db:"run_kind" expr:"COALESCE(@.kind, '')"`
	State       string     `db:"run_state" expr:"COALESCE(@.state, '')"`
	Phase       string     `db:"run_phase" expr:"COALESCE(@.phase, '')"`
	Step        string     `db:"run_step" expr:"COALESCE(@.step, '')"`
	Stalled     bool       `db:"run_stalled" expr:"COALESCE(@.stalled, false)"`
	StuckReason string     `db:"run_stuck_reason" expr:"COALESCE(@.stuck_reason, '')"`
	Requester   string     `db:"run_requester" expr:"COALESCE(@.requester, '')"`
	CancelBy    string     `db:"run_cancel_by" expr:"COALESCE(@.cancel_by, '')"`
	ErrorCode   string     `db:"run_error_code" expr:"COALESCE(@.error_code, '')"`
	Error       string     `db:"run_error" expr:"COALESCE(@.error, '')"`
	Layer       string     `db:"run_error_layer" expr:"COALESCE(@.error_layer, '')"`
	ParentRun   string     `db:"run_parent" expr:"COALESCE(@.parent_run, '')"`
	FinishedAt  *time.Time `db:"run_finished_at" expr:"@.finished_at"`
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

// subject is the stored state of one workspace. The expressions are those of loadSuspects.
type subject struct {
	WorkspaceID      string                  `db:"workspace_id" expr:"@.workspace_id::text"`
	TenantID         string                  `db:"tenant_id" expr:"@.tenant_id::text"`
	Tenant           string                  `db:"tenant"`
	Name             string                  `db:"name"`
	State            commonv1.WorkspaceState `db:"-"`
	StateAt          time.Time               `db:"state_at"`
	Epoch            int64                   `db:"epoch"`
	RunID            string                  `db:"run_id"`
	Placement        string                  `db:"placement" expr:"COALESCE(NULLIF(i.placement, ''), @.placement)"`
	NodeID           string                  `db:"node_id" expr:"COALESCE(COALESCE(@.node_id, i.node_id)::text, '')"`
	RegisterFailures int32                   `db:"register_failures"`
	RegisterSince    *time.Time              `db:"register_failing_since"`
	LastErrorCode    string                  `db:"last_error_code"`
	LastError        string                  `db:"last_error"`
	Run              *run                    `db:"-"` // the workspace's present or last run, if it may matter to a rule
	Op               *run                    `db:"-"` // the operation that its open record follows
	// Instance is the state of the present epoch's instance; empty if there is none.
	Instance    string    `db:"instance_state" expr:"COALESCE(i.state, '')"`
	Reach       reach     `db:"-"`
	LostSince   time.Time `db:"-"` // for reachLost: since when
	CloseReason string    `db:"close_reason" expr:"COALESCE(lost.reason, '')"`
	// Identity is the state of the node's identity; empty if recovery has none.
	Identity string `db:"identity_state" expr:"COALESCE(d.state, '')"`
	// EmptiedAt is since when its machine is known to have nothing of it; nil: it is not.
	EmptiedAt *time.Time `db:"emptied_at" expr:"emptied.since"`
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

// upToDate is the greatest age in seconds of unread events at which sessions and beats still count as of one time.
// Sessions come as events and beats are read from their table: a node whose session moved while its events were unread
// would seem to be served by a replica that has gone.
const upToDate = "15"

// loadSuspects reads every workspace in which something may be wrong, and every one that has an open record. Silence
// counts from the time since which some replica of nodeapi has listened without a gap, see replicas.ListeningSince. A
// node whose session recovery itself has confirmed was heard as that session opened, even if its event is unread.
// Active workspaces that no replica serves are found by the few replicas that are named as serving: the workspaces
// without one, and those of each replica that has fallen silent. While no replica listens this is no evidence, and none
// of them is read, since that would be the whole fleet.
var loadSuspects = pg.Define(pg.RoleRecovery, "watchdog.load_subjects", `
WITH RECURSIVE fresh AS (
	SELECT p.replica_id FROM mesh.replica p WHERE `+replicas.Listens("p")+`
), listening AS (
	SELECT `+replicas.ListeningSince()+` AS since,
		EXISTS (SELECT FROM fresh) AND `+events.UnreadSQL("recovery", ConsumerName)+` <= `+upToDate+` AS counts
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
SELECT `+pg.Columns[subjectRow]("w")+`, `+pg.Columns[run]("r")+`
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
LEFT JOIN LATERAL (
	SELECT min(e.since) AS since FROM recovery.watch_emptied e
	WHERE e.workspace_id = w.workspace_id AND e.node_id = w.node_id AND e.since > w.state_at
) emptied ON true
LEFT JOIN recovery.identity d ON d.node_id = COALESCE(w.node_id, i.node_id)
CROSS JOIN LATERAL (
	SELECT GREATEST(COALESCE(lost.since, i.started_at, w.state_at),
		(SELECT o.opened_at FROM recovery.session_open o WHERE o.session_id = d.confirmed_session_id)) AS at
) heard
LEFT JOIN recovery.watch_run r ON r.run_id = w.run_id
ORDER BY w.workspace_id`)

// readRuns reads runs by their ids. It is a statement of its own, since the open records, which name the runs, are few
// when the plan of loadSuspects is made and may be the whole fleet when it is used.
var readRuns = pg.Define(pg.RoleRecovery, "watchdog.read_runs", `
	SELECT `+pg.Columns[run]("o")+` FROM recovery.watch_run o WHERE o.run_id = ANY($1::text[])`)

// replicaListens reports whether some replica of nodeapi listens.
var replicaListens = pg.Define(pg.RoleRecovery, "watchdog.replica_listens", `
	SELECT EXISTS (SELECT FROM mesh.replica p WHERE `+replicas.Listens("p")+`)`)

// subjectRow is a subject as it is read, without its run.
type subjectRow struct {
	subject

	StateText string `db:"state"`
	// Served reports whether a replica that listens has a session of the node.
	Served bool `db:"served" expr:"v.node_id IS NOT NULL"`
	// Counts reports whether silence counts: a replica listens, and sessions and beats are as of one time.
	Counts         bool       `db:"silence_counts" expr:"(SELECT l.counts FROM listening l)"`
	Heard          time.Time  `db:"heard" expr:"heard.at"`
	ListeningSince *time.Time `db:"listening_since" expr:"(SELECT l.since FROM listening l)"`
}

// suspectRow is a row of loadSuspects.
type suspectRow struct {
	subjectRow
	run
}

// read returns the subject of a row.
func (r *suspectRow) read(ctx context.Context, staleAfter time.Duration, now time.Time) *subject {
	s := &r.subject
	var err error
	// A state that this build does not know becomes unspecified, in which no rule acts.
	if s.State, err = names.Parse[commonv1.WorkspaceState](r.StateText); err != nil {
		aside.Note(ctx, "watchdog.workspace", s.WorkspaceID, err)
	}
	if r.run.ID != "" {
		s.Run = &r.run
	}
	rule := silence.Rule{After: staleAfter}
	if r.Counts && r.ListeningSince != nil {
		rule.ListeningSince = *r.ListeningSince
	}
	switch {
	case r.Served:
		s.Reach = reachServing
	case rule.Down(r.Heard, now):
		s.Reach, s.LostSince = reachLost, r.Heard
		if rule.ListeningSince.After(r.Heard) {
			s.LostSince = rule.ListeningSince
		}
	}
	return s
}

// loadSubjects returns the subjects that loadSuspects reads, in the order of the workspaces' ids.
func loadSubjects(ctx context.Context, tx pgx.Tx, staleAfter time.Duration, now time.Time) ([]*subject, error) {
	rows, err := pg.All[suspectRow](ctx, tx, loadSuspects)
	if err != nil {
		return nil, fmt.Errorf("read what may be wrong: %w", err)
	}
	out := make([]*subject, len(rows))
	for i := range rows {
		out[i] = rows[i].read(ctx, staleAfter, now)
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
	rows, err := pg.All[run](ctx, tx, readRuns, followed)
	if err != nil {
		return nil, fmt.Errorf("read operations: %w", err)
	}
	out := make(map[string]*run, len(rows))
	for i := range rows {
		out[rows[i].ID] = &rows[i]
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
