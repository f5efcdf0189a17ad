package judge

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

const (
	// probeBatch is how many nodes one request names. A replica has one request under way.
	probeBatch = 64
	// probeLease is for how long no other request names a node. After it a request whose answer was lost is repeated, with
	// the same key.
	probeLease = 5 * time.Second
	// idleProbePeriod is the longest time between two rounds while there is no probe. Rounds of Run wake those of Probe
	// when one is due.
	idleProbePeriod = 30 * time.Second
	// probeEvery is how often lifecycle is asked for the state of a probe that has not ended.
	probeEvery = 500 * time.Millisecond
	// probeAgain and probeAgainMost bound the wait before the next probe after one that did not succeed; it doubles.
	probeAgain     = 5 * time.Second
	probeAgainMost = 5 * time.Minute
	// probeTimeout bounds one request.
	probeTimeout = 4 * time.Second
)

// takeProbes takes nodes that are to be probed for probeLease. A node that is not served any more is taken out.
var takeProbes = pg.Define(pg.RoleRecovery, "drift.take_probes", `
	WITH due AS (
		SELECT j.node_id FROM recovery.judgement j WHERE j.probe_due <= mesh.clock()
		ORDER BY j.probe_due, j.node_id LIMIT $1 FOR UPDATE SKIP LOCKED
	)
	UPDATE recovery.judgement j SET probe_due = CASE
		WHEN j.probe_wanted AND j.identity_state = 'active' AND j.replica_id IS NOT NULL
		THEN mesh.clock() + $2::interval END
	FROM due d WHERE j.node_id = d.node_id
	RETURNING j.node_id::text AS node_id, j.generation, j.probe_attempt AS attempt, j.probe_due IS NOT NULL AS ask`)

// probed is a node for which lifecycle is asked.
type probed struct {
	NodeID      string `db:"node_id"`
	Generation  int64  `db:"generation"`
	Attempt     int32  `db:"attempt"`
	Ask         bool   `db:"ask"`
	correlation string
	after       int64 // the version of the verdict with which the last reason ended
}

// key is the same for one attempt after one reason in one session, whichever replica asks and however often. After
// another reason of the same session lifecycle must not answer with the task of the one before.
func (p probed) key() string {
	return strconv.FormatInt(p.Generation, 10) + "/" + strconv.FormatInt(p.after, 10) + "/" + strconv.Itoa(int(p.Attempt))
}

// Probe asks lifecycle for the probes of nodes of which a reason has ended, until ctx ends.
func (j *Judge) Probe(ctx context.Context) error {
	if j.deps.Probes == nil {
		<-ctx.Done()
		return nil
	}
	return app.EveryPaced(ctx, j.deps.Logger, "drift-probes", func() func(context.Context) bool {
		due := j.probes.C()
		return func(ctx context.Context) bool {
			timer := time.NewTimer(j.reprobe)
			defer timer.Stop()
			select {
			case <-ctx.Done():
				return false
			case <-due:
			case <-timer.C:
			}
			return true
		}
	}, j.probeRound)
}

// probeRound asks lifecycle for the probes of all nodes that are due, and sets the time of the next round.
func (j *Judge) probeRound(ctx context.Context) error {
	j.reprobe = probeLease // also if the round fails
	rest := true
	for {
		asked, open, err := j.ProbeOnce(ctx)
		if err != nil {
			return err
		}
		rest = rest && asked == 0
		if open > 0 {
			j.reprobe = probeEvery
		}
		if asked < probeBatch {
			if rest {
				j.reprobe = idleProbePeriod
			}
			return nil
		}
	}
}

// ProbeOnce asks lifecycle for the probes of at most one batch of nodes, and keeps what became of them. It returns for
// how many nodes it asked, and how many of their probes have not ended.
func (j *Judge) ProbeOnce(ctx context.Context) (int, int, error) {
	list, err := j.takeProbes(ctx)
	if err != nil || len(list) == 0 {
		return 0, 0, err
	}
	req := &lifecyclev1.ProbeNodesRequest{}
	byID := make(map[string]probed, len(list))
	for _, p := range list {
		byID[p.NodeID] = p
		req.Nodes = append(req.Nodes, &lifecyclev1.NodeProbe{
			NodeId: p.NodeID, IdempotencyKey: p.key(), CorrelationId: p.correlation,
		})
	}
	call, cancel := context.WithTimeout(obs.With(ctx, obs.Correlation{CorrelationID: list[0].correlation}), probeTimeout)
	answer, err := j.deps.Probes.ProbeNodes(call, req)
	cancel()
	if err != nil {
		return len(list), 0, fmt.Errorf("ask lifecycle for probes: %w", err)
	}
	open, err := j.keepProbes(ctx, byID, answer)
	return len(list), open, err
}

func (j *Judge) takeProbes(ctx context.Context) ([]probed, error) {
	var list []probed
	err := pg.InTx(ctx, j.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		list = nil
		taken, err := pg.All[probed](ctx, tx, takeProbes, probeBatch, probeLease)
		if err != nil || len(taken) == 0 {
			return err
		}
		ids := make([]string, 0, len(taken))
		for _, p := range taken {
			ids = append(ids, p.NodeID)
		}
		present, err := readVerdicts(ctx, tx, ids)
		if err != nil {
			return err
		}
		for _, p := range taken {
			if !p.Ask {
				continue
			}
			if v := present[p.NodeID]; v != nil {
				p.correlation, p.after = v.body.GetCorrelationId(), v.began
			}
			list = append(list, p)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("take nodes to probe: %w", err)
	}
	return list, nil
}

// keepProbes keeps lifecycle's answers about nodes that are still as they were when it was asked.
func (j *Judge) keepProbes(ctx context.Context, asked map[string]probed, answer *lifecyclev1.ProbeNodesResponse,
) (int, error) {
	var open int
	judged := false
	err := pg.InTx(ctx, j.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		open, judged = 0, false
		nodes := make(map[string]*collect.Node, len(asked))
		for id := range asked {
			nodes[id] = &collect.Node{}
		}
		if err := collect.Lock(ctx, tx, nodes); err != nil {
			return err
		}
		present, err := readVerdicts(ctx, tx, collect.IDsOf(nodes))
		if err != nil {
			return err
		}
		now, err := pg.Value[time.Time](ctx, tx, collect.ReadClock)
		if err != nil {
			return err
		}
		for _, a := range answer.GetNodes() {
			n, p := nodes[a.GetNodeId()], asked[a.GetNodeId()]
			if n == nil || !n.Wanted || n.ProbeDue == nil || n.Generation != p.Generation || n.ProbeAttempt != p.Attempt {
				continue
			}
			var reasonEnded time.Time
			if v := present[a.GetNodeId()]; v != nil {
				if v.began != p.after {
					continue
				}
				reasonEnded = v.body.GetDetectedAt().AsTime()
			}
			if answered(n, a, reasonEnded, answer.GetCheckedAt().AsTime(), now) {
				open++
			}
			if ask.Ended(a.GetTask().GetState()) && n.ProbeAttempt > p.Attempt && reasonEnded.IsZero() {
				n.Wanted, n.ProbeDue = false, nil // nothing was ever wrong: its next session brings the next one
			}
			judged = judged || n.Due
		}
		return collect.Save(ctx, tx, nodes)
	})
	if err != nil {
		return 0, fmt.Errorf("keep probes: %w", err)
	}
	if judged {
		j.news.Notify()
	}
	return open, nil
}

// answered keeps what became of the probe of a node whose last reason ended at the given time, and reports whether the
// probe has not ended.
func answered(n *collect.Node, a *lifecyclev1.NodeProbed, reasonEnded, checked, now time.Time) bool {
	in := func(d time.Duration) *time.Time { at := now.Add(d); return &at }
	t := a.GetTask()
	switch {
	case t == nil:
		probeFailed(n, "lifecycle refused the no-op: "+names.Of(a.GetRefused()), now)
		return false
	case ask.Ended(t.GetState()) && t.GetStateAt().AsTime().Before(reasonEnded):
		probeFailed(n, "the last no-op ended before the reason did", now)
		return false
	case t.GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED && t.GetSessionEpoch() == n.Generation:
		at := t.GetStateAt().AsTime()
		n.ProbeInstance, n.ProbeGeneration, n.ProbedAt, n.Due = n.InstanceID, n.Generation, &at, true
		if a.GetExpiredCurrent() > 0 {
			n.ProbeNote = fmt.Sprintf("%d of its tasks are past their time and not ended, the first since %s",
				a.GetExpiredCurrent(), a.GetOldestExpiredAt().AsTime().UTC().Format(time.RFC3339))
			n.ProbeDue = in(probeAgain)
			return false
		}
		n.TasksAt, n.ProbeDue, n.ProbeNote = &checked, nil, ""
		return false
	case ask.Ended(t.GetState()):
		probeFailed(n, "the last no-op is "+names.Of(t.GetState()), now)
		return false
	}
	n.ProbeDue = in(probeEvery)
	return true
}

// probeFailed has the next attempt made after a wait that doubles with each.
func probeFailed(n *collect.Node, note string, now time.Time) {
	at := now.Add(min(probeAgain<<min(n.ProbeAttempt, 10), probeAgainMost))
	n.ProbeAttempt, n.ProbeNote, n.ProbeDue = n.ProbeAttempt+1, note, &at
}
