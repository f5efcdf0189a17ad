package fleet

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

// closing is a fleet whose incidents people close.
type closing struct {
	t     *testing.T
	ctx   context.Context
	db    *testkit.Database
	fleet *Fleet
}

func newClosing(t *testing.T) *closing {
	t.Helper()
	testkit.IO(t)
	c := &closing{t: t, ctx: testkit.Context(t), db: testkit.DB(t)}
	testkit.StopClock(c.db)
	var err error
	c.fleet, err = New(Deps{
		Logger: testkit.Logger(t), Pool: c.db.Pool(pg.RoleRecovery), Policy: policy.Fixed{Set: policy.Defaults()},
		Wake: &events.Signal{},
	}, Config{})
	c.must(err)
	return c
}

func (c *closing) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *closing) exec(sql string, args ...any) {
	c.t.Helper()
	_, err := c.db.OwnerPool().Exec(c.ctx, sql, args...)
	c.must(err)
}

func (c *closing) count(sql string, args ...any) (n int) {
	c.t.Helper()
	c.must(c.db.Pool(pg.RoleRecovery).QueryRow(c.ctx, sql, args...).Scan(&n))
	return n
}

// open inserts an open incident.
func (c *closing) open(kind commonv1.IncidentKind, key string) string {
	c.t.Helper()
	id := ids.New()
	c.exec(`INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, next_action, opened_at, last_seen_at)
		VALUES ($1, $2, $3, 'p1', 'three of them', 'do', mesh.clock(), mesh.clock())`, id, names.Of(kind), key)
	return id
}

func (c *closing) close(id, role string) (*recoveryv1.CloseIncidentResponse, error) {
	person := rpc.Person{Subject: "ann", Roles: []string{role}}
	return c.fleet.CloseIncident(rpc.WithPerson(c.ctx, person),
		&recoveryv1.CloseIncidentRequest{IncidentId: id, Reason: "the rack is being moved"})
}

// refused checks that a person may not close an incident, and that the refusal says what ends it.
func (c *closing) refused(id, role string, reason commonv1.Reason, says string) {
	c.t.Helper()
	_, err := c.close(id, role)
	refusal, is := fault.As(err)
	if !is || refusal.Reason != reason || !strings.Contains(refusal.Public+" "+refusal.Remedy, says) {
		c.t.Errorf("%v, want %s with %q", err, names.Of(reason), says)
	}
}

const (
	failed = commonv1.Reason_REASON_PRECONDITION_FAILED
	denied = commonv1.Reason_REASON_PERMISSION_DENIED
)

// TestAPersonClosesWhatAPersonMayJudge closes an incident of each kind: one that its evidence or another verb ends is
// refused, says what ends it, and stays open; any other is closed with who did it and why, an entry and an event.
func TestAPersonClosesWhatAPersonMayJudge(t *testing.T) {
	c := newClosing(t)
	judged := []commonv1.IncidentKind{
		commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT, commonv1.IncidentKind_INCIDENT_KIND_STATE_OVERDUE,
		commonv1.IncidentKind_INCIDENT_KIND_IDENTITY_SUSPECTED,
	}
	for _, kind := range names.All[commonv1.IncidentKind]() {
		id := c.open(kind, "key")
		if !slices.Contains(judged, kind) {
			ends := endings[kind]
			if ends == "" {
				t.Errorf("%s: the refusal does not name what ends it", names.Of(kind))
			}
			c.refused(id, "operator", failed, ends)
			c.refused(id, "security", failed, ends)
			if c.count(`SELECT count(*) FROM recovery.incident WHERE incident_id = $1 AND closed_at IS NULL`, id) != 1 {
				t.Errorf("%s is closed", names.Of(kind))
			}
			continue
		}
		out, err := c.close(id, "security")
		c.must(err)
		if i := out.GetIncident(); i.GetClosedBy() != "ann" || i.GetCloseReason() != "the rack is being moved" ||
			i.GetClosedAt() == nil || i.GetVersion() != 2 || out.GetPos() == "" {
			t.Errorf("%v", out)
		}
		if n := c.count(`SELECT count(*) FROM events.event WHERE kind = 'audit.recorded' AND payload->>'subject_id' = $1
			AND payload->>'action' = 'incident.close' AND payload->>'actor' = 'ann'
			AND payload->>'reason' = 'the rack is being moved'`, id); n != 1 {
			t.Errorf("%d entries", n)
		}
		if n := c.count(`SELECT count(*) FROM events.event WHERE kind = 'incident.changed' AND aggregate_id = $1
			AND aggregate_version = 2`, id); n != 1 {
			t.Errorf("%d events", n)
		}
		c.refused(id, "security", failed, "by ann: the rack is being moved")
	}
	c.refused(ids.New(), "operator", commonv1.Reason_REASON_NOT_FOUND, "there is no incident")
}

// TestSecurityClosesItsOwnIncidents checks incidents of a suspicion about one node, and about many.
func TestSecurityClosesItsOwnIncidents(t *testing.T) {
	c := newClosing(t)
	for _, id := range []string{
		c.open(kindSuspected, "token_reuse"), c.open(kindDrift, "cloned_identity_detected"),
	} {
		c.refused(id, "operator", denied, "security role")
		_, err := c.close(id, "security")
		c.must(err)
		c.refused(id, "operator", denied, "security role")
	}
	_, err := c.close(c.open(kindDrift, "agent_down"), "operator")
	c.must(err)
}

// TestAnIncidentThatWouldOpenAgainStaysOpen checks that equal verdicts which are still beginning keep their incident
// open, and that it can be closed, and stays closed, once they have begun.
func TestAnIncidentThatWouldOpenAgainStaysOpen(t *testing.T) {
	c := newClosing(t)
	for range 4 {
		c.exec(`INSERT INTO recovery.verdict (node_id, reason, since, body, began, version)
			VALUES ($1, 'agent_down', mesh.clock(), '', 1, 1)`, ids.New())
	}
	id := c.open(kindDrift, "agent_down")
	c.refused(id, "operator", failed, "opened again at once")
	testkit.SetClockOffset(c.db, driftWindow+time.Second)
	_, err := c.close(id, "operator")
	c.must(err)
	tx, err := c.db.Pool(pg.RoleRecovery).Begin(c.ctx)
	c.must(err)
	defer func() { _ = tx.Rollback(c.ctx) }()
	now, err := Clock(c.ctx, tx)
	c.must(err)
	c.must(EvaluateDrift(c.ctx, tx, testkit.Logger(t), now, 0.2,
		Drift{Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, Opens: true}))
	c.must(tx.Commit(c.ctx))
	if n := c.count(`SELECT count(*) FROM recovery.incident WHERE closed_at IS NULL`); n != 0 {
		t.Errorf("%d incidents are open again", n)
	}
}
