package launchlog_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/launchlog"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const process = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS

// fakeLog is a driver that has a launch log and launches nothing.
type fakeLog struct {
	placement.Driver

	log placement.LaunchLog
	// meanwhile runs once, after the log was read and before it is returned.
	meanwhile func()
	forgotten []string
	full      error // of the log's disk
}

func (f *fakeLog) LaunchLog(context.Context) (placement.LaunchLog, error) {
	log := f.log
	log.Entries = slices.Clone(log.Entries)
	if f.meanwhile != nil {
		run := f.meanwhile
		f.meanwhile = nil
		run()
	}
	return log, nil
}

// Forget records its arguments.
func (f *fakeLog) Forget(_ context.Context, workspaceIDs []string) (int, error) {
	if f.full != nil {
		return 0, f.full
	}
	f.forgotten = append(f.forgotten, workspaceIDs...)
	return len(workspaceIDs), nil
}

// write adds a launch to the log.
func (f *fakeLog) write(ws string, epoch int64, instance string) {
	f.log.Seq++
	f.log.Entries = append(f.log.Entries,
		placement.LogEntry{WorkspaceID: ws, Epoch: epoch, InstanceID: instance, First: f.log.Seq})
}

// end ends the last launch of the log.
func (f *fakeLog) end() {
	f.log.Seq++
	f.log.Entries[len(f.log.Entries)-1].Ended = f.log.Seq
}

// recovery takes reports, and sets the mode on them unless it knows of the restore already.
type recovery struct {
	db      *testkit.Database
	refuse  error
	known   bool
	reports []*recoveryv1.ReportRollbackRequest
}

func (r *recovery) ReportRollback(_ context.Context,
	req *recoveryv1.ReportRollbackRequest,
) (*recoveryv1.ReportRollbackResponse, error) {
	if r.refuse != nil {
		return nil, r.refuse
	}
	r.reports = append(r.reports, req)
	if !r.known {
		testkit.SetRollback(r.db, true)
	}
	return &recoveryv1.ReportRollbackResponse{Rollback: &recoveryv1.RollbackMode{Active: !r.known}}, nil
}

type bench struct {
	t        *testing.T
	db       *testkit.Database
	log      *fakeLog
	recovery *recovery
	tenant   string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	testkit.IO(t)
	b := &bench{t: t, db: testkit.DB(t), log: &fakeLog{log: placement.LaunchLog{ID: ids.New()}}, tenant: ids.New()}
	b.recovery = &recovery{db: b.db}
	b.exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'acme')`, b.tenant)
	return b
}

func (b *bench) exec(sql string, args ...any) {
	b.t.Helper()
	if _, err := b.db.OwnerPool().Exec(b.t.Context(), sql, args...); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

// guard returns the guard of a process that has just started.
func (b *bench) guard() *launchlog.Guard {
	return launchlog.New(launchlog.Deps{
		Logger: testkit.Logger(b.t), DB: b.db.Pool(pg.RoleLifecycle), Recovery: b.recovery,
		Drivers: map[commonv1.PlacementDriver]placement.Driver{process: b.log},
	})
}

// workspace inserts one in an epoch, with the row of its instance unless state is empty. It returns both ids.
func (b *bench) workspace(epoch int64, state string) (string, string) {
	b.t.Helper()
	ws, instance := ids.New(), ids.New()
	b.exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch) VALUES ($1, $2, $3, 'active', $4)`, ws,
		b.tenant, "w-"+ws, epoch)
	if state != "" {
		b.exec(`INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state, placement, started_at)
			VALUES ($1, $2, $3, $4, $5, 'process', mesh.clock())`, instance, ws, b.tenant, epoch, state)
	}
	return ws, instance
}

func (b *bench) instanceOf(ws string, epoch int64) string {
	b.t.Helper()
	var id string
	err := b.db.OwnerPool().QueryRow(b.t.Context(),
		`SELECT instance_id::text FROM lifecycle.instance WHERE workspace_id = $1 AND epoch = $2`, ws, epoch).Scan(&id)
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

// wants checks with a guard and compares what was reported since.
func (b *bench) wants(g *launchlog.Guard, want ...string) {
	b.t.Helper()
	b.recovery.reports = nil
	if err := g.Check(b.t.Context()); err != nil || !g.Compared() {
		b.t.Fatalf("check: %v, compared %v", err, g.Compared())
	}
	var got []string
	for _, r := range b.recovery.reports {
		got = append(got, fmt.Sprintf("%s %s %d>%d", r.GetKind(), r.GetSubject(), r.GetRemembered(), r.GetKnown()))
		if r.GetDetail() == "" {
			b.t.Error("a report without a detail")
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		b.t.Errorf("reported %q, want %q", got, want)
	}
}

func report(kind recoveryv1.RollbackEvidenceKind, subject string, remembered, known int64) string {
	return fmt.Sprintf("%s %s %d>%d", kind, subject, remembered, known)
}

const (
	ahead  = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_AHEAD
	behind = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_BEHIND
)

// No state that lifecycle reaches without a restore, crashes between any two of its commits included, is evidence.
func TestNormalLifeIsNoEvidence(t *testing.T) {
	b := newBench(t)
	// between the launch and the record of it, and later
	for _, state := range []string{"launching", "live", "ending", "ended"} {
		ws, instance := b.workspace(3, state)
		b.log.write(ws, 3, instance)
	}
	b.workspace(1, "prepared") // reserved, and not launched yet
	for _, state := range []string{"ending", "ended"} {
		ws, instance := b.workspace(2, state)
		b.log.write(ws, 2, instance)
		b.log.end()
	}
	// a tombstone of an epoch that never was launched, and a former epoch whose row was deleted for its age
	ws, _ := b.workspace(5, "live")
	b.log.write(ws, 2, "")
	b.log.end()
	b.log.write(ws, 1, ids.New())
	b.log.end()
	b.log.write(ws, 5, b.instanceOf(ws, 5))
	gone := ids.New()
	b.log.write(gone, 1, ids.New())
	b.log.end()
	fenced, instance := b.workspace(1, "live") // fenced by an attestation, and the row not written yet
	b.log.write(fenced, 1, instance)
	b.log.end()
	b.log.log.Entries[len(b.log.log.Entries)-1].Fenced = true
	b.wants(b.guard())
	b.wants(b.guard())
}

// Logs of replicas that compare at the same time are no evidence.
//
// Scenario: while one replica has read the log, another launches and compares a log that is longer by then. The first
// one's log is older than what the database has seen, and that is no evidence.
func TestReplicasThatCompareAtOnceAreNoEvidence(t *testing.T) {
	b := newBench(t)
	first, second := b.guard(), b.guard()
	ws, instance := b.workspace(1, "live")
	b.log.write(ws, 1, instance)
	b.wants(first)
	b.log.meanwhile = func() {
		other, instance := b.workspace(1, "live")
		b.log.write(other, 1, instance)
		if err := second.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
	b.wants(first)
	b.wants(second)
}

// Each difference in which the log is ahead of the database is reported once, sets the mode, and is not reported again:
// not while the mode lasts, not after it was accepted, not by another process.
func TestALogThatIsAheadIsReportedOnce(t *testing.T) {
	for name, make := range map[string]func(*bench) string{
		"a later epoch": func(b *bench) string {
			ws, instance := b.workspace(1, "ended")
			b.log.write(ws, 1, instance)
			b.log.end()
			b.log.write(ws, 2, ids.New())
			return report(ahead, ws, 2, 1)
		},
		"a later epoch that has ended": func(b *bench) string {
			ws, _ := b.workspace(1, "ended")
			b.log.write(ws, 4, ids.New())
			b.log.end()
			return report(ahead, ws, 4, 1)
		},
		"another instance of the same epoch": func(b *bench) string {
			ws, _ := b.workspace(1, "prepared")
			b.log.write(ws, 1, ids.New())
			return report(ahead, ws, 1, 1)
		},
		"an instance without a row": func(b *bench) string {
			ws, _ := b.workspace(2, "")
			b.log.write(ws, 2, ids.New())
			return report(ahead, ws, 2, 2)
		},
		"a workspace that is not known": func(b *bench) string {
			ws := ids.New()
			b.log.write(ws, 1, ids.New())
			return report(ahead, ws, 1, 0)
		},
		"an end that was not asked for": func(b *bench) string {
			ws, instance := b.workspace(1, "live")
			b.log.write(ws, 1, instance)
			b.log.end()
			return report(ahead, ws, 1, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			want := make(b)
			g := b.guard()
			b.wants(g, want)
			b.wants(g)
			b.wants(b.guard())
			testkit.SetRollback(b.db, false) // a person has accepted it
			b.wants(b.guard())
			b.wants(b.guard())
			ws, _ := b.workspace(1, "ended") // and a further restore is found anew
			b.log.write(ws, 9, ids.New())
			b.wants(b.guard(), report(ahead, ws, 9, 1))
		})
	}
}

// A restore that recovery knows of explains the differences: they are reported once and do not set the mode again.
func TestADeclaredRestoreIsAcceptedOnce(t *testing.T) {
	b := newBench(t)
	b.recovery.known = true
	ws, _ := b.workspace(1, "ended")
	b.log.write(ws, 2, ids.New())
	b.wants(b.guard(), report(ahead, ws, 2, 1))
	b.wants(b.guard())
}

// An instance that was launched in an earlier era and ends in the present one is evidence of the present one, unless a
// restore was declared since the last comparison.
func TestEvidenceIsOfTheEraInWhichItCame(t *testing.T) {
	for _, declared := range []bool{false, true} {
		b := newBench(t)
		ws, instance := b.workspace(7, "live")
		b.log.write(ws, 7, instance)
		b.exec(`UPDATE mesh.era SET era = 1`)
		b.wants(b.guard())
		b.log.end() // by a history that was lost
		want := report(ahead, ws, 1<<40, 7)
		if declared {
			b.exec(`UPDATE mesh.era SET era = 2`)
			b.recovery.known = true
			want = report(ahead, ws, 7, 7)
		}
		b.wants(b.guard(), want)
		testkit.SetRollback(b.db, false)
		b.wants(b.guard())
	}
}

// A log is older than the database if it is another log, is shorter, or lacks an instance that is live.
func TestALogThatIsBehindIsReportedOnce(t *testing.T) {
	lines := func(b *bench) (string, string) {
		ws, instance := b.workspace(1, "live")
		b.log.write(ws, 1, instance)
		b.wants(b.guard())
		return ws, instance
	}
	for name, make := range map[string]func(*bench) []string{
		"another log": func(b *bench) []string {
			lines(b)
			b.log.log.ID = ids.New()
			return []string{report(behind, "process", 0, 0)}
		},
		"a shorter log": func(b *bench) []string {
			ws, instance := b.workspace(1, "ended")
			b.log.write(ws, 1, instance)
			b.log.end()
			b.wants(b.guard())
			b.log.log.Seq, b.log.log.Entries[0].Ended = 1, 0
			return []string{report(behind, "process", 0, 0)}
		},
		"a log without what is live": func(b *bench) []string {
			ws, _ := b.workspace(4, "live")
			return []string{report(behind, ws, 0, 4)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			want := make(b)
			b.wants(b.guard(), want...)
			b.wants(b.guard())
			testkit.SetRollback(b.db, false)
			b.wants(b.guard())
			b.wants(b.guard())
		})
	}
}

// A difference that recovery has not acknowledged keeps the process from launching.
func TestNothingCountsAsComparedBeforeRecoveryHasHeard(t *testing.T) {
	b := newBench(t)
	b.recovery.refuse = errors.New("recovery is away")
	ws, _ := b.workspace(1, "ended")
	b.log.write(ws, 2, ids.New())
	g := b.guard()
	if g.Compared() {
		t.Fatal("compared before any comparison")
	}
	if err := g.Check(t.Context()); err == nil || g.Compared() {
		t.Fatalf("compared %v without recovery: %v", g.Compared(), err)
	}
	b.recovery.refuse = nil
	b.wants(g, report(ahead, ws, 2, 1))
}

// Scenario: a log with a long history. Between two whole comparisons a guard reads the rows of what was written since
// the last one alone; the first comparison of a process, and that of a database that was restored, read what they miss.
func TestAHistoryIsNotComparedEachTime(t *testing.T) {
	b := newBench(t)
	old, oldInstance := b.workspace(1, "ended")
	b.log.write(old, 1, oldInstance)
	b.log.end()
	g := b.guard()
	for range 2 { // the first one has no position yet
		b.wants(g)
	}
	// Against the order in which lifecycle works; it is below the position of the last comparison.
	b.exec(`UPDATE lifecycle.instance SET state = 'live' WHERE instance_id = $1`, oldInstance)
	b.wants(g)
	b.exec(`UPDATE lifecycle.instance SET state = 'ended' WHERE instance_id = $1`, oldInstance)
	// Entries that were written since are compared.
	ws, _ := b.workspace(3, "")
	b.log.write(ws, 4, ids.New())
	b.wants(g, report(ahead, ws, 4, 3))
}

// A database that is restored while a guard runs has an earlier position: launches since then are compared.
func TestARestoredDatabaseComparesWhatHasComeSince(t *testing.T) {
	b := newBench(t)
	g := b.guard()
	first, instance := b.workspace(1, "live")
	b.log.write(first, 1, instance)
	b.wants(g)
	ws, later := b.workspace(1, "live")
	b.log.write(ws, 1, later)
	for range 2 {
		b.wants(g)
	}
	b.exec(`UPDATE lifecycle.launch_log SET seq = 1`)
	b.exec(`DELETE FROM lifecycle.instance WHERE workspace_id = $1`, ws)
	b.exec(`UPDATE lifecycle.workspace SET epoch = 0 WHERE id = $1`, ws)
	b.wants(g, report(ahead, ws, 1, 0))
}

// TestForgetsWhatTheDatabaseHasForgotten: tombstones stay as long as the row of their workspace does, and nothing is
// forgotten while rollback mode is set.
func TestForgetsWhatTheDatabaseHasForgotten(t *testing.T) {
	b := newBench(t)
	known, instance := b.workspace(1, "ended")
	b.log.write(known, 1, instance)
	b.log.end()
	cut := ids.New()
	b.log.write(cut, 1, ids.New())
	b.log.end()
	b.log.write(cut, 2, ids.New())
	b.log.end()
	b.log.write("no-id", 1, "other")
	b.log.end()
	if err := b.guard().Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.SetRollback(b.db, true)
	if err := b.guard().Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(b.log.forgotten) != 0 {
		t.Fatalf("forgotten in rollback mode: %v", b.log.forgotten)
	}
	testkit.SetRollback(b.db, false)
	// A log that cannot be compacted is compared nevertheless, and launches go on; the next comparison compacts it.
	b.log.full = errors.New("no space left on device")
	guard := b.guard()
	if err := guard.Check(t.Context()); err != nil || !guard.Compared() {
		t.Fatalf("compared %t, with a log that cannot be compacted: %v", guard.Compared(), err)
	}
	b.log.full = nil
	if err := guard.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(b.log.forgotten, []string{cut}) {
		t.Fatalf("forgotten: %v, want %s alone", b.log.forgotten, cut)
	}
}
