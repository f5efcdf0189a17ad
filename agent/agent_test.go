package agent_test

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

const firstToken = "gbt_0123456789abcdef0123456789abcdef_canaryAAAAAAAAAAAAAAAAAAAA"

func enrolled(t *testing.T, m *mesh, cfg agent.Config) {
	t.Helper()
	a := open(t, cfg)
	if err := a.Enrol(t.Context(), agent.Bundle{Path: m.bundle(firstToken)}); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestEnrolsConnectsWorksAndComesBack(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	enrolled(t, m, cfg) // the same bundle again changes nothing
	if m.instances != 1 {
		t.Fatalf("%d enrolments", m.instances)
	}
	for round := range 2 {
		end, _ := run(t, open(t, cfg))
		m.wait("admitted")
		id := m.probe("nonce")
		select {
		case result := <-m.results:
			var out nodev1.ProbeNoopOutput
			if err := proto.Unmarshal(result.GetOutput(), &out); err != nil || out.GetNonce() != "nonce" {
				t.Errorf("output %v, %v", &out, err)
			}
			if result.GetTask().GetTaskId() != id || result.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
				t.Errorf("result %v", result)
			}
		case <-time.After(time.Minute):
			t.Fatal("no result")
		}
		if err := end(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		m.wait("goodbye")
	}
	first, last := m.hellos[0], m.hellos[len(m.hellos)-1]
	if first.GetLedgerId() == "" || first.GetLedgerId() != last.GetLedgerId() ||
		first.GetNodeInstanceId() != last.GetNodeInstanceId() {
		t.Errorf("ledger %s and %s, instance %s and %s", first.GetLedgerId(), last.GetLedgerId(), first.GetNodeInstanceId(),
			last.GetNodeInstanceId())
	}
	if len(first.GetTaskTypes()) < 8 || len(first.GetHost().GetGpus()) != 2 ||
		!first.GetHost().GetGpus()[0].GetSimulated() || first.GetProfile().GetFingerprint() != "fp" {
		t.Errorf("hello %v", first)
	}
	noSecrets(t, cfg)
}

// noSecrets fails the test if a file under the state directory has the token, which was spent.
func noSecrets(t *testing.T, cfg agent.Config) {
	t.Helper()
	for _, dir := range []string{cfg.EtcDir, cfg.StateDir} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			if strings.Contains(string(data), "canary") {
				t.Errorf("the token is in %s", path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestRunEnrolsByItselfWhereATokenIsHeld(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.OpsListen = "127.0.0.1:0"
	a := open(t, cfg)
	end, _ := run(t, a)
	// The agent waits without a token; an operator brings the files.
	bundle := m.bundle(firstToken)
	for _, name := range []string{"recovery-ca-bundle.crt", "ca-bundle.crt", "node-agent.env"} {
		data, err := os.ReadFile(filepath.Join(bundle, name))
		if err != nil {
			t.Fatal(err)
		}
		tmp := filepath.Join(cfg.EtcDir, "."+name)
		if err := errors.Join(os.WriteFile(tmp, data, 0o600), os.Rename(tmp, filepath.Join(cfg.EtcDir, name))); err != nil {
			t.Fatal(err)
		}
	}
	m.wait("admitted")
	testkit.Eventually(t, testkit.Patience, func() error {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+a.OpsAddr()+"/readyz", nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	})
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

func TestReplacedInstanceEndsForGood(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	m.denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, ""), "")
	_, done := run(t, open(t, cfg))
	select {
	case err := <-done:
		if !errors.Is(err, agent.ErrReplaced) {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	other := config(t.TempDir())
	a := open(t, other)
	m.enrolFail = fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "")
	if err := a.Enrol(t.Context(), agent.Bundle{Path: m.bundle(firstToken)}); !errors.Is(err, agent.ErrReplaced) {
		t.Errorf("Enrol = %v", err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// TestARefusedIdentityWaitsForABundle: retired or unknown, the agent stays, records why, and takes a bundle that comes.
func TestARefusedIdentityWaitsForABundle(t *testing.T) {
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_IDENTITY_RETIRED,
		commonv1.Reason_REASON_JOIN_STATE_LOST,
	} {
		t.Run(reason.String(), func(t *testing.T) {
			m := newMesh(t)
			cfg := config(t.TempDir())
			enrolled(t, m, cfg)
			m.denial = fault.ToDenial(fault.New(reason, ""), "")
			end, done := run(t, open(t, cfg))
			testkit.Eventually(t, testkit.Patience, func() error {
				entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
				times := int64(0)
				for _, e := range entries {
					times += e.Count
				}
				if times < 3 {
					return errors.Join(err, errors.New("too few records"))
				}
				return err
			})
			select {
			case err := <-done:
				t.Fatalf("Run ended: %v", err)
			default:
			}
			m.mu.Lock()
			m.denial = nil
			m.mu.Unlock()
			env, err := os.ReadFile(filepath.Join(cfg.EtcDir, "node-agent.env"))
			if err != nil {
				t.Fatal(err)
			}
			m.mu.Lock()
			m.instance = "forces the host to enrol anew"
			m.mu.Unlock()
			if err := os.WriteFile(filepath.Join(cfg.EtcDir, "node-agent.env"),
				append(env, []byte(envfile.Token+"=gbt_another_token_of_an_operator\n")...), 0o600); err != nil {
				t.Fatal(err)
			}
			m.wait("admitted")
			if m.instances != 2 {
				t.Errorf("%d enrolments", m.instances)
			}
			if err := end(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestConfigProblemsAreReportedTogether(t *testing.T) {
	err := agent.Config{
		EtcDir: "etc", StateDir: "state", WorkDir: "/x", UIDDir: "/y", SimulatedGPUs: 1000, RoomEvery: -time.Second,
		OpsListen: "0.0.0.0:1",
	}.Validate()
	for _, part := range []string{
		"etc directory", "state directory", "simulated GPUs", "time between checks for room", "loopback",
	} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
}

// TestTheBinaryLinksOnlyWhatAHostNeeds: an agent that linked a database driver or the authority would have to be
// patched for them on every machine.
func TestTheBinaryLinksOnlyWhatAHostNeeds(t *testing.T) {
	testkit.IO(t)
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps",
		"github.com/gpuaas/mesh/cmd/gpuaas-node-agent").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for _, banned := range []string{
			"github.com/smallstep/certificates", "github.com/jackc/pgx", "github.com/redis/",
			"github.com/riverqueue/", "github.com/gpuaas/mesh/services/",
		} {
			if strings.HasPrefix(dep, banned) {
				t.Errorf("links %s", dep)
			}
		}
	}
}
