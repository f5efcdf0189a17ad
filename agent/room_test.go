package agent_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/cgroup"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	workspaceA = "01970000-0000-7000-8000-00000000000a"
	workspaceB = "01970000-0000-7000-8000-00000000000b"
)

// result waits for the result of a task.
func (m *mesh) result(id string) *nodev1.TaskResult {
	m.t.Helper()
	for {
		select {
		case result := <-m.results:
			if result.GetTask().GetTaskId() == id {
				return result
			}
		case <-time.After(time.Minute):
			m.t.Fatal("no result")
		}
	}
}

func (m *mesh) storage(workspace string, op int64) *nodev1.TaskResult {
	m.t.Helper()
	return m.result(m.request(workspace, op, commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE,
		&nodev1.StorageAllocate{Name: "data", SizeBytes: 1 << 20}))
}

// disk returns the last disk state in the heartbeats, once it is as wanted.
func (m *mesh) disk(full bool) *commonv1.StateDisk {
	m.t.Helper()
	var last *commonv1.StateDisk
	testkit.Eventually(m.t, testkit.Patience, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if last = m.host.GetStateDisk(); last == nil || last.GetFull() != full {
			return fmt.Errorf("the facts say %v", last)
		}
		return nil
	})
	return last
}

// diagnosed waits for a report of the full disk over the stream.
func (m *mesh) diagnosed(ended bool) {
	m.t.Helper()
	testkit.Eventually(m.t, testkit.Patience, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, d := range m.diagnostics {
			if d.GetCode() == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL && (d.GetEndedAt() != nil) == ended {
				return nil
			}
		}
		return fmt.Errorf("told were %v", m.diagnostics)
	})
}

// TestAFullDiskIsReportedAndSurvived fills the disk under a connected agent: it keeps its stream and its workload,
// opens a new session, refuses tasks that need more disk space with the reason, reports it in the host's record and
// over the stream, and works again by itself once there is room.
func TestAFullDiskIsReportedAndSurvived(t *testing.T) {
	m := newMesh(t)
	disk := testkit.SmallDisk(t, 24<<20)
	cfg := config(disk)
	cfg.UIDDir, cfg.RoomEvery = filepath.Join(t.TempDir(), "uids"), 20*time.Millisecond
	enrolled(t, m, cfg)
	end, done := run(t, open(t, cfg))
	m.wait("admitted")
	if r := m.storage(workspaceA, 1); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("with room: %v", r)
	}
	release := testkit.Fill(t, disk)
	if full := m.disk(true); full.GetPath() != cfg.StateDir || full.GetDetail() == "" {
		t.Errorf("told is %v", full)
	}
	m.diagnosed(false)
	entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
	if err != nil || !slices.ContainsFunc(entries, isDiskFull) {
		t.Errorf("the host's record: %v, %v", entries, err)
	}
	r := m.storage(workspaceB, 1)
	if r.GetReason() != commonv1.Reason_REASON_NODE_DISK_FULL || !strings.Contains(r.GetError(), cfg.StateDir) {
		t.Errorf("on the full disk: %v", r)
	}
	m.cut()
	m.wait("admitted") // the join state of the new session was written
	release()
	m.disk(false)
	m.diagnosed(true)
	if r := m.storage(workspaceB, 2); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("with room again: %v", r)
	}
	select {
	case err := <-done:
		t.Fatalf("the agent ended: %v", err)
	default:
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestTheAgentStartsOnAFullDisk: a restart needs no room.
func TestTheAgentStartsOnAFullDisk(t *testing.T) {
	m := newMesh(t)
	disk := testkit.SmallDisk(t, 24<<20)
	cfg := config(disk)
	cfg.RoomEvery = 20 * time.Millisecond
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	release := testkit.Fill(t, disk)
	end, _ = run(t, open(t, cfg))
	m.wait("admitted")
	m.disk(true)
	if r := m.storage(workspaceA, 1); r.GetReason() != commonv1.Reason_REASON_NODE_DISK_FULL {
		t.Errorf("on the full disk: %v", r)
	}
	release()
	m.disk(false)
	if r := m.storage(workspaceA, 2); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("with room again: %v", r)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// journalFile is there only while a change of the identity is under way.
const journalFile = "state/journal.json"

// keyMaterial are files that only a new enrolment, or a person, brings back. The agent names them.
var keyMaterial = []string{
	"etc/cert.pem", "etc/key.pem", "etc/cert-next.pem", "etc/key-next.pem", "etc/key-pending.pem",
	"etc/key-renewing.pem", journalFile, "etc/node-agent.env", "etc/ca-bundle.crt", "etc/recovery-ca-bundle.crt", "state/node.json", "state/join-state.json",
}

// damages are the states in which a full disk, a kill or a power cut can leave a file that was not written in order.
var damages = []struct {
	name string
	of   func(whole []byte) []byte
}{
	{"empty", func([]byte) []byte { return nil }},
	{"stub", func(whole []byte) []byte { return whole[:min(len(whole), 20)] }},
	{"cut", func(whole []byte) []byte { return whole[:len(whole)/2] }},
	{"zeros", func(whole []byte) []byte {
		return append(slices.Clone(whole[:len(whole)/2]), make([]byte, len(whole)-len(whole)/2)...)
	}},
}

// TestEveryFileOfTheAgentMayBeLost empties, cuts and half-writes every file that a working agent has on its host, one
// after the other. The agent starts each time; it serves another workspace, unless the file is key material: then it
// records which, and a bundle of an operator's brings it back.
func TestEveryFileOfTheAgentMayBeLost(t *testing.T) {
	m := newMesh(t)
	root := publicDir(t)
	if err := os.Mkdir(filepath.Join(root, "host"), 0o711); err != nil { // workspaces pass
		t.Fatal(err)
	}
	cfg := config(filepath.Join(root, "host"))
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if r := m.storage(workspaceA, 1); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatal(r)
	}
	if r := m.result(m.request(workspaceA, 2, commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY,
		workload())); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatal(r)
	}
	if r := m.result(m.request(workspaceA, 3, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP,
		&nodev1.WorkloadRef{Name: "app"})); r.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatal(r)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	prepareFiles(t, m, cfg)
	files := append(filesUnder(t, filepath.Join(root, "host")), journalFile)
	journal := journalOf(t, m, cfg, filepath.Join(root, "scratch"))
	for _, needed := range append(slices.Clone(keyMaterial), "state/ledger.db", "state/diagnostics.json", "state/lock",
		"state/storage/"+workspaceA+"/data", "state/.room-reserve") {
		if !slices.Contains(files, needed) {
			t.Errorf("%s is not among what the agent wrote: %q", needed, files)
		}
	}
	good := filepath.Join(root, "good")
	copyTree(t, filepath.Join(root, "host"), good)
	for _, file := range files {
		for _, damage := range damages {
			t.Run(strings.ReplaceAll(file, "/", "_")+"_"+damage.name, func(t *testing.T) {
				if err := os.RemoveAll(filepath.Join(root, "host")); err != nil {
					t.Fatal(err)
				}
				copyTree(t, good, filepath.Join(root, "host"))
				path := filepath.Join(root, "host", file)
				whole := journal
				if file != journalFile {
					var err error
					if whole, err = os.ReadFile(path); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.WriteFile(path, damage.of(whole), 0o600); err != nil {
					t.Fatal(err)
				}
				startsAndServes(t, cfg, file, whole)
			})
		}
	}
}

// startsAndServes starts the agent over damaged files.
func startsAndServes(t *testing.T, cfg agent.Config, file string, whole []byte) {
	t.Helper()
	a, err := agent.New(t.Context(), agent.Deps{Logger: testkit.Logger(t)}, cfg)
	name := filepath.Base(file)
	if slices.Contains(keyMaterial, file) {
		var text strings.Builder
		fmt.Fprint(&text, err)
		entries, readErr := agent.Diagnostics(cfg.StateDir, time.Now())
		for _, e := range entries {
			text.WriteString("\n" + e.Code + " " + e.Detail)
		}
		said := text.String()
		if err == nil {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		}
		if readErr != nil || !strings.Contains(said, name) {
			t.Errorf("%s is not named as what is needed (%v):\n%s", name, readErr, said)
		}
		return
	}
	if err != nil {
		t.Fatalf("the agent does not start without %s (%d bytes): %v", file, len(whole), err)
	}
	owner := ownerOf(t, cfg)
	defer func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := agent.Serve(t.Context(), a, workspaceB); err != nil {
		t.Errorf("another workspace: %v", err)
	}
	if err := agent.Serve(t.Context(), a, workspaceA); err != nil {
		t.Errorf("the workspace itself: %v", err)
	}
	if now := ownerOf(t, cfg); now != owner {
		t.Errorf("its storage has passed from user %d to %d", owner, now)
	}
	if strings.HasPrefix(file, "state/workloads/") {
		if err := agent.Redeploy(t.Context(), a, workspaceA, workload()); err != nil {
			t.Errorf("its workload: %v", err)
		}
	}
}

// issue stores a certificate for the pending key in the other slot.
func issue(m *mesh, s *identity.Store) error {
	key, err := s.RenewalKey()
	if err != nil {
		return err
	}
	der, err := m.nodes.Sign(pki.NodeID(agenttest.TrustDomain, m.nodeID), key.Public(), time.Now().Add(-time.Minute),
		time.Now().Add(time.Hour))
	if err != nil {
		return err
	}
	return s.StoreIssued(pki.EncodeChain([][]byte{der}), "")
}

// prepareFiles makes the files that the agent writes only at times: the next certificate, the keys of requests, a diagnostic.
func prepareFiles(t *testing.T, m *mesh, cfg agent.Config) {
	t.Helper()
	s, err := identity.Open(identity.Dirs{Etc: cfg.EtcDir, State: cfg.StateDir})
	if err != nil {
		t.Fatal(err)
	}
	err = issue(m, s)
	_, pendingErr := s.PendingKey()
	_, renewalErr := s.RenewalKey()
	log, diagErr := diag.Open(diag.Config{Path: filepath.Join(cfg.StateDir, agent.DiagnosticsFile)})
	if err := errors.Join(err, pendingErr, renewalErr, diagErr, s.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := log.Record(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED, "a test", 0); err != nil {
		t.Fatal(err)
	}
}

// journalOf returns the journal of a change that ended half way, made on a copy of the agent's files.
func journalOf(t *testing.T, m *mesh, cfg agent.Config, scratch string) []byte {
	t.Helper()
	copyTree(t, filepath.Dir(cfg.StateDir), scratch)
	ended := errors.New("the process ends here")
	s, err := identity.Open(identity.Dirs{Etc: filepath.Join(scratch, "etc"), State: filepath.Join(scratch, "state")},
		identity.WithStep(func(point string) error {
			if strings.HasSuffix(point, ".cert-next.before_write") {
				return ended
			}
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	if err := issue(m, s); !errors.Is(err, ended) {
		t.Fatal(err)
	}
	journal, err := os.ReadFile(filepath.Join(scratch, journalFile))
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	return journal
}

func workload() *nodev1.WorkloadDeploy {
	return &nodev1.WorkloadDeploy{
		Workload:    &nodev1.Workload{Name: "app", Command: []string{"/bin/sleep", "100000"}},
		StorageName: "data",
	}
}

// ownerOf returns the uid of the owner of workspaceA's storage.
func ownerOf(t *testing.T, cfg agent.Config) uint32 {
	t.Helper()
	info, err := os.Stat(filepath.Join(cfg.StateDir, "workspaces", "storage", workspaceA, "data"))
	if err != nil {
		t.Fatal(err)
	}
	st, _ := info.Sys().(*syscall.Stat_t)
	return st.Uid
}

// publicDir is a directory that workspaces may pass through.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpuaas-agent-") //nolint:usetesting // t.TempDir is closed to the uids of workspaces
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // workspaces pass
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(cgroup.RemoveBelow(dir), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// filesUnder returns the agent's own files, without files of workspaces and outputs.
func filesUnder(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if !strings.HasPrefix(rel, "state/workspaces/") {
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func copyTree(t *testing.T, from, to string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// of this test
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatal(errors.Join(err, errors.New(string(out))))
	}
}

func isDiskFull(e diag.Entry) bool { return e.Code == "state_disk_full" && e.EndedAt.IsZero() }
