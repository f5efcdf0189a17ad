package uid_test

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/gpuaas/mesh/agent/runtime/uid"
	"github.com/gpuaas/mesh/internal/testkit"
)

func open(t *testing.T, cfg uid.Config) *uid.Table {
	t.Helper()
	table, err := uid.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func TestOneIDForOneWorkspace(t *testing.T) {
	testkit.IO(t)
	cfg := uid.Config{Dir: t.TempDir()}
	a := open(t, cfg)
	first, err := a.Of("one")
	if err != nil || first < uid.DefaultFirst || first > uid.DefaultLast {
		t.Fatalf("id %d, %v", first, err)
	}
	if again, err := open(t, cfg).Of("one"); err != nil || again != first {
		t.Errorf("after a restart: %d, %v; want %d", again, err, first)
	}
}

// Several agents on one host share the directory and never give one id twice.
func TestSharedDirectory(t *testing.T) {
	testkit.IO(t)
	cfg := uid.Config{Dir: t.TempDir(), First: 300000, Last: 300063}
	var mu sync.Mutex
	owner := map[int]string{}
	var wg sync.WaitGroup
	for agent := range 4 {
		table := open(t, cfg)
		wg.Go(func() {
			for i := range 16 {
				ws := fmt.Sprintf("workspace-%d-%d", agent, i)
				id, err := table.Of(ws)
				mu.Lock()
				if err != nil {
					t.Error(err)
				} else if other, taken := owner[id]; taken {
					t.Errorf("id %d belongs to %s and %s", id, other, ws)
				}
				owner[id] = ws
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if _, err := open(t, cfg).Of("one too many"); err == nil {
		t.Error("a full range gave an id")
	}
}

func TestDisabledAndMalformed(t *testing.T) {
	testkit.IO(t)
	table := open(t, uid.Config{Disabled: true})
	if id, err := table.Of("x"); err != nil || id != os.Getuid() || table.Enabled() {
		t.Errorf("disabled: %d, %v", id, err)
	}
	if _, err := uid.Open(uid.Config{Dir: t.TempDir(), First: 0, Last: 10}); err == nil {
		t.Error("a range with root in it was taken")
	}
}
