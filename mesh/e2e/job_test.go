package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// cli returns a function that runs the client's program as a person would.
func cli(t test, c *cluster.Cluster) func(args ...string) []byte {
	t.Helper()
	roots, err := pki.ReadFile(c.Material.ServiceRoots())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "contexts.yaml")
	if err := contexts.Put(file, contexts.Context{
		Name: "e2e", Server: c.Plan.Addresses.Console, TrustDomain: cluster.TrustDomain, CAPEM: string(roots),
		Token: c.Token(),
	}, true); err != nil {
		t.Fatal(err)
	}
	return func(args ...string) []byte {
		t.Helper()
		// our own program
		cmd := exec.CommandContext(t.ctx, filepath.Join(meshtest.Programs(t), "gpuaas"), args...)
		cmd.Env = append(os.Environ(), contexts.EnvPath+"="+file)
		out, err := cmd.Output()
		if err != nil {
			why := ""
			if failed, ok := err.(*exec.ExitError); ok { //nolint:errorlint // as Output answers it
				why = string(failed.Stderr)
			}
			t.Fatalf("gpuaas %v: %v: %s%s", args, err, out, why)
		}
		return out
	}
}

// answers returns nil if a URL answers 200.
func answers(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}

func TestAWorkspaceIsProvisionedByTheRealPrograms(tt *testing.T) {
	t := beside(tt, 8*time.Minute)
	ctx := t.ctx
	c := start(t, cluster.Config{Nodes: 1, GPUs: 2, Replicas: 1})
	run := cli(t, c)
	run("tenants", "create", "acme")
	began := time.Now()
	run("workspaces", "create", "demo2", "--tenant", "acme", "--wait", "--timeout", "60s", "-o", "json")
	t.Logf("create to active: %.2f s", time.Since(began).Seconds())
	ws := workspace(t, c, "acme/demo2")
	if len(ws.GetEndpoints()) != 1 {
		t.Fatalf("endpoints %v", ws.GetEndpoints())
	}
	if err := answers(ctx, ws.GetEndpoints()[0].GetUrl()); err != nil {
		t.Fatal(err)
	}
	var task struct {
		TaskID string `json:"task_id"`
		State  string `json:"state"`
	}
	began = time.Now()
	if err := json.Unmarshal(run("nodes", "probe", "n1", "-o", "json"), &task); err != nil {
		t.Fatal(err)
	}
	t.Logf("probe: %.0f ms", time.Since(began).Seconds()*1000)
	var shown struct {
		State       string `json:"state"`
		Transitions []struct {
			State string `json:"state"`
		} `json:"transitions"`
	}
	t.must("the probe to succeed", 10*time.Second, func(context.Context) error {
		if err := json.Unmarshal(run("tasks", "get", task.TaskID, "-o", "json"), &shown); err != nil {
			return err
		}
		if shown.State != "succeeded" {
			return fmt.Errorf("the probe is %s", shown.State)
		}
		return nil
	})
	var states []string
	for _, tr := range shown.Transitions {
		states = append(states, tr.State)
	}
	if diff := cmp.Diff([]string{"queued", "dispatched", "delivered", "running", "succeeded"},
		slices.Compact(states)); diff != "" {
		t.Errorf("the probe's states: %s", diff)
	}
	readsOutput(t, c, run)
	run("workspaces", "decommission", "demo2", "--reason", "the test is over", "--yes")
	t.must("the workspace to be decommissioned", 30*time.Second, func(context.Context) error {
		if s := workspace(t, c, "acme/demo2").GetState().String(); s != "WORKSPACE_STATE_DECOMMISSIONED" {
			return fmt.Errorf("the workspace is %s", s)
		}
		return nil
	})
	checkWorld(t, c)
	checkLogs(t, c, nil)
}

// readsOutput reads the output of a workload through all services and its agent, and the last output of one that exits
// again and again.
func readsOutput(t test, c *cluster.Cluster, run func(args ...string) []byte) {
	t.Helper()
	const canary = "E2E-OUTPUT-91be"
	create := func(name, script string, more ...string) {
		run(append([]string{
			"workspaces", "create", name, "--tenant", "acme", "--command", "sh", "--arg=-c", "--arg", script, "--env",
			"API_KEY=" + canary,
		}, more...)...)
	}
	asked := time.Now()
	create("chats", `echo "key $API_KEY"; exec sleep 6000`, "--wait", "--timeout", "0")
	t.Logf("create to active without a probe: %.2f s", time.Since(asked).Seconds())
	t.must("the output", 10*time.Second, func(context.Context) error {
		if out := string(run("workspaces", "logs", "acme/chats")); out != "key ****\n" {
			return fmt.Errorf("the output is %q", out)
		}
		return nil
	})
	// It lives for a moment each time, and has no port that could be asked: it must not count as ready.
	create("loops", `echo "key $API_KEY"; echo "no such model"; sleep 0.3; exit 3`)
	began := time.Now()
	t.must("the crash loop to be found", time.Minute, func(context.Context) error {
		if ws := workspace(t, c, "acme/loops"); ws.GetState().String() != "WORKSPACE_STATE_FAILED" {
			return fmt.Errorf("the workspace is %s: %s", ws.GetState(), ws.GetWhyWaiting())
		}
		return nil
	})
	t.Logf("create to failed by a crash loop: %.1f s", time.Since(began).Seconds())
	var timeline struct {
		Items []struct {
			ErrorCode  string `json:"error_code"`
			ErrorLayer string `json:"error_layer"`
			LastOutput string `json:"last_output"`
		} `json:"items"`
	}
	if err := json.Unmarshal(run("workspaces", "timeline", "acme/loops", "-o", "json"), &timeline); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, i := range timeline.Items {
		found = found || i.ErrorCode == "workload_crash_loop" && i.ErrorLayer == "workload" &&
			i.LastOutput == "key ****\nno such model"
	}
	if !found {
		t.Errorf("the timeline holds no last output of the crash loop: %+v", timeline.Items)
	}
	crashesLater(t, c, run)
	run("workspaces", "decommission", "chats", "--reason", "the test is over", "--yes")
}

// crashesLater makes a workload exit again and again after its workspace was active: the workspace shows it to its
// tenant.
func crashesLater(t test, c *cluster.Cluster, run func(args ...string) []byte) {
	t.Helper()
	run("workspaces", "create", "later", "--tenant", "acme", "--command", "sh", "--arg=-c", "--arg",
		`touch is-up; while ! [ -e crash ]; do sleep 0.1; done; exit 3`, "--wait", "--timeout", "0")
	beside := ""
	err := filepath.WalkDir(c.Plan.InstanceDir, func(path string, _ fs.DirEntry, err error) error {
		if filepath.Base(path) == "is-up" {
			beside = filepath.Dir(path)
			return fs.SkipAll
		}
		if errors.Is(err, fs.ErrNotExist) { // other instances change theirs meanwhile
			return nil
		}
		return err
	})
	if err == nil && beside != "" {
		err = os.WriteFile(filepath.Join(beside, "crash"), nil, 0o644)
	}
	if err != nil || beside == "" {
		t.Fatalf("the workload is told to crash in %q: %v", beside, err)
	}
	t.must("the crash loop of an active workspace to be shown", 2*time.Minute, func(context.Context) error {
		ws := workspace(t, c, "acme/later")
		if ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			return fmt.Errorf("it is %s: %s", ws.GetState(), ws.GetLastError())
		}
		if ws.GetWorkloadReason() != "workload_crash_loop" || ws.GetUserState() != commonv1.UserState_USER_STATE_TEMPORARY ||
			!strings.Contains(ws.GetWorkloadDetail(), "crash loop: main, ") ||
			!strings.Contains(ws.GetWorkloadDetail(), "exited with status 3 at ") ||
			!strings.Contains(ws.GetNextAction(), "gpuaas workspaces logs acme/later --workload main --previous") {
			return fmt.Errorf("%s to its user, %q: %q, %q", ws.GetUserState(), ws.GetWorkloadReason(), ws.GetWorkloadDetail(),
				ws.GetNextAction())
		}
		return nil
	})
	if shown := string(run("workspaces", "get", "acme/later")); !strings.Contains(shown, "crash loop: main") {
		t.Errorf("`workspaces get` shows\n%s", shown)
	}
	run("workspaces", "decommission", "later", "--reason", "the test is over", "--yes")
}

func workspace(t test, c *cluster.Cluster, name string) *readmodelv1.Workspace {
	t.Helper()
	var ws *readmodelv1.Workspace
	t.must("an answer about "+name, 10*time.Second, func(ctx context.Context) error {
		resp, err := c.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: name})
		ws = resp.GetWorkspace()
		return err
	})
	return ws
}
