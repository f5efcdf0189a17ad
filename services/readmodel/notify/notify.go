package notify

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// batch is how many nodes and workspaces one round takes from the queue at most, and enough how many workspaces it
	// reads before it leaves the others of the batch to the next round.
	batch  = 64
	enough = 1000
	// poll is how often a replica looks for what another one has queued and not worked on, and for evidence that is
	// over without an event.
	poll = 30 * time.Second
)

// Deps of a notifier.
type Deps struct {
	Logger *slog.Logger
	DB     *pgxpool.Pool // logs in as readmodel
	Reader *view.Reader
	// Queued returns a channel that fires after this process queued something.
	Queued func() <-chan struct{}
	// Window is how soon an impact must return to count as the same; the policy's window of repetitions.
	Window     func() time.Duration
	Registerer prometheus.Registerer
}

// Notifier keeps the impacts of one mesh. One replica works at a time.
type Notifier struct {
	deps    Deps
	changes *prometheus.CounterVec
}

// New returns a notifier. It does not access the database.
func New(deps Deps) (*Notifier, error) {
	n := &Notifier{deps: deps, changes: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "impact_changes_total",
		Help: "Impacts on workspaces that began, changed their family or ended, and reads of them that were postponed.",
	}, []string{"event"})}
	if deps.Registerer != nil {
		if err := deps.Registerer.Register(n.changes); err != nil {
			return nil, fmt.Errorf("register metrics of notifications: %w", err)
		}
	}
	return n, nil
}

// Result is what one round did.
type Result struct {
	Subjects              int // of the queue, that it has finished
	Workspaces            int // that were read
	Began, Changed, Ended int

	late bool // more evidence may be over without an event
}

// Run works on the queue until ctx ends.
func (n *Notifier) Run(ctx context.Context) error {
	more := false
	return app.EveryPaced(ctx, n.deps.Logger, "notifications", func() func(context.Context) bool {
		queued := n.deps.Queued()
		return func(ctx context.Context) bool {
			if more {
				return ctx.Err() == nil
			}
			timer := time.NewTimer(poll)
			defer timer.Stop()
			select {
			case <-queued:
			case <-timer.C:
			case <-ctx.Done():
				return false
			}
			return true
		}
	}, func(ctx context.Context) error {
		more = false // after an error the next round waits
		r, err := n.RunOnce(ctx)
		more = err == nil && (r.Subjects == batch || r.Workspaces >= enough || r.late) || err != nil && r.Subjects > 0
		return err
	})
}

var (
	// takeTurn keeps other replicas from working on the queue until the transaction ends.
	takeTurn = pg.Define(pg.RoleReadmodel, "notify.take_turn", `
		SELECT pg_try_advisory_xact_lock($1) FROM set_config('statement_timeout', '10000', true)`)
	// queueLate queues a page of the workspaces of which the evidence of an impact is over, without an event that says so.
	queueLate = pg.Define(pg.RoleReadmodel, "notify.queue_late", `
		WITH late AS (
			UPDATE readmodel.impact i SET recheck_at = NULL WHERE i.impact_id IN (
				SELECT x.impact_id FROM readmodel.impact x WHERE x.ended_at IS NULL AND x.recheck_at < mesh.clock()
				ORDER BY x.recheck_at, x.impact_id LIMIT $1)
			RETURNING i.workspace_id), queued AS (
			INSERT INTO readmodel.impact_due AS d (kind, subject_id)
			SELECT DISTINCT 'workspace', l.workspace_id FROM late l ORDER BY 2
			ON CONFLICT (kind, subject_id) DO UPDATE SET ticket = EXCLUDED.ticket)
		SELECT count(*)::int FROM late`)
	readDue = pg.Define(pg.RoleReadmodel, "notify.read_due", `
		SELECT d.kind, d.subject_id::text AS subject_id, d.ticket FROM readmodel.impact_due d
		ORDER BY d.ticket LIMIT $1`)
	// A subject that drew another ticket meanwhile stays, and so does one that is drawing one now.
	deleteDue = pg.Define(pg.RoleReadmodel, "notify.delete_due", `
		DELETE FROM readmodel.impact_due d WHERE (d.kind, d.subject_id, d.ticket) IN (
			SELECT x.kind, x.subject_id, x.ticket FROM unnest($1::text[], $2::uuid[], $3::bigint[]) u (kind, id, ticket)
			JOIN readmodel.impact_due x ON x.kind = u.kind AND x.subject_id = u.id AND x.ticket = u.ticket
			ORDER BY x.kind, x.subject_id FOR UPDATE OF x SKIP LOCKED)`)
)

// turnLock is the key of the advisory lock of the replica that works.
const turnLock = 0x6e746679

type subject struct {
	Kind   string `db:"kind"`
	ID     string `db:"subject_id"`
	Ticket int64  `db:"ticket"`
}

// RunOnce works on at most a batch of nodes and workspaces of the queue, in the order of their last changes. It does
// nothing while another replica works. If one of the batch cannot be worked on, the others are, each by itself, that
// one is put at the end of the queue, and the error is returned beside the result.
func (n *Notifier) RunOnce(ctx context.Context) (Result, error) {
	r, _, err := n.round(ctx, batch)
	if err == nil || ctx.Err() != nil || pg.IsConnError(err) {
		return r, err
	}
	return n.oneByOne(ctx)
}

// round is RunOnce for at most a number of subjects, in one transaction. It returns the first of them; nil: none was
// read.
func (n *Notifier) round(ctx context.Context, most int) (Result, *subject, error) {
	var r Result
	var first *subject
	err := pg.InTx(ctx, n.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		r, first = Result{}, nil
		mine, err := pg.Value[bool](ctx, tx, takeTurn, turnLock)
		if err != nil || !mine {
			return err
		}
		late, err := pg.Value[int32](ctx, tx, queueLate, batch)
		if err != nil {
			return fmt.Errorf("queue what is over: %w", err)
		}
		r.late = late == batch
		due, err := pg.All[subject](ctx, tx, readDue, most)
		if err != nil || len(due) == 0 {
			return err
		}
		first = &due[0]
		// The snapshot is taken after the queue was read, so that it has the changes that were queued.
		err = n.deps.Reader.Read(ctx, list.All(), func(snapshotCtx context.Context, s *view.Snapshot) error {
			due, err = n.follow(snapshotCtx, tx, s, due, &r)
			return err
		})
		if err != nil {
			return err
		}
		r.Subjects = len(due)
		kinds, ids, tickets := make([]string, len(due)), make([]string, len(due)), make([]int64, len(due))
		for i, d := range due {
			kinds[i], ids[i], tickets[i] = d.Kind, d.ID, d.Ticket
		}
		_, err = pg.Exec(ctx, tx, deleteDue, kinds, ids, tickets)
		return err
	})
	if err != nil {
		return Result{}, first, fmt.Errorf("note what is touched: %w", err)
	}
	n.changes.WithLabelValues("began").Add(float64(r.Began))
	n.changes.WithLabelValues("changed").Add(float64(r.Changed))
	n.changes.WithLabelValues("ended").Add(float64(r.Ended))
	return r, first, nil
}

// follow makes the rows of the due workspaces, and of those on the due nodes, follow their present state. It returns
// those of the due that it has finished.
func (n *Notifier) follow(
	ctx context.Context, tx pgx.Tx, s *view.Snapshot, due []subject, r *Result,
) ([]subject, error) {
	var workspaces []string
	var done []subject
	for _, d := range due {
		if r.Workspaces+len(workspaces) >= enough {
			break
		}
		if d.Kind == "workspace" {
			workspaces = append(workspaces, d.ID)
		} else if err := n.pages(ctx, tx, s, view.WorkspaceFilter{NodeID: d.ID, NotOver: true}, r); err != nil {
			return nil, err
		}
		done = append(done, d)
	}
	if len(workspaces) == 0 {
		return done, nil
	}
	return done, n.pages(ctx, tx, s, view.WorkspaceFilter{IDs: workspaces}, r)
}

// pages makes the rows of the workspaces of a filter follow, a page at a time.
func (n *Notifier) pages(ctx context.Context, tx pgx.Tx, s *view.Snapshot, f view.WorkspaceFilter, r *Result) error {
	for page := (list.Page{Size: list.DefaultSize}); ; {
		found, next, err := s.Touched(ctx, f, page)
		if err != nil {
			return err
		}
		r.Workspaces += len(found)
		c, err := n.compare(ctx, tx, s.Now, found)
		if err != nil {
			return err
		}
		if err := c.write(ctx, tx, s.Now, r); err != nil {
			return err
		}
		if page.Token = next; next == "" {
			return nil
		}
	}
}
