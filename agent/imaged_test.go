package agent_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// Scenario: a machine is imaged from another, ledger included, and enrolled anew: the ledger stays the other node's.
func TestAnImagedMachineBeginsALedgerOfItsOwn(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	first := m.nodeID
	path := filepath.Join(cfg.StateDir, agent.LedgerFile)
	l, err := ledger.Open(ledger.Config{Path: path, NodeID: first})
	if err != nil {
		t.Fatal(err)
	}
	id := l.ID()
	_, err = l.Deliver(t.Context(), ledger.Delivery{
		Key: ledger.Key{TaskID: ids.New(), Attempt: 1}, Type: commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY,
		WorkspaceID: ids.New(), Epoch: 1, OpSeq: 1, ExpiresAt: time.Now().Add(time.Minute), Envelope: []byte("envelope"),
		Signature: []byte("signature"), KeyID: "k",
		Start: true,
	})
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}

	m.mu.Lock()
	m.nodeID, m.instance = ids.New(), "forces the host to enrol anew"
	second := m.nodeID
	m.mu.Unlock()
	file := filepath.Join(cfg.EtcDir, "node-agent.env")
	env, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(env, []byte(envfile.Token+"=gbt_another_token_of_an_operator\n")...),
		0o600); err != nil {
		t.Fatal(err)
	}
	_, done := run(t, open(t, cfg))
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "start the agent again") {
			t.Fatalf("Run = %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on with the other node's ledger")
	}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	hello := m.hellos[len(m.hellos)-1]
	if hello.GetLedgerId() == "" || hello.GetLedgerId() == id || len(hello.GetTasksInFlight()) != 0 {
		t.Errorf("hello with ledger %s, was %s, and tasks %v", hello.GetLedgerId(), id, hello.GetTasksInFlight())
	}
	aside, err := filepath.Glob(path + ".of-node-" + first + "-*")
	if err != nil || len(aside) != 1 {
		t.Fatalf("set aside: %v, %v", aside, err)
	}
	recorded, err := agent.Diagnostics(cfg.StateDir, time.Now())
	if err != nil || !slices.ContainsFunc(recorded,
		func(e diag.Entry) bool { return e.Code == "ledger_set_aside" && strings.Contains(e.Detail, first) }) {
		t.Errorf("diagnostics %v, %v", recorded, err)
	}
	for file, want := range map[string]ledger.Config{
		path:     {Path: path, NodeID: second},
		aside[0]: {Path: aside[0], NodeID: first},
	} {
		l, err := ledger.Open(want)
		if err != nil {
			t.Fatal(err)
		}
		if l.Foreign() != "" || (len(l.InFlight(0)) == 1) != (file != path) {
			t.Errorf("%s: foreign %q, in flight %v", file, l.Foreign(), l.InFlight(0))
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
