package auditlog_test

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
)

func newCheckpointKey(t *testing.T, others ...ed25519.PublicKey) (auditlog.CheckpointKeys, ed25519.PublicKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	must(t, err)
	set, err := pki.NewKeySet(append(others, public)...)
	must(t, err)
	return auditlog.CheckpointKeys{Signing: private, Verify: set}, public
}

// cutAudit cuts the rows that the default policy allows to be cut after the given time, and returns their number.
func (c chained) cutAudit(later time.Duration) string {
	c.t.Helper()
	testkit.SetClockOffset(c.DB, later)
	got := text(c.t, c.Log, `SELECT x.cut::text
		FROM readmodel.cut_audit('1 second', '00000000-0000-0000-0000-000000000000', 500) x`)
	testkit.SetClockOffset(c.DB, 0)
	return got
}

// signed makes a log of five rows whose first three are checkpointed, and cut.
func signed(t *testing.T) (chained, auditlog.CheckpointKeys, ed25519.PublicKey) {
	t.Helper()
	c := newChain(t, 3)
	keys, public := newCheckpointKey(t)
	c.audit.UseKeys(keys)
	if n := c.cutAudit(500 * 24 * time.Hour); n != "0" {
		t.Fatalf("%s rows were cut without a checkpoint", n)
	}
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	must(t, c.audit.Checkpoint(testkit.Context(t))) // no row was added since
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "x"})
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "y"})
	c.drain()
	if v := c.verify(); !v.Intact() || v.From != 0 || v.Rows != 5 || v.Signed != 3 || v.Unsigned != 0 {
		t.Fatalf("before the cut: %+v", v)
	}
	if n := c.cutAudit(399 * 24 * time.Hour); n != "0" {
		t.Fatalf("%s rows were cut before the term of the policy", n)
	}
	if n := c.cutAudit(401 * 24 * time.Hour); n != "3" {
		t.Fatalf("%s rows were cut, want those up to the checkpoint", n)
	}
	return c, keys, public
}

func TestTheAuditLogGoesOnBehindASignedCheckpoint(t *testing.T) {
	c, _, first := signed(t)
	v := c.verify()
	if !v.Intact() || v.From != 3 || v.Rows != 5 || v.Signed != 3 {
		t.Fatalf("after the cut: %+v", v)
	}
	// The next key signs the checkpoint again, and the former one may be retired.
	next, public := newCheckpointKey(t, first)
	c.audit.UseKeys(next)
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	alone, err := pki.NewKeySet(public)
	must(t, err)
	c.audit.UseKeys(auditlog.CheckpointKeys{Signing: next.Signing, Verify: alone})
	if v := c.verify(); !v.Intact() || v.From != 3 || v.Signed != 5 || v.Unsigned != 0 {
		t.Errorf("after the key was replaced: %+v", v)
	}
	// All rows may be cut: the chain continues from the checkpoint.
	if n := c.cutAudit(401 * 24 * time.Hour); n != "2" {
		t.Fatalf("%s rows were cut, want the other two", n)
	}
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "z"})
	c.drain()
	if v := c.verify(); !v.Intact() || v.From != 5 || v.Rows != 6 {
		t.Errorf("after all was cut: %+v", v)
	}
}

// Scenario: the log is checked between two batches of a cut, when it begins behind no checkpoint. It is intact while
// the rows that are gone are over their term, and each row that is left is still covered by the checkpoint behind it.
func TestALogThatIsBeingCutIsIntact(t *testing.T) {
	c := newChain(t, 4)
	keys, _ := newCheckpointKey(t)
	c.audit.UseKeys(keys)
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "x"})
	c.drain()
	testkit.SetClockOffset(c.DB, 401*24*time.Hour)
	if n := text(t, c.Log, `SELECT x.cut::text
		FROM readmodel.cut_audit('1 second', '00000000-0000-0000-0000-000000000000', 2) x`); n != "2" {
		t.Fatalf("%s rows were cut, want a batch", n)
	}
	if v := c.verify(); !v.Intact() || v.From != 2 || v.Rows != 5 || v.Signed != 4 {
		t.Errorf("between two batches: %+v", v)
	}
	testkit.SetClockOffset(c.DB, 399*24*time.Hour)
	if v := c.verify(); v.BrokenAt != 1 || !strings.Contains(v.Because, "row 1 is missing") {
		t.Errorf("without two rows before the end of their term: %+v", v)
	}
	testkit.SetClockOffset(c.DB, 401*24*time.Hour)
	c.asOwner(`UPDATE readmodel.audit SET previous_hash = sha256('x') WHERE number = 3`)
	if v := c.verify(); v.BrokenAt != 3 {
		t.Errorf("the first row was changed: %+v", v)
	}
	c.asOwner(`DELETE FROM readmodel.audit WHERE number = 3`)
	c.asOwner(`UPDATE readmodel.audit_checkpoint SET signature = decode(repeat('00', 64), 'hex')`)
	if v := c.verify(); v.BrokenAt != 1 {
		t.Errorf("behind no checkpoint that can be believed: %+v", v)
	}
}

// TestAKeyGoesOnceItsCheckpointsAreSignedAnew: the key set calls NeedKey before it retires a key, however long ago the
// last checkpoint was made, and also when a replica starts and has no key yet.
func TestAKeyGoesOnceItsCheckpointsAreSignedAnew(t *testing.T) {
	c, _, first := signed(t)
	ctx, db := testkit.Context(t), c.DB.Pool(pg.RoleReadmodel)
	need := func(a *auditlog.Log) string {
		t.Helper()
		text, err := a.NeedKey(ctx, db, pki.KeyID(first), first)
		must(t, err)
		return text
	}
	started, err := auditlog.New(auditlog.Deps{Logger: testkit.Logger(t), DB: db, Numbered: c.Numbered, Wake: c.Wake})
	must(t, err)
	if need(started) == "" {
		t.Error("a replica that has no key yet lets the former key go")
	}
	if need(c.audit) == "" {
		t.Error("a replica that signs with the key lets it go")
	}
	next, public := newCheckpointKey(t)
	alone, err := pki.NewKeySet(public)
	must(t, err)
	c.audit.UseKeys(auditlog.CheckpointKeys{
		Signing: next.Signing, Verify: alone,
		Confirmed: func() error { return errors.New("not read") },
	})
	if need(c.audit) == "" {
		t.Error("a replica that does not know which key signs lets the former go")
	}
	c.audit.UseKeys(auditlog.CheckpointKeys{Signing: next.Signing, Verify: alone}) // without the file of the former key
	if text := need(c.audit); text != "" {
		t.Errorf("the former key is needed by %q", text)
	}
	if v := c.verify(); !v.Intact() || v.From != 3 || v.Signed != 3 {
		t.Errorf("after the former key was retired: %+v", v)
	}
	c.asOwner(`UPDATE readmodel.audit_checkpoint SET signature = decode(repeat('00', 64), 'hex'), key_id = '` +
		pki.KeyID(first) + `'`)
	if text := need(c.audit); text != "" {
		t.Errorf("a signature that is not good needs the key: %q", text)
	}
}

// TestWhatDoesNotFollowIsNotSigned: no checkpoint is made at a row that was changed since the last one, nor behind a
// checkpoint that is gone, and no caller makes a checkpoint of something else.
func TestWhatDoesNotFollowIsNotSigned(t *testing.T) {
	for name, sql := range map[string]string{
		"a row is changed":       `UPDATE readmodel.audit SET entry = replace(entry, 'policy', 'police') WHERE number = 4`,
		"its checkpoint is not":  `UPDATE readmodel.audit_checkpoint SET at = at + interval '1 second'`,
		"the checkpoint is gone": `DELETE FROM readmodel.audit_checkpoint`,
	} {
		t.Run(name, func(t *testing.T) {
			c, _, _ := signed(t)
			c.asOwner(sql)
			if err := c.audit.Checkpoint(testkit.Context(t)); err == nil {
				t.Error("it is signed")
			}
		})
	}
	c, _, _ := signed(t)
	db := c.DB.Pool(pg.RoleReadmodel)
	const insert = `INSERT INTO readmodel.audit_checkpoint (number, pos, hash, at, key_id, signature)
		SELECT a.number, a.pos, %s, %s, 'x', decode(repeat('00', 64), 'hex') FROM readmodel.audit a WHERE a.number = 5`
	for what, sql := range map[string]string{
		"long ago":    fmt.Sprintf(insert, "a.hash", "mesh.clock() - interval '2 years'"),
		"another row": fmt.Sprintf(insert, "sha256('x')", "mesh.clock()"),
	} {
		if _, err := db.Exec(testkit.Context(t), sql); err == nil {
			t.Errorf("a checkpoint of %s is taken", what)
		}
	}
}

// TestALogThatEndsBeforeASignedRowIsBroken: such a log is broken although its head and its events are consistent with
// each other.
func TestALogThatEndsBeforeASignedRowIsBroken(t *testing.T) {
	c, _, _ := signed(t)
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	c.asAdmin(`DELETE FROM events.event WHERE kind = 'audit.recorded' AND seq > (SELECT seq FROM events.event
		WHERE kind = 'audit.recorded' ORDER BY seq DESC OFFSET 1 LIMIT 1)`)
	c.asOwner(`DELETE FROM readmodel.audit WHERE number = 5`)
	c.asOwner(`UPDATE readmodel.audit_head SET (number, hash) = (SELECT number, hash FROM readmodel.audit
		WHERE number = 4)`)
	if v := c.verify(); v.BrokenAt != 5 || !strings.Contains(v.Because, "signed") {
		t.Errorf("%+v", v)
	}
}

func TestACheckpointIsBelievedByItsSignature(t *testing.T) {
	for name, tc := range map[string]struct {
		sql, because string
		at           int64
	}{
		"signature":  {`UPDATE readmodel.audit_checkpoint SET signature = decode(repeat('00', 64), 'hex')`, "signature", 4},
		"hash":       {`UPDATE readmodel.audit_checkpoint SET hash = sha256('x')`, "signature", 4},
		"time":       {`UPDATE readmodel.audit_checkpoint SET at = at + interval '1 second'`, "signature", 4},
		"key":        {`UPDATE readmodel.audit_checkpoint SET key_id = 'other'`, "not known", 4},
		"checkpoint": {`DELETE FROM readmodel.audit_checkpoint`, "row 1 is missing", 1},
		"a row more": {`DELETE FROM readmodel.audit WHERE number = 4`, "row 1 is missing", 1},
	} {
		t.Run(name, func(t *testing.T) {
			c, _, _ := signed(t)
			c.asOwner(tc.sql)
			if v := c.verify(); v.BrokenAt != tc.at || !strings.Contains(v.Because, tc.because) {
				t.Errorf("%+v", v)
			}
		})
	}
	c := newChain(t, 2)
	if _, err := c.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(t),
		`DELETE FROM readmodel.audit_checkpoint`); !testkit.IsPrivilege(err) {
		t.Errorf("readmodel deletes checkpoints: %v", err)
	}
}
