package agent_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/internal/testkit"
)

// profileSent returns the fingerprint of an answer to a heartbeat, and counts those that have one.
func (m *mesh) profileSent() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.has != "" {
		m.beats++
	}
	return m.has
}

// sendProfile has answers to heartbeats carry a fingerprint, and returns once a few more have.
func (m *mesh) sendProfile(fingerprint string) {
	m.t.Helper()
	m.mu.Lock()
	m.has, m.beats = fingerprint, 0
	m.mu.Unlock()
	testkit.Eventually(m.t, testkit.Patience, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.beats < 5 {
			return fmt.Errorf("%d heartbeats", m.beats)
		}
		return nil
	})
}

// TestTheAnnouncedProfileIsCompared checks that a profile of the control plane that differs from that of the host is
// recorded once and reported once, and that the difference is over when both are the same again.
func TestTheAnnouncedProfileIsCompared(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	drift := func() []diag.Entry {
		t.Helper()
		all, err := agent.Diagnostics(cfg.StateDir, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		var out []diag.Entry
		for _, e := range all {
			if e.Code == "endpoint_profile_drift" {
				out = append(out, e)
			}
		}
		return out
	}
	m.sendProfile("fp")
	if got := drift(); len(got) != 0 {
		t.Fatalf("the same profile: %+v", got)
	}
	m.sendProfile("another")
	m.sendProfile("another")
	if got := drift(); len(got) != 1 || got[0].Count != 1 || !got[0].EndedAt.IsZero() ||
		got[0].RetryCorrelationID != "" {
		t.Fatalf("another profile: %+v", got)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, d := range m.diagnostics {
			if d.GetCount() == 1 && d.GetEndedAt() == nil {
				return nil
			}
		}
		return errors.New("the control plane is not told")
	})
	m.sendProfile("fp")
	if got := drift(); len(got) != 1 || got[0].EndedAt.IsZero() {
		t.Errorf("the same profile again: %+v", got)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
