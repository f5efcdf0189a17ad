package keyset

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var errKilled = errors.New("killed here")

// bench is a database with replicas that sign and verify join states.
type bench struct {
	t      *testing.T
	ctx    context.Context
	db     *testkit.Database
	offset time.Duration
}

func newBench(t *testing.T) *bench {
	t.Helper()
	testkit.IO(t)
	return &bench{t: t, ctx: testkit.Context(t), db: testkit.DB(t)}
}

// unit is one replica.
type unit struct {
	*Set

	view View
	id   string
}

func (b *bench) open(service string, part Part) (*unit, error) {
	u := &unit{id: ids.New()}
	part.Changed = func(v View) error { u.view = v; return nil }
	var err error
	u.Set, err = Open(b.ctx, Deps{
		Logger: testkit.Logger(b.t), Pool: b.db.Pool(service), Wake: &events.Signal{}, Service: service, ReplicaID: u.id,
	}, part)
	return u, err
}

func signer(dir string) Part {
	return Part{Kind: JoinState, Signs: true, Files: DirFiles(dir, "join-")}
}

func (b *bench) signer(dir string) *unit {
	b.t.Helper()
	u, err := b.open(pg.RoleRecovery, signer(dir))
	if err != nil {
		b.t.Fatal(err)
	}
	return u
}

// verifier returns a replica of nodeapi that was given the keys which by has now.
func (b *bench) verifier(by *unit) (*unit, string) {
	b.t.Helper()
	path := filepath.Join(b.t.TempDir(), "join.pub")
	if err := os.WriteFile(path, []byte(by.view.Verify.String()), 0o600); err != nil {
		b.t.Fatal(err)
	}
	u, err := b.open(pg.RoleNodeAPI, Part{Kind: JoinState, Pinned: path})
	if err != nil {
		b.t.Fatal(err)
	}
	return u, path
}

func (b *bench) round(units ...*unit) {
	b.t.Helper()
	for _, u := range units {
		u.reportedAt = time.Time{}
		u.eachRetire()
		if err := u.Refresh(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (u *unit) eachRetire() {
	for _, p := range u.parts {
		p.retired = time.Time{}
	}
}

// later moves the mesh's clock, and lets the replicas report at that time.
func (b *bench) later(by time.Duration, units ...*unit) {
	b.t.Helper()
	b.offset += by
	testkit.SetClockOffset(b.db, b.offset)
	b.round(units...)
}

func (b *bench) ask(key string) (Rotation, error) {
	var out Rotation
	err := pg.InTx(b.ctx, b.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		out, _, err = Ask(ctx, tx, Request{Kind: JoinState, IdempotencyKey: key, By: "ada", Reason: "yearly"})
		return err
	})
	return out, err
}

// states returns the states of the keys in the order in which they were made.
func (b *bench) states() string {
	b.t.Helper()
	rows, err := ReadKeys(b.ctx, b.db.Pool(pg.RoleRecovery))
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for _, row := range rows {
		out = append(out, row.State)
	}
	return strings.Join(out, " ")
}

func (b *bench) want(states string) {
	b.t.Helper()
	if got := b.states(); got != states {
		b.t.Fatalf("the keys are %q, want %q", got, states)
	}
}

func (u *unit) signs() string { return pki.KeyID(u.view.Signing.Public().(ed25519.PublicKey)) }

func refusedWith(t *testing.T, err error, reason commonv1.Reason, parts ...string) {
	t.Helper()
	f, ok := fault.As(err)
	if !ok || f.Reason != reason {
		t.Fatalf("%v, want %v", err, reason)
	}
	for _, part := range parts {
		if !strings.Contains(f.Public+" "+f.Remedy, part) {
			t.Errorf("%q / %q names no %q", f.Public, f.Remedy, part)
		}
	}
}

const differs = commonv1.Reason_REASON_SIGNING_KEYS_DIFFER

func TestAReplicaWhoseDirectoryDiffersDoesNotStart(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	a := b.signer(dir)
	b.want("signing")
	// A replica with the same directory starts, and signs with the same key.
	if again := b.signer(dir); again.signs() != a.signs() {
		t.Fatal("two replicas of one directory sign with two keys")
	}
	// A replica with another directory, which is empty, makes no key of its own.
	empty := t.TempDir()
	_, err := b.open(pg.RoleRecovery, signer(empty))
	refusedWith(t, err, differs, a.signs(), "join-000001.pem", empty)
	if entries, err := os.ReadDir(empty); err != nil || len(entries) != 0 {
		t.Fatalf("the empty directory holds %v, %v", entries, err)
	}
	// A replica whose directory has an unknown key beside the right one does not start either.
	other := t.TempDir()
	copyFile(t, filepath.Join(dir, "join-000001.pem"), filepath.Join(other, "join-000001.pem"))
	stray, err := DirFiles(other, "join-").newKey(1, JoinState, nil)
	if err != nil {
		t.Fatal(err)
	}
	stray.file = "join-000009.pem"
	if err := DirFiles(other, "join-").write(stray, JoinState); err != nil {
		t.Fatal(err)
	}
	_, err = b.open(pg.RoleRecovery, signer(other))
	refusedWith(t, err, differs, stray.id, "join-000009.pem")
	if err := os.Remove(filepath.Join(other, "join-000009.pem")); err != nil {
		t.Fatal(err)
	}
	b.signer(other)
	// A verifier whose file names none of the keys.
	pinned := filepath.Join(t.TempDir(), "join.pub")
	set, err := pki.NewKeySet(stray.public())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(pinned, []byte(set.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = b.open(pg.RoleNodeAPI, Part{Kind: JoinState, Pinned: pinned})
	refusedWith(t, err, differs, pinned)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Two replicas with directories of their own: the new key is in one of them, and does not sign before its file was
// copied.
func TestAKeySignsOnceEachReplicaHoldsIt(t *testing.T) {
	b := newBench(t)
	one, two := t.TempDir(), t.TempDir()
	a := b.signer(one)
	copyFile(t, filepath.Join(one, "join-000001.pem"), filepath.Join(two, "join-000001.pem"))
	c := b.signer(two)
	v, pinned := b.verifier(a)
	first := a.signs()
	if _, err := b.ask("r1"); err != nil {
		t.Fatal(err)
	}
	b.round(a, c, v)
	b.want("signing verify_only")
	b.later(time.Minute, c, v, a, c, v)
	b.want("signing verify_only")
	rows, err := ReadKeys(b.ctx, b.db.Pool(pg.RoleRecovery))
	if err != nil {
		t.Fatal(err)
	}
	next := rows[1]
	if !strings.Contains(next.NeededBy, c.id) || !strings.Contains(next.NeededBy, next.File) ||
		strings.Contains(next.NeededBy, a.id) {
		t.Fatalf("it waits for %q", next.NeededBy)
	}
	// Each replica verifies with the new key by now, whether or not it has the file.
	for name, u := range map[string]*unit{"a": a, "c": c, "nodeapi": v} {
		if !u.view.Verify.Has(next.KeyID) {
			t.Errorf("%s does not verify with the new key", name)
		}
	}
	// A second rotation is refused until the first is over.
	_, err = b.ask("r2")
	refusedWith(t, err, commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY, next.KeyID)
	copyFile(t, filepath.Join(one, next.File), filepath.Join(two, next.File))
	b.round(c, v, a, c, v)
	b.want("verifying_after signing")
	if a.signs() != next.KeyID || c.signs() != next.KeyID || first == next.KeyID {
		t.Fatalf("a signs with %s, c with %s", a.signs(), c.signs())
	}
	_, err = b.ask("r3")
	refusedWith(t, err, commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY, "can be asked for at")
	// The same request returns the same rotation.
	if again, err := b.ask("r1"); err != nil || again.KeyID != next.KeyID {
		t.Fatalf("asked again: %+v, %v", again, err)
	}
	b.later(JoinState.Overlap()+time.Second, c, v, a, c, v)
	b.want("retired signing")
	if a.view.Verify.Has(first) || v.view.Verify.Has(first) {
		t.Error("a retired key verifies still")
	}
	// A verifier that was given only the first key learns the present one by the chain, even after the first is retired.
	if _, err := b.open(pg.RoleNodeAPI, Part{Kind: JoinState, Pinned: pinned}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.ask("r4"); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.want("retired signing verify_only")
}

func TestARotationGoesOnAfterAKillAtEachOfItsPoints(t *testing.T) {
	for _, point := range []string{"after_file", "before_commit"} {
		t.Run(point, func(t *testing.T) {
			b := newBench(t)
			dir := t.TempDir()
			a := b.signer(dir)
			if _, err := b.ask("r1"); err != nil {
				t.Fatal(err)
			}
			killed := false
			a.interrupt = func(at string) error {
				if at == point {
					killed = true
					return errKilled
				}
				return nil
			}
			if err := a.Refresh(b.ctx); !errors.Is(err, errKilled) || !killed {
				t.Fatalf("%v", err)
			}
			b.want("signing")
			files := len(pems(t, dir))
			// Another process starts in its place, and stores the key of the file.
			a = b.signer(dir)
			b.round(a)
			b.want("signing verify_only")
			if got := len(pems(t, dir)); got != files || got != 2 {
				t.Fatalf("%d key files, after the kill %d", got, files)
			}
			b.restartEach(dir)
		})
	}
}

// restartEach restarts the replica in each state that follows in a rotation.
func (b *bench) restartEach(dir string) {
	b.t.Helper()
	a := b.signer(dir)
	b.want("signing verify_only")
	b.later(leastAge+time.Second, a)
	a = b.signer(dir)
	for range 2 {
		b.later(liveFor+time.Second, a) // the replicas that were killed no longer count as live
	}
	b.want("verifying_after signing")
	a = b.signer(dir)
	b.later(JoinState.Overlap(), a)
	b.want("retired signing")
	if a = b.signer(dir); a.signs() == "" {
		b.t.Fatal("no key signs")
	}
}

func pems(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.pem"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// A restored database lacks the last rotation, but its file is there, and the rotation is made again.
func TestARotationThatTheDatabaseLostIsMadeAgain(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	a := b.signer(dir)
	if _, err := b.ask("r1"); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.later(leastAge+time.Second, a)
	b.round(a)
	b.want("verifying_after signing")
	second := a.signs()
	owner := b.db.OwnerPool()
	for _, sql := range []string{
		`DELETE FROM mesh.signing_key WHERE state = 'signing'`, `UPDATE mesh.signing_key SET state = 'signing'`,
		`DELETE FROM mesh.key_rotation`,
	} {
		if _, err := owner.Exec(b.ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	a = b.signer(dir)
	b.later(liveFor+time.Second, a)
	b.round(a)
	b.want("verifying_after signing")
	if a.signs() != second {
		t.Fatalf("%s signs, want %s", a.signs(), second)
	}
}

func TestABadFileIsRefusedAndWhatWasLoadedServes(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	a := b.signer(dir)
	first := a.signs()
	path := filepath.Join(dir, "join-000001.pem")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	endorser := privateKey{id: first, private: a.view.Signing}
	foreign, err := DirFiles(dir, "join-").newKey(2, Assertion, &endorser)
	if err != nil {
		t.Fatal(err)
	}
	foreign.file = "join-000002.pem"
	for name, c := range map[string]struct {
		spoil func() error
		want  string
	}{
		"malformed": {func() error { return os.WriteFile(path, whole[:20], 0o600) }, "no Ed25519 private key"},
		"of a wrong mode": {func() error {
			return errors.Join(os.WriteFile(path, whole, 0o600), os.Chmod(path, 0o644)) // the mode is the point
		}, "mode is 0644"},
		"missing": {func() error { return os.Remove(path) }, "is not in"},
		"of another kind": {func() error {
			return errors.Join(os.WriteFile(path, whole, 0o600), os.Chmod(path, 0o600),
				DirFiles(dir, "join-").write(foreign, Assertion))
		}, "no key serves two kinds"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.spoil(); err != nil {
				t.Fatal(err)
			}
			var problems []string
			a.deps.OnProblems = func(_ context.Context, list []string) { problems = list }
			b.round(a)
			if a.signs() != first || a.view.Verify == nil || !a.view.Verify.Has(first) {
				t.Error("what was loaded does not serve")
			}
			if !strings.Contains(fmt.Sprint(problems), c.want) {
				t.Errorf("the problems are %q, want %q", problems, c.want)
			}
			if name == "of another kind" {
				return
			}
			if _, err := b.open(pg.RoleRecovery, signer(dir)); !fault.Has(err, differs) {
				t.Errorf("a replica started: %v", err)
			}
		})
	}
}

// A row alone is not trusted: a key needs an endorsement by a trusted one.
func TestARowWithoutAnEndorsementIsNotBelieved(t *testing.T) {
	files := DirFiles(t.TempDir(), "join-")
	first, err := files.newKey(1, JoinState, nil)
	if err != nil {
		t.Fatal(err)
	}
	second, err := files.newKey(2, JoinState, &first)
	if err != nil {
		t.Fatal(err)
	}
	third, err := files.newKey(3, JoinState, &second)
	if err != nil {
		t.Fatal(err)
	}
	rowOf := func(k privateKey) Key {
		return Key{
			Kind: JoinState, KeyID: k.id, PublicKey: k.public(), State: VerifyOnly, EndorsedBy: k.endorsedBy,
			Endorsement: k.endorsement,
		}
	}
	pinned := map[string]ed25519.PublicKey{first.id: first.public()}
	if got := Trusted(JoinState, pinned, []Key{rowOf(third), rowOf(second)}); got[second.id] == nil ||
		got[third.id] == nil {
		t.Errorf("a chain of two: %d keys", len(got))
	}
	forged := rowOf(third)
	forged.EndorsedBy = first.id
	other := rowOf(second)
	other.Kind = Assertion
	for name, row := range map[string]Key{
		"by a key that did not sign": forged, "of another kind": other,
		"without": {Kind: JoinState, KeyID: third.id, PublicKey: third.public()},
	} {
		if got := Trusted(row.Kind, pinned, []Key{row}); len(got) != 1 {
			t.Errorf("%s: %d keys are trusted", name, len(got))
		}
	}
}

func TestOnlyTheOwnerOfAKindWritesItsKeys(t *testing.T) {
	b := newBench(t)
	b.signer(t.TempDir())
	for _, role := range []string{pg.RoleLifecycle, pg.RoleNodeAPI, pg.RoleReadmodel} {
		_, err := b.db.Pool(role).Exec(b.ctx,
			`INSERT INTO mesh.signing_key (kind, key_id, public_key, state, file, made_by, made_at, state_at)
			VALUES ('join_state', 'x', decode(repeat('00', 32), 'hex'), 'verify_only', 'f', 'm', mesh.clock(), mesh.clock())`)
		if !testkit.IsPrivilege(err) {
			t.Errorf("%s inserts: %v", role, err)
		}
		tag, err := b.db.Pool(role).Exec(b.ctx, `UPDATE mesh.signing_key SET state = 'retired'`)
		if err == nil && tag.RowsAffected() > 0 {
			t.Errorf("%s changes a key of recovery's", role)
		}
	}
}
