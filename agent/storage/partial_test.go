package storage_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

const wsC = "01970000-0000-7000-8000-00000000000c"

// TestPartialRecordsAreRecovered leaves, for one workspace, each file that a full disk, a kill or a power cut can leave
// behind, and checks that this workspace, another one and a new one are served.
func TestPartialRecordsAreRecovered(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		content    func(whole []byte) []byte
	}{
		{"empty temporary file", "data.new", func([]byte) []byte { return nil }},
		{"half a temporary file", "data.new", func(whole []byte) []byte { return whole[:len(whole)/2] }},
		{"empty record", "data", func([]byte) []byte { return nil }},
		{"half a record", "data", func(whole []byte) []byte { return whole[:len(whole)/2] }},
		{"record of zeros", "data", func(whole []byte) []byte { return make([]byte, len(whole)) }},
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(tc.name, func(t *testing.T) {
				testkit.IO(t)
				dir := t.TempDir()
				asked := &quota{held: true, asked: map[string]uint32{}}
				s := open(t, dir, asked)
				hurt, err := s.Allocate(t.Context(), wsA, "data", 1<<20)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.Allocate(t.Context(), wsB, "data", 1<<20); err != nil {
					t.Fatal(err)
				}
				record := filepath.Join(dir, "meta", wsA, "data")
				whole, err := os.ReadFile(record)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "meta", wsA, tc.file), tc.content(whole), 0o600); err != nil {
					t.Fatal(err)
				}
				if restarted {
					s = open(t, dir, asked)
				}
				fresh, err := s.Allocate(t.Context(), wsC, "data", 1<<20)
				if err != nil {
					t.Errorf("another workspace: %v", err)
				}
				if _, err := s.List(t.Context()); err != nil {
					t.Errorf("list: %v", err)
				}
				again, err := s.Allocate(t.Context(), wsA, "data", 1<<20)
				if err != nil || !again.GetAdopted() || again.GetUid() != hurt.GetUid() {
					t.Errorf("the workspace itself: %v, %v", again, err)
				}
				if asked.asked[hurt.GetPath()] == asked.asked[fresh.GetPath()] {
					t.Errorf("two storages have one project: %v", asked.asked)
				}
				for _, workspace := range []string{wsA, wsB, wsC} {
					if _, err := s.Release(t.Context(), workspace, "data"); err != nil {
						t.Errorf("release: %v", err)
					}
				}
				for _, tree := range []string{"storage", "meta"} {
					if left, err := os.ReadDir(filepath.Join(dir, tree)); err != nil || len(left) != 0 {
						t.Errorf("left in %s: %v, %v", tree, left, err)
					}
				}
			})
		}
	}
}
