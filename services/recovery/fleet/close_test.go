package fleet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

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
	return c.closeAs("ann", id, role)
}

func (c *closing) closeAs(who, id, role string) (*recoveryv1.CloseIncidentResponse, error) {
	person := rpc.Person{Subject: who, Roles: []string{role}}
	return c.fleet.CloseIncident(rpc.WithPerson(c.ctx, person),
		&recoveryv1.CloseIncidentRequest{IncidentId: id, Reason: "the rack is being moved"})
}

// refused checks that a person may not close an incident, and that the refusal says what ends it.
func (c *closing) refused(id, role string, reason commonv1.Reason, says string) {
	c.t.Helper()
	_, err := c.close(id, role)
	c.refusal(err, reason, says)
}

// refusal checks the reason of a refusal, and that its text or its remedy has says.
func (c *closing) refusal(err error, reason commonv1.Reason, says string) {
	c.t.Helper()
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
	}
	c.refused(ids.New(), "operator", commonv1.Reason_REASON_NOT_FOUND, "there is no incident")
}

// TestAnIncidentIsClosedOnce repeats the request of the person who has closed an incident, which returns the incident
// as it is: the person whose first answer was lost cannot tell whether it was done. Another person is refused with who
// closed it and why, and each person is refused for an incident that ended by itself.
func TestAnIncidentIsClosedOnce(t *testing.T) {
	c := newClosing(t)
	id := c.open(kindOverdue, "quarantined")
	first, err := c.close(id, "operator")
	c.must(err)
	before := c.count(`SELECT count(*) FROM events.event`)
	again, err := c.fleet.CloseIncident(rpc.WithPerson(c.ctx, rpc.Person{Subject: "ann", Roles: []string{"operator"}}),
		&recoveryv1.CloseIncidentRequest{IncidentId: id, Reason: "another reason"})
	c.must(err)
	diff := cmp.Diff(first.GetIncident(), again.GetIncident(), protocmp.Transform())
	if diff != "" || again.GetPos() != "" {
		t.Errorf("position %q, and another incident: %s", again.GetPos(), diff)
	}
	_, err = c.closeAs("bob", id, "operator")
	c.refusal(err, failed, "by ann: the rack is being moved")
	c.exec(`UPDATE recovery.incident SET closed_by = 'recovery', close_reason = ''`)
	c.refused(id, "operator", failed, "the incident ended by itself at ")
	if more := c.count(`SELECT count(*) FROM events.event`) - before; more != 0 {
		t.Errorf("%d events of what changed nothing", more)
	}
}

// Scenario: a person closes an incident while a round is under way that goes on with it. The person's transaction waits
// for the round under each of the locks of rounds, and closes the incident as the round left it.
func TestClosingWaitsForTheRoundUnderWay(t *testing.T) {
	for name, lock := range map[string]int64{"of equal verdicts": driftLock, "of overdue states": overdueLock} {
		t.Run(name, func(t *testing.T) {
			c := newClosing(t)
			id := c.open(kindOverdue, "quarantined")
			round, err := c.db.Pool(pg.RoleRecovery).Begin(c.ctx)
			c.must(err)
			defer func() { _ = round.Rollback(c.ctx) }()
			_, err = pg.Exec(c.ctx, round, takeDriftLock, lock)
			c.must(err)
			type closed struct {
				out *recoveryv1.CloseIncidentResponse
				err error
			}
			done := make(chan closed, 1)
			go func() {
				out, err := c.close(id, "operator")
				done <- closed{out, err}
			}()
			testkit.Eventually(t, testkit.Patience, func() error {
				select {
				case got := <-done:
					t.Fatalf("closed beside the round: %v %v", got.out, got.err)
				default:
				}
				if c.count(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
						AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
						AND (classid::bigint << 32) + objid::bigint = $1`, lock) == 0 {
					return errors.New("the person does not wait")
				}
				return nil
			})
			_, err = round.Exec(c.ctx, `UPDATE recovery.incident SET version = version + 1, count = 7`)
			c.must(err)
			c.must(round.Commit(c.ctx))
			got := <-done
			c.must(got.err)
			if i := got.out.GetIncident(); i.GetCount() != 7 || i.GetVersion() != 3 || i.GetClosedBy() != "ann" {
				t.Errorf("%v is not closed as the round left it", i)
			}
		})
	}
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
