package project_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// instances appends live instances, and the newest of them once more, because the newest event is never cut.
func instances(l *projecttest.Log, n int) []*lifecyclev1.Instance {
	list := make([]*lifecyclev1.Instance, n)
	for i := range list {
		list[i] = &lifecyclev1.Instance{
			InstanceId: ids.New(), WorkspaceId: ids.New(), State: commonv1.InstanceState_INSTANCE_STATE_LIVE, Epoch: 1,
		}
		l.AppendVersion(list[i], 1)
	}
	l.Number()
	l.AppendVersion(list[n-1], 2)
	l.Number()
	return list
}

// TestTheFirstCutDuringARebuildIsNotMissed: a cut that was under way when a rebuild of the whole log began deletes
// events that the rebuild does not read. Then the rebuild replaces nothing, and the next one asks the owners.
func TestTheFirstCutDuringARebuildIsNotMissed(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	list := instances(l, 3)
	must(t, p.Drain(ctx))
	want := snapshot(t, l)
	// The term of every event has ended as soon as it is written.
	_, err := l.DB.Pool(pg.RoleRecovery).Exec(ctx,
		`INSERT INTO mesh.policy (key, value, updated_by) VALUES ('retention.events_seconds', '0', 'test')`)
	must(t, err)
	// The lock of rebuilds keeps the rebuild between its question whether history was cut and its reading of the log.
	apart, err := l.DB.OwnerPool().Begin(ctx)
	must(t, err)
	defer apart.Rollback(context.WithoutCancel(ctx)) // it has ended, or the test has failed
	_, err = apart.Exec(ctx, `SELECT pg_advisory_xact_lock(x'72656275'::bigint)`)
	must(t, err)
	cut, err := l.DB.Pool(pg.RoleReadmodel).Begin(ctx)
	must(t, err)
	defer cut.Rollback(context.WithoutCancel(ctx)) // it has ended, or the test has failed
	for again := true; again; {
		must(t, cut.QueryRow(ctx, `SELECT x.next IS NOT NULL
			FROM events.cut_events('0', '00000000-0000-0000-0000-000000000000', 100000) x`).Scan(&again))
	}
	type outcome struct {
		report project.Report
		err    error
	}
	rebuilt := make(chan outcome, 1)
	go func() {
		report, err := p.Rebuild(ctx)
		rebuilt <- outcome{report, err}
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := text(t, l, `SELECT count(*)::text FROM pg_locks
			WHERE locktype = 'advisory' AND NOT granted AND objid = x'72656275'::bigint::oid
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); n != "1" {
			return errors.New("the rebuild does not wait yet")
		}
		return nil
	})
	must(t, cut.Commit(ctx))
	must(t, apart.Rollback(ctx))
	got := <-rebuilt
	if fault.ReasonOf(got.err) != commonv1.Reason_REASON_UNAVAILABLE {
		t.Errorf("the rebuild says %v of %+v", got.err, got.report)
	}
	if diff := cmp.Diff(want, snapshot(t, l)); diff != "" {
		t.Errorf("after the rebuild that was given up (-want +got):\n%s", diff)
	}
	owner := &fakeOwner{log: l, projector: p, rows: []version{{list[0], 1}, {list[1], 1}, {list[2], 2}}, midway: func() {}}
	report, err := p.Rebuild(ctx, owner)
	must(t, err)
	if !report.Cut || report.Announced != 3 {
		t.Errorf("the next rebuild reports %+v", report)
	}
	if diff := cmp.Diff(want, snapshot(t, l)); diff != "" {
		t.Errorf("after the next rebuild (-want +got):\n%s", diff)
	}
}

// TestAnAnnouncedRowThatIsSetAsideIsNotTakenForGone: a newer owner announces a live row in a state that this build does
// not know. Only its event is parked, and the rebuild, which would lack the row, replaces nothing until a build that
// knows the state applies it.
func TestAnAnnouncedRowThatIsSetAsideIsNotTakenForGone(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	list := instances(l, 3)
	newer := &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: ids.New(), Name: "w", State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Epoch: 1,
	}
	l.AppendVersion(newer, 1)
	l.AppendVersion(list[0], 2)
	l.Number()
	l.AppendVersion(list[0], 3)
	l.Number()
	must(t, p.Drain(ctx))
	cutEvents(t, l)
	want := snapshot(t, l)
	newer.State = 99
	owner := &fakeOwner{
		log: l, projector: p, rows: []version{{list[0], 3}, {list[1], 1}, {newer, 2}, {list[2], 2}},
		midway: func() {},
	}
	_, err := p.Rebuild(ctx, owner)
	if fault.ReasonOf(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Errorf("the rebuild says %v", err)
	}
	if owner.announced != len(owner.rows) {
		t.Errorf("%d rows were announced: one that is set aside keeps others back", owner.announced)
	}
	if diff := cmp.Diff(want, snapshot(t, l)); diff != "" {
		t.Errorf("after the rebuild that was refused (-want +got):\n%s", diff)
	}
	if n := text(t, l, `SELECT count(*)::text FROM readmodel.parked_event`); n != "1" {
		t.Errorf("%s events are set aside", n)
	}
}
