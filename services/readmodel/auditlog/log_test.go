package auditlog_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

// chained is an audit log of some rows, each written by another service.
type chained struct {
	*projecttest.Log

	t     *testing.T
	audit *auditlog.Log
}

func newChain(t *testing.T, rows int) chained {
	t.Helper()
	testkit.IO(t)
	c := chained{Log: projecttest.New(t), t: t}
	var err error
	c.audit, err = auditlog.New(auditlog.Deps{
		Logger: testkit.Logger(t), DB: c.DB.Pool(pg.RoleReadmodel),
		Numbered: c.Numbered, Wake: c.Wake,
	})
	must(t, err)
	for n := range rows {
		c.record([]string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}[n%3], audit.Entry{
			Action: "workspace.cancel", Actor: []string{"ana", ""}[n%2], Reason: "because", SubjectType: "workspace",
			SubjectID: ids.New(),
			Details:   map[string]any{"n": n, "half": 0.5, "text": "<&>"},
		})
	}
	c.drain()
	return c
}

func (c chained) record(role string, e audit.Entry) {
	c.t.Helper()
	must(c.t, pg.InTx(testkit.Context(c.t), c.DB.Pool(role), func(ctx context.Context, tx pgx.Tx) error {
		_, err := audit.Record(ctx, tx, e)
		return err
	}))
}

func (c chained) drain() {
	c.t.Helper()
	c.Number()
	must(c.t, c.audit.Drain(testkit.Context(c.t)))
}

func (c chained) verify() auditlog.Verdict {
	c.t.Helper()
	v, err := c.audit.Verify(testkit.Context(c.t))
	must(c.t, err)
	return v
}

// asOwner runs statements that no service may run; asAdmin runs those that not even the schema's owner may run.
func (c chained) asOwner(sql string, args ...any) {
	c.t.Helper()
	tag, err := c.DB.OwnerPool().Exec(testkit.Context(c.t), sql, args...)
	must(c.t, err)
	if tag.RowsAffected() == 0 {
		c.t.Fatalf("nothing was changed: %s", sql)
	}
}

func (c chained) asAdmin(sql string, args ...any) {
	c.t.Helper()
	ctx := testkit.Context(c.t)
	conn, err := pgx.Connect(ctx, c.DB.AdminURL())
	must(c.t, err)
	defer conn.Close(ctx)
	tag, err := conn.Exec(ctx, sql, args...)
	must(c.t, err)
	if tag.RowsAffected() == 0 {
		c.t.Fatalf("nothing was changed: %s", sql)
	}
}

func TestAuditChainIsTheSameMadeAgain(t *testing.T) {
	c := newChain(t, 7)
	before := c.verify()
	if !before.Intact() || before.Rows != 7 || len(before.Head) != 64 {
		t.Fatalf("%+v", before)
	}
	if got := text(t, c.Log, `SELECT string_agg(number || source || (entry::jsonb->>'actor'), ' ' ORDER BY number)
		FROM readmodel.audit WHERE number < 4`); got !=
		"1lifecycleana 2recoveryservice/recovery 3readmodelana" {
		t.Errorf("rows: %s", got)
	}
	// A log that is emptied and made again from the events is the same.
	c.asOwner(`DELETE FROM readmodel.audit`)
	c.asOwner(`UPDATE readmodel.audit_head SET number = 0, hash = decode(repeat('00', 32), 'hex')`)
	c.asOwner(`DELETE FROM readmodel.event_cursor WHERE name = $1`, auditlog.ConsumerName)
	c.drain()
	if after := c.verify(); after != before {
		t.Errorf("made again: %+v, before: %+v", after, before)
	}
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "x"})
	if v := c.verify(); !v.Intact() || v.Rows != 7 {
		t.Errorf("an entry that is not appended yet is no break: %+v", v)
	}
	c.drain()
	if v := c.verify(); !v.Intact() || v.Rows != 8 || v.Head == before.Head {
		t.Errorf("%+v", v)
	}
}

func TestAuditRowsAreOnlyAdded(t *testing.T) {
	c := newChain(t, 1)
	for _, sql := range []string{
		`UPDATE readmodel.audit SET entry = '{}'`, `DELETE FROM readmodel.audit`,
		`TRUNCATE readmodel.audit`, `DELETE FROM readmodel.audit_head`,
	} {
		if _, err := c.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(t), sql); !testkit.IsPrivilege(err) {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

func TestTamperingIsFound(t *testing.T) {
	const event = `(SELECT event_id FROM readmodel.audit WHERE number = $1)`
	const rehash = `UPDATE readmodel.audit SET entry = replace(entry, 'because', 'by mistake'),
		hash = sha256(convert_to('32:', 'UTF8') || previous_hash ||
			convert_to(octet_length(replace(entry, 'because', 'by mistake')) || ':' ||
			replace(entry, 'because', 'by mistake') || '36:' || event_id || length(source) || ':' || source, 'UTF8'))
				WHERE number = $1`
	for _, c := range []struct {
		name    string
		do      func(c chained)
		at      int64
		because string
	}{
		{"a row", func(c chained) {
			c.asOwner(`UPDATE readmodel.audit SET entry = replace(entry, 'because', 'by mistake') WHERE number = 3`)
		}, 3, "changed"},
		{"a row and its hash", func(c chained) { c.asOwner(rehash, 3) }, 3, "says something else"},
		{"the last row and its hash", func(c chained) { c.asOwner(rehash, 5) }, 5, "says something else"},
		{
			"a row's source", func(c chained) { c.asOwner(`UPDATE readmodel.audit SET source = 'nodeapi' WHERE number = 2`) }, 2,
			"changed",
		},
		{"an event", func(c chained) {
			c.asAdmin(`UPDATE events.event SET payload = payload || '{"reason":"by mistake"}' WHERE id = `+event, 4)
		}, 4, "says something else"},
		{
			"a row gone in the middle", func(c chained) { c.asOwner(`DELETE FROM readmodel.audit WHERE number = 2`) }, 2,
			"missing",
		},
		{"a row gone in the middle, the others moved up", func(c chained) {
			c.asOwner(`DELETE FROM readmodel.audit WHERE number = 2`)
			for n := range 3 {
				c.asOwner(`UPDATE readmodel.audit SET number = number - 1 WHERE number = $1`, n+3)
			}
		}, 2, "does not follow"},
		{
			"the last row gone", func(c chained) { c.asOwner(`DELETE FROM readmodel.audit WHERE number = 5`) }, 5,
			"ends before row 5",
		},
		{
			"an event gone in the middle", func(c chained) { c.asAdmin(`DELETE FROM events.event WHERE id = `+event, 3) }, 3,
			"is gone",
		},
		{"the last event gone", func(c chained) { c.asAdmin(`DELETE FROM events.event WHERE id = `+event, 5) }, 5, "is gone"},
		{"the last event and its row gone", func(c chained) {
			c.asAdmin(`DELETE FROM events.event WHERE id = `+event, 5)
			c.asOwner(`DELETE FROM readmodel.audit WHERE number = 5`)
		}, 5, "was 5 long"},
		{"an event and its row gone in the middle", func(c chained) {
			c.asAdmin(`DELETE FROM events.event WHERE id = `+event, 3)
			c.asOwner(`DELETE FROM readmodel.audit WHERE number = 3`)
		}, 3, "missing"},
		{"all rows gone", func(c chained) { c.asOwner(`DELETE FROM readmodel.audit`) }, 1, "ends before row 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			chain := newChain(t, 5)
			if v := chain.verify(); !v.Intact() || v.Rows != 5 {
				t.Fatalf("before: %+v", v)
			}
			c.do(chain)
			v := chain.verify()
			if v.Intact() || v.BrokenAt != c.at || !strings.Contains(v.Because, c.because) {
				t.Errorf("%+v", v)
			}
		})
	}
}

// TestAuditIsCheckedWhereItsEventsAreGone: rows whose events have been cut are checked by their chain, and the others
// by their events as before.
func TestAuditIsCheckedWhereItsEventsAreGone(t *testing.T) {
	c := newChain(t, 7)
	for _, schema := range []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel} {
		_, err := c.DB.Pool(schema).Exec(testkit.Context(t), `UPDATE `+schema+`.event_cursor SET pos = 7`)
		must(t, err)
	}
	c.record(pg.RoleLifecycle, audit.Entry{Action: "workspace.cancel", SubjectType: "workspace", SubjectID: ids.New()})
	c.drain()
	var cut int64
	if _, err := c.DB.OwnerPool().Exec(testkit.Context(t),
		`INSERT INTO mesh.policy (key, value, updated_by) VALUES ('retention.events_seconds', '0', 'test')`); err != nil {
		t.Fatal(err)
	}
	for again := true; again; { // a call that has begun a day of the log cuts nothing
		var n int64
		must(t, c.DB.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(t), `SELECT x.cut, x.next IS NOT NULL
			FROM events.cut_events('0', '00000000-0000-0000-0000-000000000000', 100) x`).Scan(&n, &again))
		cut += n
	}
	if cut != 7 {
		t.Fatalf("%d events were cut, want 7", cut)
	}
	if v := c.verify(); !v.Intact() || v.Rows != 8 {
		t.Errorf("after the cut: %+v", v)
	}
	c.asAdmin(`UPDATE readmodel.audit SET entry = replace(entry, 'because', 'for fun') WHERE number = 3`)
	if v := c.verify(); v.BrokenAt != 3 {
		t.Errorf("a row was changed whose event is gone: %+v", v)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func text(t *testing.T, l *projecttest.Log, sql string, args ...any) string {
	t.Helper()
	var got string
	must(t, l.DB.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(t), sql, args...).Scan(&got))
	return got
}
