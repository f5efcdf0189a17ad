package agent_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheLogOfARetryHasItsRecord: each line after which the agent tries again has the correlation id, the hash of the
// deduplication key, first seen, last seen and the count.
func TestTheLogOfARetryHasItsRecord(t *testing.T) {
	expired := func(m *mesh, fail error) {
		m.mu.Lock()
		m.enrolFail = fail
		m.mu.Unlock()
		m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	}
	refusal := fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "", fault.RetryAfter(time.Millisecond))
	for message, broken := range map[string]func(t *testing.T, m *mesh, cfg agent.Config, other []byte){
		"session not open": func(_ *testing.T, m *mesh, _ agent.Config, _ []byte) {
			m.deny(commonv1.Reason_REASON_UNAVAILABLE)
		},
		"not enrolled": func(t *testing.T, m *mesh, cfg agent.Config, _ []byte) {
			t.Helper()
			setToken(t, cfg, "gbt_an_old_token_of_an_operator")
			expired(m, refusal)
		},
		"not recovered": func(_ *testing.T, m *mesh, _ agent.Config, _ []byte) { expired(m, refusal) },
		"waiting for an operator": func(t *testing.T, m *mesh, cfg agent.Config, _ []byte) {
			t.Helper()
			setToken(t, cfg, "")
			expired(m, nil)
		},
		"trust not bootstrapped": func(t *testing.T, _ *mesh, cfg agent.Config, other []byte) {
			t.Helper()
			put(t, cfg, "ca-bundle.crt", other)
			put(t, cfg, "recovery-ca-bundle.crt", other)
		},
	} {
		t.Run(message, func(t *testing.T) {
			m, cfg, other := dwelling(t, 6)
			broken(t, m, cfg, other)
			lines := agenttest.NewCatcher(message)
			end, _ := run(t, openLogging(t, cfg, lines))
			select {
			case line := <-lines.Found:
				agenttest.CheckRetryLine(t, line)
			case <-time.After(testkit.Patience):
				t.Error("no such line")
			}
			if err := end(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
