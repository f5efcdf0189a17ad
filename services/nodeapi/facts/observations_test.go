package facts

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// site is a number of replicas of nodeapi over one database. The test sets their process clock.
type site struct {
	t    *testing.T
	ctx  context.Context
	pool *pgxpool.Pool
	now  time.Time
}

func newSite(t *testing.T) *site {
	t.Helper()
	testkit.IO(t)
	return &site{t: t, ctx: testkit.Context(t), pool: testkit.DB(t).Pool(pg.RoleNodeAPI), now: time.Now()}
}

func (s *site) replica() *Writer {
	w := New(Deps{Logger: testkit.Logger(s.t), DB: s.pool, Wake: func() {}})
	w.now = func() time.Time { return s.now }
	return w
}

// light is an agent with workspaces at rest.
type light struct {
	id, instance string
	generation   int64
	workspaces   []string
}

func lights(agents, workspaces int) []*light {
	out := make([]*light, agents)
	for i := range out {
		out[i] = &light{id: ids.New(), instance: ids.New(), generation: 1}
		for range workspaces {
			out[i].workspaces = append(out[i].workspaces, ids.New())
		}
	}
	return out
}

// seen returns the agent's observation of a workspace. Only the time that it has run differs from minute to minute.
func (a *light) seen(workspace string, up time.Duration) *nodev1.Observation {
	return &nodev1.Observation{
		WorkspaceId: workspace, Epoch: 1, Storage: &nodev1.StorageReport{Names: []string{"data"}},
		Workloads: []*nodev1.WorkloadStatus{{
			Name: "main", Epoch: 1, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, Detail: "for " + up.String(),
		}},
	}
}

// report reports all observations to a replica, as agents do each minute and at the start of a session.
func (a *light) report(w *Writer, up time.Duration) {
	for _, workspace := range a.workspaces {
		w.Observed(a.id, a.instance, a.generation, a.seen(workspace, up))
	}
}

func (a *light) admitted(w *Writer) {
	w.Session(&nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: a.id, Generation: a.generation, State: commonv1.SessionState_SESSION_STATE_ADMITTED,
		Version: 1,
	}, "")
}

// write flushes a replica, and runs its writes that follow from time.
func (s *site) write(w *Writer) {
	s.t.Helper()
	w.flush(s.ctx)
	if err := w.fade(s.ctx); err != nil {
		s.t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.seen) + len(w.unread); n != 0 {
		s.t.Fatalf("%d observations and sessions are left", n)
	}
}

// written returns the observations in the event log, in their order.
func (s *site) written() []*nodev1.Observation {
	s.t.Helper()
	rows, err := s.pool.Query(s.ctx,
		`SELECT body, body_type, workspace_id FROM `+testkit.EventRows+` WHERE kind = 'workload.observed' ORDER BY seq`)
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*nodev1.Observation, error) {
		var r events.Record
		o := &nodev1.Observation{}
		if err := row.Scan(&r.Body, &r.BodyType, &r.WorkspaceID); err != nil {
			return nil, err
		}
		return o, r.Decode(o)
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// rows returns, as text, every version of every row that the writer keeps of observations.
func (s *site) rows() string {
	s.t.Helper()
	var out string
	err := s.pool.QueryRow(s.ctx, `SELECT coalesce((SELECT string_agg(o.ctid || '/' || o.xmin, ' ' ORDER BY o.ctid)
		FROM nodeapi.observation o), '') || ' and ' ||
		coalesce((SELECT string_agg(r.ctid || '/' || r.xmin, ' ' ORDER BY r.ctid) FROM nodeapi.observer r), '')`).Scan(&out)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// Agents with workspaces at rest cost no writes: the observations that they repeat each minute are neither events nor
// rows.
func TestObservationsAtRestAreNotWritten(t *testing.T) {
	s := newSite(t)
	const agents, workspaces, minutes = 20, 50, 30
	w, all := s.replica(), lights(agents, workspaces)
	for _, a := range all {
		a.admitted(w)
		a.report(w, 0)
	}
	s.write(w)
	if n := len(s.written()); n != agents*workspaces {
		t.Fatalf("%d observations were written at first, want %d", n, agents*workspaces)
	}
	before := s.rows()
	for minute := range minutes {
		s.now = s.now.Add(time.Minute)
		for _, a := range all {
			a.report(w, time.Duration(minute+1)*time.Minute)
		}
		s.write(w)
	}
	if n := len(s.written()); n != agents*workspaces {
		t.Errorf("%d observations were written in %d minutes at rest, want none", n-agents*workspaces, minutes)
	}
	if after := s.rows(); after != before {
		t.Error("rows were written at rest")
	}
}

// A session that moves reports everything to another replica: only differences are written, and observations that the
// earlier replica has not written yet are dropped.
func TestAMovedSessionWritesDifferencesAlone(t *testing.T) {
	s := newSite(t)
	from, to, a := s.replica(), s.replica(), lights(1, 50)[0]
	a.admitted(from)
	a.report(from, 0)
	s.write(from)
	late := a.seen(a.workspaces[7], 0)
	late.Workloads[0].Phase = nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	from.Observed(a.id, a.instance, 1, late) // and is not written before the session moves
	a.generation = 2
	a.admitted(to)
	a.report(to, time.Minute)
	changed := a.seen(a.workspaces[3], time.Minute)
	changed.Epoch = 2
	to.Observed(a.id, a.instance, 2, changed)
	s.write(to)
	s.write(from)
	list := s.written()
	if len(list) != 51 || list[50].GetWorkspaceId() != a.workspaces[3] || list[50].GetEpoch() != 2 {
		t.Fatalf("%d observations were written, the last one %v", len(list), list[len(list)-1])
	}
	// The session is back at the first replica, which still has the digests that it wrote. The rows decide.
	a.generation = 3
	a.admitted(from)
	a.report(from, 2*time.Minute)
	s.write(from)
	if list = s.written(); len(list) != 52 || list[51].GetWorkspaceId() != a.workspaces[3] || list[51].GetEpoch() != 1 {
		t.Fatalf("%d observations were written, the last one %v", len(list), list[len(list)-1])
	}
}

// An observation that a session does not repeat is reported as stale once, also if only an earlier session reported it.
// If it is repeated again it is written.
func TestWhatIsNotRepeatedIsStale(t *testing.T) {
	s := newSite(t)
	w, a := s.replica(), lights(1, 3)[0]
	a.admitted(w)
	a.report(w, 0)
	s.write(w)
	forgotten := a.workspaces[0]
	a.generation, a.workspaces = 2, a.workspaces[1:] // the agent was restarted and has no record of the first workspace
	a.admitted(w)
	s.write(w)
	from := s.now
	for range 6 {
		a.report(w, 0)
		s.write(w)
		s.now = s.now.Add(time.Minute)
	}
	list := s.written()
	if len(list) != 4 {
		t.Fatalf("%d observations were written, want the three and one that is stale", len(list))
	}
	stale := list[3]
	if stale.GetWorkspaceId() != forgotten || stale.GetStaleSince() == nil || len(stale.GetWorkloads()) != 1 {
		t.Fatalf("stale: %v", stale)
	}
	if age := time.Since(stale.GetStaleSince().AsTime()); age < staleAfter || age > staleAfter+s.now.Sub(from) {
		t.Errorf("stale for %s", age)
	}
	w.Observed(a.id, a.instance, 2, a.seen(forgotten, 0))
	s.write(w)
	if list = s.written(); len(list) != 5 || list[4].GetStaleSince() != nil {
		t.Fatalf("%d observations were written after it came back", len(list))
	}
	// A session that has ended is not followed.
	w.Session(&nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: a.id, Generation: 2,
		State: commonv1.SessionState_SESSION_STATE_CLOSED, Version: 2,
	}, "")
	s.now = s.now.Add(time.Hour)
	s.write(w)
	if n := len(s.written()); n != 5 {
		t.Fatalf("%d observations were written, want 5", n)
	}
}

// A workspace that is gone is written once and leaves no row.
func TestWhatIsGoneLeavesNoRow(t *testing.T) {
	s := newSite(t)
	w, a := s.replica(), lights(1, 2)[0]
	a.admitted(w)
	a.report(w, 0)
	s.write(w)
	w.Observed(a.id, a.instance, 1, &nodev1.Observation{WorkspaceId: a.workspaces[0]})
	s.write(w)
	list := s.written()
	if len(list) != 3 || len(list[2].GetWorkloads()) != 0 || list[2].GetStaleSince() != nil {
		t.Fatalf("%v", list)
	}
	var kept []string
	rows, err := s.pool.Query(s.ctx, `SELECT workspace_id::text FROM nodeapi.observation`)
	if err != nil {
		t.Fatal(err)
	}
	if kept, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !slices.Equal(kept, a.workspaces[1:]) {
		t.Errorf("kept are %v: %v", kept, err)
	}
}

// A node whose last session began longer ago than its term leaves no row; one with a newer session keeps its own.
func TestObservationsOfAGoneNodeAreForgotten(t *testing.T) {
	s := newSite(t)
	w, both := s.replica(), lights(2, 2)
	for _, a := range both {
		a.admitted(w)
		a.report(w, 0)
	}
	s.write(w)
	kept := func() (observers, observations int) {
		err := s.pool.QueryRow(s.ctx, `SELECT (SELECT count(*) FROM nodeapi.observer), (SELECT count(*)
			FROM nodeapi.observation)`).
			Scan(&observers, &observations)
		if err != nil {
			t.Fatal(err)
		}
		return observers, observations
	}
	for _, step := range []struct {
		after                   time.Duration
		observers, observations int
	}{
		{after: 72 * time.Hour, observers: 2, observations: 4}, // as services have it by default
		{after: time.Hour, observers: 1, observations: 2},
	} {
		if _, err := s.pool.Exec(s.ctx,
			`UPDATE nodeapi.observer SET since = mesh.clock() - interval '61 minutes' WHERE node_id = $1`,
			both[0].id); err != nil {
			t.Fatal(err)
		}
		s.now = s.now.Add(time.Hour)
		w.forgetAfter = step.after
		if err := w.prune(s.ctx); err != nil {
			t.Fatal(err)
		}
		if observers, observations := kept(); observers != step.observers || observations != step.observations {
			t.Errorf("after %s %d nodes with %d observations are kept, want %d with %d", step.after, observers, observations,
				step.observers, step.observations)
		}
	}
}

// Scenario: many machines were given up at once, one of them with more workspaces than a batch has. One call deletes
// one batch, and the calls that follow go on, without an hour between them, until all is forgotten.
func TestManyGoneNodesAreForgottenInBatches(t *testing.T) {
	s := newSite(t)
	w := s.replica()
	const nodes, each, many, live = 150, 8, 2500, 30
	fill := func(sql string, args ...any) {
		t.Helper()
		if _, err := s.pool.Exec(s.ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	observe := func(nodes, each int, age time.Duration) {
		t.Helper()
		fill(`WITH r AS (
				INSERT INTO nodeapi.observer (node_id, generation, since)
				SELECT gen_random_uuid(), 1, mesh.clock() - $3::interval FROM generate_series(1, $1::int) RETURNING node_id)
			INSERT INTO nodeapi.observation (node_id, workspace_id, digest, body, written_at)
			SELECT r.node_id, gen_random_uuid(), '', '', mesh.clock() FROM r, generate_series(1, $2::int)`, nodes, each, age)
	}
	observe(1, many, 75*time.Hour) // the oldest
	observe(nodes, each, 74*time.Hour)
	observe(live, each, time.Hour)
	kept := func() (observers, observations int) {
		t.Helper()
		err := s.pool.QueryRow(s.ctx, `SELECT (SELECT count(*) FROM nodeapi.observer), (SELECT count(*)
			FROM nodeapi.observation)`).Scan(&observers, &observations)
		if err != nil {
			t.Fatal(err)
		}
		return observers, observations
	}
	observers, observations := kept()
	calls := 0
	for ; calls < 20 && w.pruned.IsZero(); calls++ {
		if err := w.prune(s.ctx); err != nil {
			t.Fatal(err)
		}
		nowObservers, nowObservations := kept()
		if gone := observers - nowObservers; gone > nodesPruned {
			t.Errorf("one call deleted %d nodes, want at most %d", gone, nodesPruned)
		}
		if gone := observations - nowObservations; gone > observationsPruned {
			t.Errorf("one call deleted %d observations, want at most %d", gone, observationsPruned)
		}
		observers, observations = nowObservers, nowObservations
	}
	if observers != live || observations != live*each {
		t.Errorf("after %d calls %d nodes with %d observations are kept, want %d with %d", calls, observers, observations,
			live, live*each)
	}
	observe(1, 1, 74*time.Hour)
	if err := w.prune(s.ctx); err != nil {
		t.Fatal(err)
	}
	if observers, _ := kept(); observers != live+1 {
		t.Errorf("%d nodes are kept before the next prune is due, want %d", observers, live+1)
	}
}
