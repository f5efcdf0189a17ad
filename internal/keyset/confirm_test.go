package keyset

import (
	"path/filepath"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// A replica that cannot read the database for too long, or whose view lacks the key that signs, signs nothing: its key
// may be retired meanwhile.
func TestAReplicaSignsNoLongerThanItKnowsThatItsKeySigns(t *testing.T) {
	b := newBench(t)
	shared, own := t.TempDir(), t.TempDir()
	a := b.signer(shared)
	first := pems(t, shared)[0]
	copyFile(t, first, filepath.Join(own, filepath.Base(first)))
	apart := b.signer(own)
	limit := JoinState.unconfirmedAfter()
	if limit >= JoinState.Overlap() {
		t.Fatalf("a replica signs for %s unconfirmed, and a key verifies for %s", limit, JoinState.Overlap())
	}
	ahead := time.Duration(0)
	apart.now = func() time.Time { return time.Now().Add(ahead) }
	b.round(apart)
	if err := apart.view.Confirmed(); err != nil {
		t.Fatalf("a replica that reads the set: %v", err)
	}

	// The replica cannot reach the database.
	ahead = limit - 10*time.Second
	if err := apart.view.Confirmed(); err != nil {
		t.Errorf("within the time: %v", err)
	}
	ahead = limit + time.Second
	refusedWith(t, apart.view.Confirmed(), commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED, string(JoinState))
	b.round(apart)
	if err := apart.view.Confirmed(); err != nil {
		t.Errorf("after it read the set again: %v", err)
	}

	// The replica reaches the database, but has no file of the key that signs: it was not live while the key was
	// distributed.
	if _, err := b.ask("r1"); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.later(liveFor+leastAge, a)
	b.round(a)
	b.want("verifying_after signing")
	before := apart.signs()
	b.round(apart)
	if apart.signs() != before {
		t.Fatal("the replica apart has the key")
	}
	if err := apart.view.Confirmed(); err != nil {
		t.Errorf("within the overlap: %v", err)
	}
	ahead += limit + time.Second
	b.round(apart)
	refusedWith(t, apart.view.Confirmed(), commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED)
	if err := a.view.Confirmed(); err != nil {
		t.Errorf("the replica with the key: %v", err)
	}
}
