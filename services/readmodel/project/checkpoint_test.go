package project_test

import (
	"crypto/ed25519"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

func newCheckpointKey(t *testing.T, others ...ed25519.PublicKey) (project.CheckpointKeys, ed25519.PublicKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	must(t, err)
	set, err := pki.NewKeySet(append(others, public)...)
	must(t, err)
	return project.CheckpointKeys{Signing: private, Verify: set}, public
}

// cutAudit cuts what the policy's default lets be cut after so long.
func (c chained) cutAudit(later time.Duration) string {
	c.t.Helper()
	testkit.SetClockOffset(c.DB, later)
	got := text(c.t, c.Log, `SELECT x.cut::text FROM readmodel.cut_audit('1 second', '00000000-0000-0000-0000-000000000000', 500) x`)
	testkit.SetClockOffset(c.DB, 0)
	return got
}

// signed makes a log of five rows whose first three are checkpointed, and cut.
func signed(t *testing.T) (chained, project.CheckpointKeys, ed25519.PublicKey) {
	t.Helper()
	c := newChain(t, 3)
	keys, public := newCheckpointKey(t)
	c.audit.UseKeys(keys)
	if n := c.cutAudit(500 * 24 * time.Hour); n != "0" {
		t.Fatalf("%s rows were cut without a checkpoint", n)
	}
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	must(t, c.audit.Checkpoint(testkit.Context(t))) // nothing has come since
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "x"})
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "y"})
	c.settle()
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
	// A key that follows signs the checkpoint anew, and the former may go.
	next, public := newCheckpointKey(t, first)
	c.audit.UseKeys(next)
	must(t, c.audit.Checkpoint(testkit.Context(t)))
	alone, err := pki.NewKeySet(public)
	must(t, err)
	c.audit.UseKeys(project.CheckpointKeys{Signing: next.Signing, Verify: alone})
	if v := c.verify(); !v.Intact() || v.From != 3 || v.Signed != 5 || v.Unsigned != 0 {
		t.Errorf("after the key was replaced: %+v", v)
	}
	// All rows may be cut: the chain goes on at the checkpoint.
	if n := c.cutAudit(401 * 24 * time.Hour); n != "2" {
		t.Fatalf("%s rows were cut, want the other two", n)
	}
	c.record(pg.RoleLifecycle, audit.Entry{Action: "policy.set", SubjectType: "policy", SubjectID: "z"})
	c.settle()
	if v := c.verify(); !v.Intact() || v.From != 5 || v.Rows != 6 {
		t.Errorf("after all was cut: %+v", v)
	}
}

// TestAKeyGoesOnceItsCheckpointsAreSignedAnew: the set of keys asks before it retires one, however long no checkpoint was
// made.
func TestAKeyGoesOnceItsCheckpointsAreSignedAnew(t *testing.T) {
	c, _, first := signed(t)
	next, public := newCheckpointKey(t, first)
	c.audit.UseKeys(next)
	need, err := c.audit.NeedKey(testkit.Context(t), c.DB.Pool(pg.RoleReadmodel))
	must(t, err)
	if need != "" {
		t.Errorf("the former key is needed by %q", need)
	}
	alone, err := pki.NewKeySet(public)
	must(t, err)
	c.audit.UseKeys(project.CheckpointKeys{Signing: next.Signing, Verify: alone})
	if v := c.verify(); !v.Intact() || v.From != 3 || v.Signed != 3 {
		t.Errorf("after the former key was retired: %+v", v)
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
	if _, err := c.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(t), `DELETE FROM readmodel.audit_checkpoint`); !pg.IsPrivilege(err) {
		t.Errorf("readmodel deletes checkpoints: %v", err)
	}
}
