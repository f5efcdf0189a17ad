package gate_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

const (
	runtimeDrift = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	byVerdict    = "verdict:host_runtime_drift"
)

// applyVerdict applies a verdict on a node as its event does: what it is for, the reason that it ends, and whether it
// has evidence of a runtime that differs.
func (k *kit) applyVerdict(node string, version int64, reason, ended commonv1.DriftReason, differs bool) {
	k.t.Helper()
	k.applied(k.verdict(node, version, reason, ended, differs))
}

// applied applies verdicts as one batch.
func (k *kit) applied(records ...events.Record) {
	k.t.Helper()
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return k.cordons().OnVerdicts(ctx, tx, records) })
}

// verdict returns the event that applyVerdict applies.
func (k *kit) verdict(node string, version int64, reason, ended commonv1.DriftReason, differs bool) events.Record {
	k.t.Helper()
	v := &recoveryv1.NodeVerdict{NodeId: node, Reason: reason, Version: version}
	if differs {
		v.Evidence = []*recoveryv1.Evidence{{NodeId: node, Reason: runtimeDrift, Detail: "kernel is 2, accepted is 1"}}
	}
	if ended != 0 {
		v.Ended = &recoveryv1.VerdictPeriod{NodeId: node, Reason: ended}
	}
	body, err := proto.Marshal(v)
	if err != nil {
		k.t.Fatal(err)
	}
	return events.Record{
		Kind: "verdict.changed", Source: pg.RoleRecovery, AggregateType: "verdict", AggregateID: node,
		AggregateVersion: version, Body: body, BodyType: string(v.ProtoReflect().Descriptor().FullName()),
	}
}

func (k *kit) wantCordon(node, by string) {
	k.t.Helper()
	if g := k.get(node); g.CordonedBy != by || g.Cordoned != (by != "") || by == byVerdict &&
		g.CordonReason != "the host is not as it was accepted: kernel is 2, accepted is 1" {
		k.t.Errorf("cordoned %t by %q for %q, want by %q", g.Cordoned, g.CordonedBy, g.CordonReason, by)
	}
}

func (k *kit) personCordons(node string, cordoned bool) {
	k.t.Helper()
	if _, err := k.server.SetCordon(k.ctx, &lifecyclev1.SetCordonRequest{
		NodeId: node, Cordoned: cordoned, Reason: "maintenance",
	}); err != nil {
		k.t.Fatal(err)
	}
}

// TestAParkedVerdictThatIsReplayedCordonsNothing: a newer one was read meanwhile, which names the drift no more.
func TestAParkedVerdictThatIsReplayedCordonsNothing(t *testing.T) {
	k := newKit(t)
	node := k.node()
	_, err := k.db.Pool(pg.RoleLifecycle).Exec(k.ctx, `INSERT INTO lifecycle.parked_event
		(consumer, pos, event_id, kind, error, attempts) VALUES ($1, 1, gen_random_uuid(), 'verdict.changed', 'broken', 1)`,
		gate.VerdictConsumer().Name)
	if err != nil {
		t.Fatal(err)
	}
	k.applyVerdict(node, 5, 0, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, false)
	k.applyVerdict(node, 4, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, 0, true)
	k.wantCordon(node, "")
	k.applyVerdict(node, 6, runtimeDrift, 0, true)
	k.wantCordon(node, byVerdict)
}

func TestAVerdictCordonsForAsLongAsItStands(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.applyVerdict(node, 1, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, 0, false)
	k.wantCordon(node, "")
	k.applyVerdict(node, 2, runtimeDrift, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, true)
	k.wantCordon(node, byVerdict)
	events := len(k.versions(node))
	k.applyVerdict(node, 2, runtimeDrift, 0, true) // announced again
	if got := len(k.versions(node)); got != events {
		t.Errorf("%d events of the gate for a repeated verdict", got-events)
	}
	k.applyVerdict(node, 3, commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, runtimeDrift, true)
	k.wantCordon(node, byVerdict)
	k.applyVerdict(node, 4, 0, commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, false)
	k.wantCordon(node, "")
	k.applyVerdict(ids.New(), 1, runtimeDrift, 0, true) // of a node without a gate
}

// TestALateVerdictUndoesNoNewerOne: verdicts are read again after a replay, and one that was set aside is read late.
func TestALateVerdictUndoesNoNewerOne(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.applyVerdict(node, 3, 0, runtimeDrift, false)
	k.applyVerdict(node, 2, runtimeDrift, 0, true)
	k.wantCordon(node, "")
	k.applyVerdict(node, 4, runtimeDrift, 0, true)
	k.applyVerdict(node, 3, 0, runtimeDrift, false)
	k.applyVerdict(node, 2, runtimeDrift, 0, true)
	k.wantCordon(node, byVerdict)
	k.applyVerdict(node, 6, commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, 0, false)
	k.applyVerdict(node, 5, runtimeDrift, 0, true)
	k.wantCordon(node, "")
	other := k.node()
	k.applied(k.verdict(other, 1, commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, 0, false),
		k.verdict(other, 3, 0, runtimeDrift, false))
	k.applyVerdict(other, 2, runtimeDrift, 0, true)
	k.wantCordon(other, "")
}

// TestACordonOfAPersonStays: the verdict ends only what it began, and takes over what a person leaves.
func TestACordonOfAPersonStays(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.personCordons(node, true)
	k.applyVerdict(node, 1, runtimeDrift, 0, true)
	k.wantCordon(node, "ann")
	k.applyVerdict(node, 2, 0, runtimeDrift, false)
	k.wantCordon(node, "ann")
	k.applyVerdict(node, 3, runtimeDrift, 0, true)
	k.personCordons(node, false)
	k.wantCordon(node, byVerdict)
	k.personCordons(node, true)
	k.applyVerdict(node, 4, 0, runtimeDrift, false)
	k.wantCordon(node, "ann")
	k.personCordons(node, false)
	k.wantCordon(node, "")
}

// TestTheCordonOfAVerdictPassesOn: a finding that cordons the node keeps it so after the verdict has ended.
func TestTheCordonOfAVerdictPassesOn(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		return gate.CordonFor(ctx, tx, node, "occupied", "finding:one")
	})
	k.applyVerdict(node, 1, runtimeDrift, 0, true)
	k.wantCordon(node, "finding:one")
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.EndCordonOf(ctx, tx, node, "finding:one") })
	k.wantCordon(node, byVerdict)
	k.applyVerdict(node, 2, 0, runtimeDrift, false)
	k.wantCordon(node, "")
}

// TestAPersonEndsTheCordonOfAVerdict checks that newer verdicts for the reason that stood then do not cordon the node
// again.
func TestAPersonEndsTheCordonOfAVerdict(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.applyVerdict(node, 1, runtimeDrift, 0, true)
	k.personCordons(node, false)
	k.applyVerdict(node, 2, commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, runtimeDrift, true)
	k.applyVerdict(node, 3, runtimeDrift, 0, true)
	k.wantCordon(node, "")
	k.applyVerdict(node, 4, runtimeDrift, 0, false) // in other words
	if g := k.get(node); g.CordonedBy != byVerdict {
		t.Errorf("for another reason it is cordoned by %q", g.CordonedBy)
	}
	k.personCordons(node, false)
	k.applyVerdict(node, 5, 0, runtimeDrift, false)
	k.applyVerdict(node, 6, runtimeDrift, 0, true)
	k.wantCordon(node, byVerdict)
	// It ends and begins again within one batch.
	k.personCordons(node, false)
	k.applied(k.verdict(node, 8, runtimeDrift, 0, true), k.verdict(node, 7, 0, runtimeDrift, false))
	k.wantCordon(node, byVerdict)
	k.personCordons(node, false)
	k.applied(k.verdict(node, 9, runtimeDrift, 0, true), k.verdict(node, 10, runtimeDrift, 0, true))
	k.wantCordon(node, "")
}

// TestABatchOfVerdictsLocksGatesByTheirIDs: a transaction that locks the gate of the lesser id, and then the other,
// waits for no batch that waits for it.
func TestABatchOfVerdictsLocksGatesByTheirIDs(t *testing.T) {
	k := newKit(t)
	nodes := []string{k.node(), k.node()}
	slices.Sort(nodes)
	batch := []events.Record{
		k.verdict(nodes[1], 1, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, 0, false),
		k.verdict(nodes[1], 2, runtimeDrift, 0, true), k.verdict(nodes[0], 1, runtimeDrift, 0, true),
	}
	done := make(chan error, 1)
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		if err := gate.CordonFor(ctx, tx, nodes[0], "occupied", "finding:one"); err != nil {
			return err
		}
		go func() {
			done <- pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
				return k.cordons().OnVerdicts(ctx, tx, batch)
			})
		}()
		testkit.Eventually(t, testkit.Patience, func() error {
			var waits int
			err := k.pool.QueryRow(k.ctx, `SELECT count(*) FROM pg_stat_activity
				WHERE wait_event_type = 'Lock' AND datname = current_database()`).Scan(&waits)
			if err == nil && waits == 0 {
				err = errors.New("the batch does not wait yet")
			}
			return err
		})
		return gate.CordonFor(ctx, tx, nodes[1], "occupied", "finding:two")
	})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	k.wantCordon(nodes[0], "finding:one")
	k.wantCordon(nodes[1], "finding:two")
}

// TestTheCordonOfAVerdictHasItsCorrelation checks that what a verdict has caused is found by the verdict's correlation
// id.
func TestTheCordonOfAVerdictHasItsCorrelation(t *testing.T) {
	k := newKit(t)
	node := k.node()
	r := k.verdict(node, 1, runtimeDrift, 0, true)
	r.CorrelationID = ids.New()
	k.applied(r)
	var found int
	if err := k.pool.QueryRow(k.ctx, `SELECT count(*) FROM events.event
		WHERE COALESCE(correlation_uuid::text, correlation_id) = $1
			AND kind IN ('gate.changed', 'audit.recorded')`, r.CorrelationID).Scan(&found); err != nil {
		t.Fatal(err)
	}
	if found != 2 {
		t.Errorf("%d events have the correlation of the verdict", found)
	}
}
