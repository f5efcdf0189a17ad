package keyset

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// rolled rotates n times and returns the directory of the signer and the ids of the keys in the order in which they
// were made.
func (b *bench) rolled(n int) (string, []string) {
	b.t.Helper()
	dir := b.t.TempDir()
	a := b.signer(dir)
	ids := []string{a.signs()}
	for i := range n {
		if _, err := b.ask(fmt.Sprintf("r%d", i)); err != nil {
			b.t.Fatal(err)
		}
		b.round(a)
		b.later(leastAge+time.Second, a)
		b.round(a)
		ids = append(ids, a.signs())
		b.later(JoinState.Overlap()+time.Second, a)
	}
	return dir, ids
}

// byID returns the states of keys by their ids.
func (b *bench) byID() map[string]string {
	b.t.Helper()
	rows, err := ReadKeys(b.ctx, b.db.Pool(pg.RoleRecovery))
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]string{}
	for _, row := range rows {
		out[row.KeyID] = row.State
	}
	return out
}

// TestADatabaseThatLostManyRotationsGetsThemBack restores the set to each moment before three rotations: the lost keys
// are stored again from the files in their order, the newest signs, and those between verify for as long as messages
// that they signed may be under way.
func TestADatabaseThatLostManyRotationsGetsThemBack(t *testing.T) {
	for lost := 1; lost <= 3; lost++ {
		for _, state := range []string{Signing, VerifyOnly} {
			if lost == 3 && state == VerifyOnly {
				continue // the first key was never verify_only
			}
			t.Run(fmt.Sprintf("%d lost, the last known is %s", lost, state), func(t *testing.T) {
				b := newBench(t)
				dir, ids := b.rolled(3)
				if got := b.byID(); got[ids[3]] != Signing || got[ids[0]] != Retired {
					t.Fatalf("the keys are %v of %q", got, ids)
				}
				owner := b.db.OwnerPool()
				kept := ids[:4-lost]
				exec := func(sql string, args ...any) {
					if _, err := owner.Exec(b.ctx, sql, args...); err != nil {
						t.Fatal(err)
					}
				}
				exec(`DELETE FROM mesh.signing_key WHERE NOT key_id = ANY ($1)`, kept)
				exec(`DELETE FROM mesh.key_rotation`)
				exec(`DELETE FROM mesh.key_replica`)
				exec(`UPDATE mesh.signing_key SET state = $2, state_at = mesh.clock() WHERE key_id = $1`, kept[len(kept)-1], state)
				if state == VerifyOnly {
					exec(`UPDATE mesh.signing_key SET state = 'signing', state_at = mesh.clock() WHERE key_id = $1`, kept[len(kept)-2])
				}
				a := b.signer(dir)
				b.later(liveFor+leastAge, a)
				b.round(a)
				b.round(a)
				if a.signs() != ids[3] {
					t.Fatalf("%s signs of %q: %v", a.signs(), ids, b.byID())
				}
				got := b.byID()
				for i, id := range ids[:3] {
					want := VerifyingAfter
					last := len(kept) - 1 // the key that signed at the time of the backup, or was to sign next
					if i < last && (state == Signing || i < last-1) {
						want = Retired // before the backup
					}
					if got[id] != want {
						t.Errorf("key %d of %q is %s, want %s", i, ids, got[id], want)
					}
				}
				b.later(JoinState.Overlap()+time.Second, a)
				b.round(a)
				got = b.byID()
				for _, id := range ids[:3] {
					if got[id] != Retired {
						t.Errorf("%s is %s after the overlap", id, got[id])
					}
				}
			})
		}
	}
}

// TestTheFirstKeysOfAFileAreInTheirOrder starts with the plain file and those with a number after it: the newest signs,
// as it did before.
func TestTheFirstKeysOfAFileAreInTheirOrder(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	files := FilesOf(filepath.Join(dir, "tasks.pem"))
	var made []privateKey
	for i := range 3 {
		var by *privateKey
		if i > 0 {
			by = &made[i-1]
		}
		key, err := files.newKey(i+1, JoinState, by)
		if err != nil {
			t.Fatal(err)
		}
		if err := files.write(key, JoinState); err != nil {
			t.Fatal(err)
		}
		made = append(made, key)
	}
	u, err := b.open(pg.RoleRecovery, Part{Kind: JoinState, Signs: true, Files: files})
	if err != nil {
		t.Fatal(err)
	}
	if u.signs() != made[2].id {
		t.Errorf("%s signs, want %s, the last of %v", u.signs(), made[2].id, []string{made[0].id, made[1].id, made[2].id})
	}
}

// fileOf is the result of os.Stat for a file with an owner, a group and a mode.
type fileOf struct {
	os.FileInfo

	mode     os.FileMode
	uid, gid uint32
}

func (f fileOf) Mode() os.FileMode { return f.mode }
func (f fileOf) Sys() any          { return &syscall.Stat_t{Uid: f.uid, Gid: f.gid} }

// TestWhoMayReadAKeyFile checks modes and owners for a process of user 1000 and group 2000.
func TestWhoMayReadAKeyFile(t *testing.T) {
	for _, c := range []struct {
		file fileOf
		euid int
		want bool
	}{
		{fileOf{mode: 0o600, uid: 1000, gid: 1000}, 1000, true},
		{fileOf{mode: 0o400, uid: 1000, gid: 1000}, 1000, true},
		{fileOf{mode: 0o640, uid: 0, gid: 2000}, 1000, true}, // as Kubernetes mounts a secret with fsGroup 2000
		{fileOf{mode: 0o440, uid: 0, gid: 2000}, 1000, true},
		{fileOf{mode: 0o640, uid: 0, gid: 2001}, 1000, false}, // a group that is not ours
		// not a mounted secret of a cluster: an operator can chmod it
		{fileOf{mode: 0o640, uid: 1000, gid: 2000}, 1000, false},
		{fileOf{mode: 0o660, uid: 0, gid: 2000}, 1000, false},
		{fileOf{mode: 0o644, uid: 0, gid: 2000}, 1000, false},
		{fileOf{mode: 0o640, uid: 0, gid: 2000}, 0, false}, // root needs no group
	} {
		if got := closedToOthers(c.file, c.euid, []int{2000}); got != c.want {
			t.Errorf("mode %04o of %d:%d for user %d: %t", c.file.mode, c.file.uid, c.file.gid, c.euid, got)
		}
	}
}

// TestAForgedKeyFileIsRefused keeps a foreign key out: a file whose endorsement is not by a key of the set is refused
// with a remedy.
func TestAForgedKeyFileIsRefused(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	a := b.signer(dir)
	files := DirFiles(dir, "join-")
	foreign, err := files.newKey(7, JoinState, nil)
	if err != nil {
		t.Fatal(err)
	}
	forged, err := files.newKey(8, JoinState, &foreign)
	if err != nil {
		t.Fatal(err)
	}
	forged.endorsedBy = a.signs() // although a.signs() did not sign the endorsement
	if err := files.write(forged, JoinState); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.want(Signing)
	_, err = b.open(pg.RoleRecovery, signer(dir))
	refusedWith(t, err, differs, forged.file, forged.id)
}

// TestADirectoryThatGoesDoesNotStopTheSignatures puts a file in the place of the directory while a rotation is
// requested: no key can be read or written, which is reported, and the key that was loaded keeps signing however long
// that lasts. When the directory is restored the rotation continues.
func TestADirectoryThatGoesDoesNotStopTheSignatures(t *testing.T) {
	b := newBench(t)
	dir := filepath.Join(t.TempDir(), "keys")
	a := b.signer(dir)
	first := a.signs()
	ahead := time.Duration(0)
	a.now = func() time.Time { return time.Now().Add(ahead) }
	if _, err := b.ask("r1"); err != nil {
		t.Fatal(err)
	}
	var problems []string
	a.deps.OnProblems = func(_ context.Context, list []string) { problems = list }
	aside := dir + ".aside"
	if err := errors.Join(os.Rename(dir, aside), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	ahead = JoinState.Overlap() * 2
	if err := a.Refresh(b.ctx); err == nil {
		t.Error("a directory that cannot be read is no error")
	}
	if err := a.view.Confirmed(); err != nil || a.signs() != first {
		t.Errorf("%s signs, want %s: %v", a.signs(), first, err)
	}
	if len(problems) == 0 {
		t.Error("it is not reported")
	}
	if err := errors.Join(os.Remove(dir), os.Rename(aside, dir)); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.want("signing verify_only")
	if len(problems) > 0 {
		t.Errorf("the problems are %q", problems)
	}
}
