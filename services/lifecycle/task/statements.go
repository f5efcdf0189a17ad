package task

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Record is a Row as it is read, with its state as it is stored.
type Record struct {
	Row
	StateName string `db:"state"`
}

// latestRecord is a Record with what Latest reads of its node.
type latestRecord struct {
	Record
	Cordoned bool `db:"node_cordoned"`
}

// Columns are the columns of a Record, of the table t.
var Columns = pg.Columns[Record]("t")

// Parse returns the row. A state of another build is an error. A type or reason of another build is reported by package
// aside, and shown as it is stored.
func (r Record) Parse(ctx context.Context) (Row, error) {
	out, err := r.parse()
	if err != nil {
		return Row{}, err
	}
	_, _, err = out.typeAndReason()
	aside.Note(ctx, "task", r.TaskID, err)
	return out, nil
}

func (r Record) parse() (Row, error) {
	out := r.Row
	var err error
	if out.State, err = names.Parse[commonv1.TaskState](r.StateName); err != nil {
		return Row{}, fmt.Errorf("read state of task %s: %w", r.TaskID, err)
	}
	return out, nil
}

// One runs a statement and returns its only task. Without one the error is pgx.ErrNoRows. One in a state that this
// build does not know is an error, which package aside reports.
func One(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Row, error) {
	r, err := pg.One[Record](ctx, q, s, args...)
	if err != nil {
		return Row{}, err
	}
	row, err := r.Parse(ctx)
	aside.Note(ctx, "task", r.TaskID, err)
	return row, err
}

// All runs a statement and returns its tasks.
func All(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]Row, error) {
	records, err := pg.All[Record](ctx, q, s, args...)
	if err != nil {
		return nil, err
	}
	return aside.Rows(ctx, "task", records, func(r Record) string { return r.TaskID },
		func(r Record) (Row, error) { return r.Parse(ctx) })
}

// QueuedAt has the columns that the database computes for a task that is queued; the others are as requested.
type QueuedAt struct {
	CreatedAt time.Time `db:"created_at"`
	NotBefore time.Time `db:"not_before"`
	ExpiresAt time.Time `db:"expires_at"`
	StateAt   time.Time `db:"state_at"`
}

var (
	enqueueTask = pg.Define(pg.RoleLifecycle, "task.enqueue", `
		INSERT INTO lifecycle.task AS t (task_id, type, node_id, workspace_id, tenant_id, run_id, epoch, op_seq, state,
			idem_key, payload, expires_at, start_within,
			correlation_id, created_by, secret_keys)
		VALUES ($1, $2, $3, nullif($4, '')::uuid, nullif($5, '')::uuid, nullif($6, '')::uuid, $7, $8, 'queued', $9, $10,
			mesh.clock() + $11::interval, $11::interval, $12, $13, $14)
		ON CONFLICT (idem_key) DO NOTHING RETURNING `+pg.Columns[QueuedAt]("t"))
	taskByKey = pg.Define(pg.RoleLifecycle, "task.by_key", `
		SELECT `+Columns+` FROM lifecycle.task t WHERE t.idem_key = $1`)
	latestOfRun = pg.Define(pg.RoleLifecycle, "task.latest_of_run", `
		SELECT `+Columns+`, coalesce((SELECT g.cordoned FROM lifecycle.node_gate g WHERE g.node_id = t.node_id), false)
			AS node_cordoned
		FROM lifecycle.task t
		WHERE t.run_id = $1 AND starts_with(t.idem_key, $2) ORDER BY t.created_at DESC, t.task_id DESC LIMIT 1`)
	// The bounds enclose every key that begins with the prefix and goes on with digits, in any collation of the database.
	lastNumbered = pg.Define(pg.RoleLifecycle, "task.last_numbered", `
		SELECT `+Columns+` FROM lifecycle.task t
		WHERE t.idem_key > $1::text AND t.idem_key < $1::text || '99999999999999999999' AND starts_with(t.idem_key, $1::text)
		ORDER BY t.idem_key DESC LIMIT 1`)
	lockOfRuns = pg.Define(pg.RoleLifecycle, "task.lock_of_runs", `
		SELECT FROM lifecycle.task t WHERE t.run_id = ANY ($1::uuid[]) AND t.open AND t.state IN ('queued', 'dispatched')
		ORDER BY t.task_id FOR UPDATE`)
	extendTasks = pg.Define(pg.RoleLifecycle, "task.extend", `
		UPDATE lifecycle.task t
			SET expires_at = t.expires_at + make_interval(secs => x.stood), version = t.version + 1, `+MarkReported+`
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE t.run_id = x.run_id AND t.open AND t.state IN ('queued', 'dispatched') RETURNING `+Columns)
	reportLeased = pg.DefineDynamic(pg.RoleLifecycle, "task.report_leased", func(s unreportedSet) string {
		return `
			WITH unreported AS (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.open AND t.state = 'dispatched' AND t.offered_at = t.state_at AND ` + string(s) + `
			)
			UPDATE lifecycle.task t SET version = t.version + 1, ` + MarkReported + `
			FROM unreported u WHERE t.task_id = u.task_id AND t.state = 'dispatched' AND t.offered_at = t.state_at
				RETURNING ` + Columns
	}, unreportedOfNode, unreportedOfAll)
)
