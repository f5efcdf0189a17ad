package fleet

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/mesh/plans"
)

func TestTheCacheGivesWholeFleetsOfThisBuildAlone(t *testing.T) {
	c, err := openCache(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	small, large := plans.Size{Nodes: 1, Workspaces: 10}, plans.Size{Nodes: 1, Workspaces: 10, Events: true}
	place := func(c *cache, size plans.Size, now time.Time) (string, bool) {
		t.Helper()
		dir, there, unlock, err := c.place(size, now)
		if err != nil {
			t.Fatal(err)
		}
		unlock()
		return dir, there
	}
	begun, there := place(c, small, now)
	if there {
		t.Fatal("a fleet that was never loaded is there")
	}
	left := filepath.Join(begun, "left")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, there := place(c, small, now); there {
		t.Error("a fleet whose load did not end is used")
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("what a load left is there still: %v", err)
	}
	if err := finish(begun); err != nil {
		t.Fatal(err)
	}
	if _, there := place(c, small, now); !there {
		t.Error("a loaded fleet is not found")
	}
	if _, there := place(c, large, now); there {
		t.Error("a fleet without events serves for one with them")
	}
	if _, there := place(c, plans.Size{Nodes: 1, Workspaces: 10, Instances: true}, now); there {
		t.Error("a fleet of slots serves for one of instances")
	}
	if _, there := place(&cache{dir: c.dir, build: "another"}, small, now); there {
		t.Error("the fleet of another build is used")
	}
	if got, want := c.missing([]plans.Size{small, large}, now), needed(large); got != want {
		t.Errorf("%d bytes are missing, want %d", got, want)
	}
	if _, there := place(c, small, now.Add(freshFor+time.Minute)); there {
		t.Error("a fleet is used whose terms have passed")
	}
}

func TestAFleetThatIsInUseIsRefused(t *testing.T) {
	c, err := openCache(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	size := plans.Size{Nodes: 1, Workspaces: 10}
	_, _, unlock, err := c.place(size, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := c.place(size, time.Now()); !errors.Is(err, ErrInUse) {
		t.Errorf("a fleet that another run uses: %v", err)
	}
	unlock()
}

func TestAFleetWithoutRoomIsRefusedWithTheBytes(t *testing.T) {
	const need = 1 << 62
	err := room(t.TempDir(), need)
	if !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), "4611686018427387904 are needed") ||
		!strings.Contains(err.Error(), " bytes, and ") {
		t.Errorf("a fleet that does not fit: %v", err)
	}
}

// TestAFleetThatIsTooOldGoesBeforeRoomIsAsked checks that the bytes of a fleet that is too old are room for the one
// that is loaded in its place.
func TestAFleetThatIsTooOldGoesBeforeRoomIsAsked(t *testing.T) {
	l := loader{o: Options{Cache: t.TempDir()}}
	c, err := openCache(l.o.Cache)
	if err != nil {
		t.Fatal(err)
	}
	size := plans.Size{Nodes: 1, Workspaces: 1 << 40} // which no disk has room for
	dir, _, unlock, err := c.place(size, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	old := filepath.Join(dir, "old")
	if err := os.WriteFile(old, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.cached(t.Context(), []plans.Size{size}, nil); !errors.Is(err, ErrNoRoom) {
		t.Errorf("a fleet that does not fit: %v", err)
	}
	if _, err := os.Stat(old); !os.IsNotExist(err) {
		t.Errorf("what is too old takes room still: %v", err)
	}
}
