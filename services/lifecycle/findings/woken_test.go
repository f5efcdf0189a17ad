package findings

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// refused reports a refusal, as recovery does, and applies it.
func (b *bed) refused(role string, r *recoveryv1.InstanceRefused) {
	b.t.Helper()
	err := pgx.BeginFunc(b.t.Context(), b.db.Pool(role), func(tx pgx.Tx) error {
		if err := tx.QueryRow(b.t.Context(), `SELECT mesh.clock()`).Scan(new(time.Time)); err != nil {
			return err
		}
		_, err := events.Append(b.t.Context(), tx, events.Event{
			Kind: "instance.refused", AggregateType: "woken_instance", AggregateID: r.GetInstanceId(),
			AggregateVersion: r.GetVersion(), Payload: r,
		})
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.numbered()
	consumer, err := events.NewConsumer(events.ConsumerDeps{
		Pool:   b.db.Pool(pg.RoleLifecycle),
		Logger: testkit.Logger(b.t),
	}, detect.WokenConsumer())
	if err != nil {
		b.t.Fatal(err)
	}
	if err := consumer.Drain(b.t.Context(), detect.ApplyWoken); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) sweepWoken() {
	b.t.Helper()
	if _, err := b.sweeper.SweepWoken(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// TestAWokenInstanceIsAFinding checks that each woken instance has one finding, at once, however often it requests a
// session, and that it ends an hour after the last refusal.
func TestAWokenInstanceIsAFinding(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.sweepWoken()
	wantOnly(t, b.open())
	now := func() *timestamppb.Timestamp {
		var at time.Time
		if err := b.db.OwnerPool().QueryRow(t.Context(), `SELECT mesh.clock()`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return timestamppb.New(at)
	}
	report := &recoveryv1.InstanceRefused{
		InstanceId: ids.New(), WorkspaceId: id, Epoch: 1, NodeId: ids.New(), Reason: commonv1.Reason_REASON_EPOCH_SUPERSEDED,
		RemoteAddress: "192.0.2.7:1", RefusedAt: now(), Version: 1,
	}
	b.refused(pg.RoleNodeAPI, report) // events of other services than recovery are ignored
	b.sweepWoken()
	wantOnly(t, b.open())
	b.refused(pg.RoleRecovery, report)
	b.sweepWoken()
	subject := "ended_instance_woke instance " + id + ":1"
	f := wantOnly(t, b.open(), subject)[0]
	if f.Severity != finding.P0 || f.After["reason"] != "epoch_superseded" || f.After["remote_address"] != "192.0.2.7:1" ||
		f.WorkspaceID != id {
		t.Errorf("found %+v", f)
	}
	b.pass(50 * time.Minute)
	report.Version, report.RefusedAt = 2, now()
	b.refused(pg.RoleRecovery, report)
	b.sweepWoken()
	b.pass(50 * time.Minute)
	b.sweepWoken()
	if again := wantOnly(t, b.open(), subject)[0]; again.ID != f.ID {
		t.Error("the same instance is a second finding")
	}
	b.sweep() // its sweep ends nothing of another's
	wantOnly(t, b.open(), subject)
	b.pass(11 * time.Minute)
	b.sweepWoken()
	wantOnly(t, b.open())
	b.pass(8 * 24 * time.Hour)
	report.InstanceId, report.Version, report.RefusedAt = ids.New(), 1, now()
	b.refused(pg.RoleRecovery, report)
	b.sweepWoken()
	if n := b.text(`SELECT count(*)::text FROM lifecycle.woken_instance`); n != "1" {
		t.Errorf("%s refusals are remembered", n)
	}
}

// TestStraysAreAFinding: processes of an ended epoch that the driver found running, and ended, have a finding.
func TestStraysAreAFinding(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.world.mu.Lock()
	b.world.strays, b.world.straysAt = map[instanceOf]int{{id, 7}: 3}, time.Now()
	b.world.mu.Unlock()
	b.sweep()
	f := wantOnly(t, b.open(), "ended_instance_woke instance "+id+":7")[0]
	if f.WorkspaceID != id || f.Severity != finding.P0 {
		t.Errorf("found %+v", f)
	}
	b.pass(61 * time.Minute)
	b.sweep()
	wantOnly(t, b.open())
}
