package gate

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	kindVerdict     = "verdict.changed"
	verdictConsumer = "verdicts"
	// ofRuntime is the name by which a node is cordoned whose host is not as it was accepted.
	ofRuntime = verdictPrefix + "host_runtime_drift"

	verdictPrefix = "verdict:"
)

// VerdictConsumer is the configuration of the consumer that the methods of Cordons are for.
func VerdictConsumer() events.ConsumerConfig {
	return events.ConsumerConfig{Name: verdictConsumer, Schema: pg.RoleLifecycle, Kinds: []string{kindVerdict}}
}

// notedVerdict is what is recorded of the verdicts on a node.
type notedVerdict struct {
	NodeID  string `db:"node_id" expr:"@.node_id::text"`
	Version int64  `db:"version"`
	Reason  string `db:"reason"`
}

var (
	notedVerdicts = pg.Define(pg.RoleLifecycle, "gate.noted_verdicts", `
		SELECT `+pg.Columns[notedVerdict]("v")+` FROM lifecycle.verdict_cordon v WHERE v.node_id = ANY($1::uuid[])`)
	anyParked = pg.Define(pg.RoleLifecycle, "gate.any_parked_verdict", `
		SELECT EXISTS (SELECT FROM lifecycle.parked_event p WHERE p.consumer = $1)`)
	noteVerdict = pg.Define(pg.RoleLifecycle, "gate.note_verdict", `
		INSERT INTO lifecycle.verdict_cordon AS v (node_id, version, reason, since) VALUES ($1, $2, $3, mesh.clock())
		ON CONFLICT (node_id) DO UPDATE SET version = EXCLUDED.version, reason = EXCLUDED.reason,
			withheld = v.withheld AND EXCLUDED.reason <> '',
			since = CASE WHEN v.reason = '' THEN EXCLUDED.since ELSE v.since END
			WHERE v.version < EXCLUDED.version`)
)

// request is what one verdict wants of the cordon of its node.
type request struct {
	version     int64
	reason      string // why the node is to be cordoned; empty: it is not
	correlation string
}

// OnVerdict is OnVerdicts for one event.
func (c Cordons) OnVerdict(ctx context.Context, tx pgx.Tx, r events.Record) error {
	return c.OnVerdicts(ctx, tx, []events.Record{r})
}

// OnVerdicts cordons the nodes whose hosts are not as they were accepted, as recovery has judged, and ends such a
// cordon when the verdict on the node ends. A cordon by others stays, and one that a person has ended is not set
// again for the same reason. Of each node the newest verdict counts, in whichever order they are read. If verdicts
// want to cordon too many nodes at once, new cordons wait (see setCordons).
func (c Cordons) OnVerdicts(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	requests, err := readRequests(ctx, tx, records)
	if err != nil {
		return err
	}
	if len(requests) == 0 {
		_, err := c.setCordons(ctx, tx, nil)
		return err
	}
	// Gates are locked first, as by everyone who changes a cordon, and in one statement by their ids.
	gates, err := all(ctx, tx, lockGates, slices.Collect(maps.Keys(requests)))
	if err != nil {
		return fmt.Errorf("lock gates: %w", err)
	}
	before, err := noted(ctx, tx, slices.Collect(maps.Keys(requests)))
	if err != nil {
		return err
	}
	var wanted []waiting
	var over []string // nodes whose cordon waited, and is not wanted any more
	for _, g := range gates {
		if g.Retired {
			continue
		}
		w, err := grant(ctx, tx, g.NodeID, before[g.NodeID], requests[g.NodeID])
		if err != nil {
			return err
		}
		if w.Reason != "" {
			wanted = append(wanted, w)
		}
		list := requests[g.NodeID]
		if last := list[len(list)-1]; g.WaitingCordon != "" && last.reason == "" && last.version > before[g.NodeID].Version {
			over = append(over, g.NodeID)
		}
	}
	if err := reportWaiting(ctx, tx, hideWaiting, over); err != nil {
		return err
	}
	_, err = c.setCordons(ctx, tx, wanted)
	return err
}

// readRequests returns what verdicts want, oldest first, by node, without nodes of which they have never wanted
// anything.
func readRequests(ctx context.Context, tx pgx.Tx, records []events.Record) (map[string][]request, error) {
	requests, drifted := map[string][]request{}, map[string]bool{}
	for _, r := range records {
		if r.Kind != kindVerdict || r.Source != pg.RoleRecovery {
			continue
		}
		verdict := &recoveryv1.NodeVerdict{}
		if err := r.Decode(verdict); err != nil {
			return nil, err
		}
		node := verdict.GetNodeId()
		if !ids.Valid(node) { // it is about the control plane
			continue
		}
		w := request{version: r.AggregateVersion, reason: runtimeDrift(verdict), correlation: r.CorrelationID}
		if w.reason != "" || verdict.GetEnded().GetReason() == commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT {
			drifted[node] = true
		}
		requests[node] = append(requests[node], w)
	}
	var unsure []string // nodes of which something is to be done only if something is recorded
	for node := range requests {
		if !drifted[node] {
			unsure = append(unsure, node)
		}
	}
	known, err := noted(ctx, tx, unsure)
	if err != nil {
		return nil, err
	}
	// A verdict that was parked is read after newer ones: as long as one is, the newest is recorded of every node.
	missed := len(unsure) > len(known)
	if missed {
		if missed, err = pg.Value[bool](ctx, tx, anyParked, verdictConsumer); err != nil {
			return nil, fmt.Errorf("read whether verdicts are parked: %w", err)
		}
	}
	for _, node := range unsure {
		if _, ok := known[node]; !ok && !missed {
			delete(requests, node)
		}
	}
	for _, list := range requests {
		slices.SortStableFunc(list, func(a, b request) int { return cmp.Compare(a.version, b.version) })
	}
	return requests, nil
}

// noted returns what is recorded of nodes, by node.
func noted(ctx context.Context, tx pgx.Tx, nodes []string) (map[string]notedVerdict, error) {
	out := map[string]notedVerdict{}
	if len(nodes) == 0 {
		return out, nil
	}
	rows, err := pg.All[notedVerdict](ctx, tx, notedVerdicts, nodes)
	if err != nil {
		return nil, fmt.Errorf("read cordons of verdicts: %w", err)
	}
	for _, row := range rows {
		out[row.NodeID] = row
	}
	return out, nil
}

// grant records what verdicts newer than the recorded one want for a node whose gate is locked, and ends its cordon if
// they want none. It returns the cordon that they newly want; without a reason: none.
func grant(ctx context.Context, tx pgx.Tx, node string, was notedVerdict, requests []request) (waiting, error) {
	last, now, cordon := requests[len(requests)-1], was.Reason, false
	if was.NodeID != "" && last.version <= was.Version {
		return waiting{}, nil
	}
	for _, w := range requests {
		if was.NodeID != "" && w.version <= was.Version {
			continue
		}
		cordon = w.reason != "" && (cordon || w.reason != now)
		now = w.reason
	}
	ctx = obs.With(ctx, obs.Correlation{CorrelationID: last.correlation})
	if _, err := pg.Exec(ctx, tx, noteVerdict, node, last.version, last.reason); err != nil {
		return waiting{}, fmt.Errorf("note verdict: %w", err)
	}
	switch {
	case last.reason == "":
		return waiting{}, EndCordonOf(ctx, tx, node, ofRuntime)
	case cordon:
		return waiting{NodeID: node, Reason: last.reason, correlation: last.correlation}, nil
	}
	return waiting{}, nil
}

// runtimeDrift returns why a verdict wants its node cordoned; empty: it does not. A verdict with a worse reason has the
// evidence of the drift beside its own.
func runtimeDrift(verdict *recoveryv1.NodeVerdict) string {
	const drift = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	for _, e := range verdict.GetEvidence() {
		if e.GetReason() == drift {
			return strings.TrimSuffix("the host is not as it was accepted: "+e.GetDetail(), ": ")
		}
	}
	if verdict.GetReason() == drift {
		return "the host is not as it was accepted"
	}
	return ""
}
