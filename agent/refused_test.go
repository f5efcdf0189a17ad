package agent_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Each refused task is answered with its reason, counted by it, and leaves a record on the host.
func TestRefusedTasksLeaveACountAndARecord(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.OpsListen = "127.0.0.1:0"
	enrolled(t, m, cfg)
	a := open(t, cfg)
	end, _ := run(t, a)
	m.wait("admitted")

	own := m.nodeID
	refused := func(reason commonv1.Reason) string {
		t.Helper()
		id := m.probe("x")
		select {
		case result := <-m.results:
			if result.GetTask().GetTaskId() != id || result.GetReason() != reason ||
				result.GetState() != commonv1.TaskState_TASK_STATE_FAILED {
				t.Errorf("result %v, want %v of %s", result, reason, id)
			}
		case <-time.After(time.Minute):
			t.Fatal("no result")
		}
		return id
	}
	change := func(f func()) { m.mu.Lock(); defer m.mu.Unlock(); f() }
	change(func() { m.nodeID = ids.New() })
	other := refused(commonv1.Reason_REASON_TASK_WRONG_NODE)
	change(func() { m.nodeID = own })
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	change(func() { m.signer = envelope.NewKey(private) })
	forged := refused(commonv1.Reason_REASON_TASK_SIGNATURE_INVALID)
	again := refused(commonv1.Reason_REASON_TASK_SIGNATURE_INVALID)

	metrics := fetch(t, "http://"+a.OpsAddr()+"/metrics")
	for reason, n := range map[string]int{"task_wrong_node": 1, "task_signature_invalid": 2} {
		if line := fmt.Sprintf("agent_tasks_refused_total{reason=%q} %d\n", reason, n); !strings.Contains(metrics, line) {
			t.Errorf("no %q", line)
		}
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var details []string
	for _, e := range entries {
		if e.Code == "task_refused" {
			details = append(details, e.Detail)
		}
	}
	text := strings.Join(details, "\n")
	for _, part := range []string{"task_wrong_node", other, "task_signature_invalid", forged, m.signer.ID()} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not recorded in %q", part, text)
		}
	}
	if len(details) != 2 || strings.Contains(text, again) {
		t.Errorf("%d records: a second refusal of one reason is counted, not recorded: %q", len(details), text)
	}
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	var body string
	testkit.Eventually(t, testkit.Patience, func() error {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		data, err := io.ReadAll(response.Body)
		body = string(data)
		return errors.Join(err, response.Body.Close())
	})
	return body
}
