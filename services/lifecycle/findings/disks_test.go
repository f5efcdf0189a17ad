package findings

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// machine is an enrolled node with a session.
type machine struct {
	b             *bed
	node, session string
}

func (b *bed) machine() *machine {
	b.t.Helper()
	m := &machine{b: b, node: ids.New()}
	if _, err := b.world.gates.ApplyFence(b.t.Context(),
		&lifecyclev1.ApplyFenceRequest{NodeId: m.node, FenceEpoch: 1, Admitted: true, Name: "m1"}); err != nil {
		b.t.Fatal(err)
	}
	if m.session = b.world.connect(b.t.Context(), &worldInstance{node: m.node, ledger: ids.New()}); m.session == "" {
		b.t.Fatal("the gate was not raised")
	}
	return m
}

// reports applies a session's report of its host's disk.
func (m *machine) reports(session string, full bool) {
	m.b.t.Helper()
	m.b.applies(m.report(session, full))
}

func (m *machine) report(session string, full bool) *nodev1.SessionChanged {
	disk := &commonv1.StateDisk{Full: full, Path: "/var/lib/gpuaas", Since: timestamppb.Now()}
	if full {
		disk.Detail = "12 KiB of 24576 KiB are free"
	}
	return &nodev1.SessionChanged{
		NodeId: m.node, SessionId: session, State: commonv1.SessionState_SESSION_STATE_ADMITTED,
		Host: &commonv1.HostFacts{Hostname: "m1", StateDisk: disk},
	}
}

// applies applies reports that are read together.
func (b *bed) applies(reports ...*nodev1.SessionChanged) {
	b.t.Helper()
	err := pg.InTx(b.t.Context(), b.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		return ApplyHostFacts(ctx, tx, reports)
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

func (m *machine) cordon(on bool) {
	m.b.t.Helper()
	ctx := rpc.WithPerson(m.b.t.Context(), rpc.Person{Subject: "ann", Roles: []string{"operator"}})
	if _, err := m.b.world.gates.SetCordon(ctx,
		&lifecyclev1.SetCordonRequest{NodeId: m.node, Cordoned: on, Reason: "a test"}); err != nil {
		m.b.t.Fatal(err)
	}
}

// wants checks whether the finding is open, and who cordons the node; "finding" means the finding itself.
func (m *machine) wants(what string, open bool, by string) {
	m.b.t.Helper()
	g, _, err := gate.Get(m.b.t.Context(), m.b.db.Pool(pg.RoleLifecycle), m.node)
	if err != nil {
		m.b.t.Fatal(err)
	}
	f, is := m.b.open()["node_disk_full node "+m.node]
	if by == "finding" {
		by = finding.CordonBy(f.ID)
	}
	if is != open || g.CordonedBy != by || g.Cordoned != (by != "") || g.Host.GetStateDisk().GetFull() != open {
		m.b.t.Errorf("%s: the finding is open: %t; cordoned %t by %q: %q; the facts say %v", what, is, g.Cordoned,
			g.CordonedBy, g.CordonReason, g.Host.GetStateDisk())
	}
	if open && (f.Severity != finding.P1 || f.NextAction == "" || f.After["directory"] != "/var/lib/gpuaas") {
		m.b.t.Errorf("%s: it says %+v", what, f.Seen)
	}
}

// TestAFullDiskCordonsItsNodeUntilThereIsRoom checks that the report of an agent opens and ends the finding at once,
// with its own cordon and no other.
func TestAFullDiskCordonsItsNodeUntilThereIsRoom(t *testing.T) {
	b := newBed(t, Config{})
	m := b.machine()
	m.reports(m.session, false)
	m.wants("with room", false, "")
	m.reports(ids.New(), true)
	m.wants("as another session says", false, "")
	m.reports(m.session, true)
	m.wants("full", true, "finding")
	m.reports(m.session, true)
	b.sweep()
	m.wants("full, after a sweep", true, "finding")
	m.reports(m.session, false)
	m.wants("with room again", false, "")
	b.sweep()
	m.wants("with room again, after a sweep", false, "")

	m.cordon(true)
	m.reports(m.session, true)
	m.wants("full, and cordoned by a person before", true, "ann")
	m.reports(m.session, false)
	m.wants("a person's cordon stays", false, "ann")
	m.reports(m.session, true)
	m.cordon(false)
	m.wants("a person's cordon that ends passes to the finding", true, "finding")
	m.reports(m.session, false)
	m.wants("with room at last", false, "")
}

// TestReportsThatAreReadTogether checks that of the reports of one machine the last one counts, and that those of other
// machines and those without facts change nothing of it.
func TestReportsThatAreReadTogether(t *testing.T) {
	b := newBed(t, Config{})
	m, other := b.machine(), b.machine()
	m.reports(m.session, false)
	b.applies(m.report(m.session, true), other.report(other.session, true), m.report(m.session, false),
		m.report(ids.New(), true), &nodev1.SessionChanged{NodeId: other.node, SessionId: other.session})
	m.wants("full for a moment", false, "")
	other.wants("full", true, "finding")
	b.applies(other.report(other.session, false), m.report(m.session, true))
	m.wants("full", true, "finding")
	other.wants("with room again", false, "")
}

// TestASweepFindsAFullDiskByItself checks that a sweep finds a full disk whose report was never read, or was read
// before its gate was raised.
func TestASweepFindsAFullDiskByItself(t *testing.T) {
	b := newBed(t, Config{})
	m := b.machine()
	full := `UPDATE lifecycle.node_gate
		SET host = jsonb_set(host, '{stateDisk}', '{"full": true, "path": "/var/lib/gpuaas"}') WHERE node_id = $1`
	b.as(pg.RoleLifecycle, full, m.node)
	b.sweep()
	m.wants("swept", true, "finding")
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.node_gate SET host = host - 'stateDisk' WHERE node_id = $1`, m.node)
	b.sweep()
	m.wants("swept again", false, "")
}
