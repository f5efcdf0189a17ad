package judge

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
	"github.com/gpuaas/mesh/services/recovery/silence"
)

const (
	// every is the longest time between two rounds, and how often it is noted up to when all is judged.
	every = 5 * time.Second
	// batch is how many nodes of a kind one transaction judges.
	batch = 500
	// spreadAgain is when a replica looks again that has found another one making nodes due.
	spreadAgain = 100 * time.Millisecond
	// unreadAgain is when a node with evidence of a newer build is due again, for a replica of that build.
	unreadAgain = 30 * time.Second
)

// Deps are the dependencies of a Judge; the signals may be nil.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Policy policy.Reader
	// Wake is notified after commits that appended events; Numbered wakes the consumer.
	Wake, Numbered *events.Signal
	// Roots returns the roots of certificates of nodes, to which issuers chain that the ingress knows by a root alone.
	// Nil: they are not known.
	Roots func(ctx context.Context) ([]*x509.Certificate, error)
	// Probes is lifecycle's service; nil: no node is probed.
	Probes lifecyclev1connect.ProbeServiceClient
	// Evidence is what is configured of how events are kept as evidence.
	Evidence collect.Settings
	// OutageAfter is how long after the last beat of any replica of nodeapi its absence is an outage of the control plane;
	// zero: as soon as all replicas count as gone.
	OutageAfter time.Duration
	// Asked is called after the commit of requests for records of hosts (package ask); nil: it is not.
	Asked func()
}

// Judge keeps evidence and concludes verdicts, at one replica. All replicas run one: they take turns at reading events,
// and judge different nodes.
type Judge struct {
	deps     Deps
	consumer *events.Consumer
	news     events.Signal // evidence was committed
	next     time.Duration // until the next round; of Run alone
	trust    issuerTrust

	probes  events.Signal // some node is to be probed
	reprobe time.Duration // until the next round of Probe; of Probe alone

	rechecked time.Time // when the open incidents of equal verdicts were read last; of the goroutine that judges
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps) (*Judge, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Policy == nil {
		return nil, errors.New("drift needs a logger, a pool and the policy")
	}
	j := &Judge{deps: deps}
	var err error
	j.consumer, err = events.NewConsumer(events.ConsumerDeps{
		Pool: deps.Pool, Numbered: deps.Numbered, Wake: deps.Wake, Logger: deps.Logger,
		Committed: func([]events.Record) { j.news.Notify() }, Together: j.together,
	}, events.ConsumerConfig{Name: collect.ConsumerName, Schema: "recovery", Kinds: collect.Kinds(), InOrder: true})
	if err != nil {
		return nil, err
	}
	return j, nil
}

// Consume keeps the evidence in events until ctx ends.
func (j *Judge) Consume(ctx context.Context) error { return j.consumer.Run(ctx, j.apply) }

func (j *Judge) apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	return j.together(ctx, tx, []events.Record{r})
}

func (j *Judge) together(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	return collect.Keep(ctx, tx, records, j.deps.Evidence)
}

// Run judges until ctx ends: at once what evidence came about, and what time brings when it is due.
func (j *Judge) Run(ctx context.Context) error {
	return app.EveryPaced(ctx, j.deps.Logger, "drift", j.pause, func(ctx context.Context) error {
		j.next = time.Second // if the round fails
		for {
			out, err := j.RunOnce(ctx)
			if err != nil {
				return err
			}
			if !out.More {
				j.next = out.Next
				return nil
			}
		}
	})
}

func (j *Judge) pause() func(context.Context) bool {
	news := j.news.C()
	return func(ctx context.Context) bool {
		timer := time.NewTimer(j.next)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return false
		case <-news:
		case <-timer.C:
		}
		return true
	}
}

// Nudge has the judge look for nodes that are due. It is called after the commit of MergeHost.
func (j *Judge) Nudge() { j.news.Notify() }

// Round counts what one round did.
type Round struct {
	Judged  int           // nodes
	Changed int           // verdicts, that on the control plane among them
	More    bool          // there was more to judge than one round takes
	Next    time.Duration // until there is something to do again, as far as that is known

	probe    bool // some node is to be probed
	more     bool // there were more nodes to judge
	asked    bool // records of hosts are asked for
	profiles bool // more nodes are to be judged for their profile
}

// RunOnce makes one round, which is one transaction: it takes nodes that are due, or silent for too long, and writes
// the verdicts that have changed. If there is nothing to judge it writes nothing but, every few seconds, up to when all
// is judged.
func (j *Judge) RunOnce(ctx context.Context) (Round, error) {
	noting, appended := events.Noting(ctx)
	var out Round
	err := pg.InTx(noting, j.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out = Round{}
		return j.round(ctx, tx, &out)
	})
	if err != nil {
		return Round{}, fmt.Errorf("judge nodes: %w", err)
	}
	if appended() {
		j.deps.Wake.Notify()
	}
	if out.probe {
		j.probes.Notify()
	}
	if out.asked && j.deps.Asked != nil {
		j.deps.Asked()
	}
	if !out.profiles {
		return out, nil
	}
	mine, err := collect.SpreadProfiles(ctx, j.deps.Pool)
	if err == nil && !mine {
		out.More, out.Next = out.more, spreadAgain
	}
	return out, err
}

func (j *Judge) round(ctx context.Context, tx pgx.Tx, out *Round) error {
	s, err := readSeen(ctx, tx)
	if err != nil {
		return err
	}
	s.outageAfter = j.deps.OutageAfter
	rule := s.rule(j.deps.Policy.Current().HeartbeatStaleAfter())
	changed, err := judgeEveryNode(ctx, tx, &s, j.deps.Policy.Current())
	if err != nil {
		return err
	}
	if changed {
		out.Changed++
	}
	if s.Probe != nil && !s.Probe.After(s.Now) {
		out.probe = true
	}
	taken := &takenNodes{
		seen: &s, rule: rule, policy: j.deps.Policy.Current(), trust: &j.trust, nodes: map[string]*collect.Node{},
	}
	if err := taken.take(ctx, tx); err != nil {
		return err
	}
	if len(taken.nodes) > 0 {
		if err := taken.judge(ctx, tx, out); err != nil {
			return err
		}
	}
	if err = j.fleetWide(ctx, tx, &s, taken.reasons); err != nil {
		return err
	}
	out.profiles = s.Profiles
	out.Judged, out.more, out.More = len(taken.nodes), taken.more, taken.more || s.Profiles
	out.Next = max(s.nextAt(rule).Sub(s.Now), 20*time.Millisecond)
	if !out.More {
		return noteJudged(ctx, tx, &s)
	}
	return nil
}

var (
	takeDue = pg.Define(pg.RoleRecovery, "drift.take_due", `
		SELECT `+pg.Columns[collect.NodeRow]("j")+` FROM recovery.judgement j WHERE j.due_at <= $2
		ORDER BY j.due_at, j.node_id LIMIT $1 FOR UPDATE SKIP LOCKED`)
	takeSilent = pg.Define(pg.RoleRecovery, "drift.take_silent", `
		SELECT `+pg.Columns[collect.NodeRow]("j")+` FROM recovery.judgement j WHERE j.silent_since <= $2
		ORDER BY j.silent_since, j.node_id LIMIT $1 FOR UPDATE SKIP LOCKED`)
	takeLost = pg.Define(pg.RoleRecovery, "drift.take_lost", `
		SELECT `+pg.Columns[collect.NodeRow]("j")+` FROM recovery.judgement j WHERE j.replica_id = $2
		ORDER BY j.replica_id, j.node_id LIMIT $1 FOR UPDATE SKIP LOCKED`)

	noteThrough = pg.Define(pg.RoleRecovery, "drift.note_through", `
		INSERT INTO mesh.judged AS d (service, through) VALUES ('recovery', $1)
		ON CONFLICT (service) DO UPDATE SET through = EXCLUDED.through, noted = true
			WHERE d.through < EXCLUDED.through OR NOT d.noted`)
)

// noteJudged notes, every few seconds, up to when all is judged; for the first time when the consumer has read the
// whole log.
func noteJudged(ctx context.Context, tx pgx.Tx, s *seen) error {
	if s.first() {
		return nil
	}
	through := s.Now.Add(-s.unread())
	if s.Through != nil && through.Sub(*s.Through) < every*4/5 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, noteThrough, through); err != nil {
		return fmt.Errorf("note what is judged: %w", err)
	}
	return nil
}

// takenNodes is the nodes that one round has taken.
type takenNodes struct {
	seen   *seen
	rule   silence.Rule
	policy policy.Set
	trust  *issuerTrust
	nodes  map[string]*collect.Node
	more   bool

	reasons reasonsOf     // that verdicts began or ended with; nil: none
	actions *actions.Book // the open ones of the nodes
	asks    []ask.Request // for the records of hosts
}

// take locks the nodes that must be judged and that no other replica has locked, and marks those that are silent for
// too long, whichever way they were found.
func (t *takenNodes) take(ctx context.Context, tx pgx.Tx) error {
	if t.seen.Due != nil && !t.seen.Due.After(t.seen.Now) && !t.seen.first() {
		if _, err := t.lock(ctx, tx, takeDue, t.seen.Now); err != nil {
			return err
		}
	}
	if before, ok := heardBefore(t.rule, t.seen.Now); ok && t.seen.Silent != nil && !t.seen.Silent.After(before) {
		if _, err := t.lock(ctx, tx, takeSilent, before); err != nil {
			return err
		}
	}
	for id, beat := range t.seen.gone(t.rule) {
		list, err := t.lock(ctx, tx, takeLost, id)
		if err != nil {
			return err
		}
		for _, n := range list {
			n.Down, n.DownSince, n.Lost = true, beat, true
		}
	}
	if len(t.nodes) == 0 {
		return nil
	}
	for _, n := range t.nodes {
		if n.SilentSince != nil && t.rule.Down(*n.SilentSince, t.seen.Now) {
			n.Down, n.DownSince = true, *n.SilentSince
		}
	}
	if err := collect.LoadEvidence(ctx, tx, t.nodes); err != nil {
		return err
	}
	return collect.NoteProfiles(ctx, tx, t.nodes)
}

func (t *takenNodes) lock(ctx context.Context, tx pgx.Tx, statement *pg.Statement, which any) ([]*collect.Node, error) {
	rows, err := pg.All[collect.NodeRow](ctx, tx, statement, batch, which)
	if err != nil {
		return nil, fmt.Errorf("take nodes to judge: %w", err)
	}
	t.more = t.more || len(rows) == batch
	out := make([]*collect.Node, len(rows))
	for i, r := range rows {
		if t.nodes[r.NodeID] == nil {
			t.nodes[r.NodeID] = &collect.Node{NodeRow: r, Stored: r}
		}
		out[i] = t.nodes[r.NodeID]
	}
	return out, nil
}

// judge concludes the verdicts on the nodes and writes those that have changed.
func (t *takenNodes) judge(ctx context.Context, tx pgx.Tx, out *Round) error {
	present, err := readVerdicts(ctx, tx, collect.IDsOf(t.nodes))
	if err != nil {
		return err
	}
	if err := t.trust.learn(ctx, tx, t.nodes, t.seen.Now); err != nil {
		return err
	}
	if t.actions, err = actions.OpenAt(ctx, tx, t.seen.Now, collect.IDsOf(t.nodes)...); err != nil {
		return err
	}
	var changed []*standing
	for _, id := range collect.IDsOf(t.nodes) {
		n := t.nodes[id]
		if n.Down {
			detail := ""
			if n.Lost {
				detail = "the replica that served it beats no more"
			}
			n.NoteSilent(n.DownSince, detail)
		}
		v := present[id]
		if v == nil {
			v = &standing{nodeID: id}
		}
		list, again := t.evidenceOf(n, v.body.GetReason())
		n.DueAt = again
		verdict := drift.Classify(list, t.seen.Now).Under(t.policy)
		if n.Unread != nil {
			aside.Note(ctx, "drift.evidence", id, n.Unread)
			if at := t.seen.Now.Add(unreadAgain); again == nil || at.Before(*again) {
				n.DueAt = &at
			}
			if !proves(verdict.Reason, v.body.GetReason()) {
				if v.notJudged(t.seen.Now) {
					changed = append(changed, v)
				}
				continue
			}
		}
		was, began := v.body, v.began
		if verdict.Reason != 0 {
			unproven(n)
		}
		h := t.healthOf(n, verdict, list)
		t.act(n, was, &verdict, h, list)
		if v.become(verdict, list, h, t.seen.Now) {
			changed = append(changed, v)
			t.turned(was.GetReason(), verdict.Reason)
			t.askHost(n, was, began, v, h)
		}
		follow(n, was, verdict, h, t.seen.Now)
		out.probe = out.probe || n.ProbeDue != nil && !n.ProbeDue.After(t.seen.Now)
	}
	out.Changed += len(changed)
	if err := collect.Save(ctx, tx, t.nodes); err != nil {
		return err
	}
	if err := saveVerdicts(ctx, tx, changed); err != nil {
		return err
	}
	out.asked = len(t.asks) > 0
	if err := ask.Want(ctx, tx, t.asks); err != nil {
		return err
	}
	return t.actions.Save(ctx, tx)
}

// proves reports whether a reason that was concluded without some of the evidence may take the place of the present
// one: it must be proven by what was read, and be no milder. That no source tells whether the agent is heard is not
// proven by it, and of a present reason of a newer build it is not known how bad it is.
func proves(reason, present commonv1.DriftReason) bool {
	if reason == 0 || reason == commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE {
		return false
	}
	_, known := drift.RowOf(present)
	return present == 0 || known && drift.CompareRank(reason, present) >= 0
}
