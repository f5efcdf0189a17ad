package profiles_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

// killedURL is the environment variable by which TestKilledChild is given its database.
const killedURL = "GPUAAS_TEST_PROFILES_URL"

// TestAnActivationThatIsKilled kills a process between any two effects of an activation: the version is active with its
// event and the former one retiring, or nothing has changed; the next attempt goes through.
func TestAnActivationThatIsKilled(t *testing.T) {
	for _, tc := range []struct {
		point string
		done  bool
	}{
		{"recovery.profile.phase=kill", false},
		{"recovery.profile.phase=kill:2", false},
		{"recovery.profile.before_commit=kill", false},
		{"recovery.profile.after_commit=kill", true},
	} {
		t.Run(tc.point, func(t *testing.T) {
			s := newSite(t)
			if err := s.book.Configure(s.ctx, content("127.0.0.1:1", s.authorities.ServiceRoots.PEM())); err != nil {
				t.Fatal(err)
			}
			two, before := s.set(), s.events()
			report := t.TempDir() + "/report"
			// this test's own binary
			cmd := exec.CommandContext(s.ctx, os.Args[0], "-test.run=^TestKilledChild$")
			cmd.Env = append(os.Environ(), killedURL+"="+s.db.URL(pg.RoleRecovery), "GPUAAS_FAILPOINTS="+tc.point,
				"GPUAAS_FAILPOINT_REPORT="+report)
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatalf("it was not killed:\n%s", out)
			}
			name, _, _ := strings.Cut(tc.point, "=")
			if hits, err := os.ReadFile(report); err != nil || !strings.HasPrefix(string(hits), name+" ") {
				t.Fatalf("the point was not passed: %q, %v\n%s", hits, err, out)
			}
			want, events := map[int64]string{1: "active", 2: "announced"}, before
			if tc.done {
				want, events = map[int64]string{1: "retiring", 2: "active"}, before+2
			}
			if diff := cmp.Diff(want, s.phases()); diff != "" || s.events() != events {
				t.Fatalf("%d events, were %d: %s", s.events(), before, diff)
			}
			if err := activate(s.ctx, s.server, two); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "active"}, s.phases()); diff != "" ||
				s.events() != before+2 {
				t.Errorf("%d events, were %d: %s", s.events(), before, diff)
			}
		})
	}
}

// TestKilledChild is the other half of the test above: it activates version 2. Without a database it makes its own.
func TestKilledChild(t *testing.T) {
	url := os.Getenv(killedURL)
	if url == "" {
		s := newSite(t)
		if err := s.book.Configure(s.ctx, content("127.0.0.1:1", s.authorities.ServiceRoots.PEM())); err != nil {
			t.Fatal(err)
		}
		s.set()
		url = s.db.URL(pg.RoleRecovery)
	}
	two := &recoveryv1.ProfileVersion{Profile: &commonv1.Profile{Name: "site", Version: 2}}
	if err := activate(testkit.Context(t), profiles.NewServer(newBook(t, url, nil)), two); err != nil {
		t.Fatal(err)
	}
}
