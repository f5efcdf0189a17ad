package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// Exit codes of the command line that scripts rely on.
const (
	exitRefused = 5
	exitMissing = 3
)

// operator runs the command line as one does, against a mesh.
type operator struct {
	t       test
	program string
	flags   []string
}

func newOperator(t test, c *cluster.Cluster) *operator {
	t.Helper()
	return &operator{t: t, program: filepath.Join(meshtest.Programs(t), "gpuaas"), flags: []string{
		"--server", c.Plan.Addresses.Console, "--ca-file", c.Material.ServiceRoots(), "--token-file",
		filepath.Join(c.Material.Dir, "person.token"), "--trust-domain", cluster.TrustDomain, "--request-timeout", "1m", "-o",
		"json",
	}}
}

// report is the result of a command: its data, or its refusal.
type report struct {
	code    int
	data    map[string]any
	refusal struct {
		Reason, Action, Message, Remedy string
		Unmet                           []string
	}
	raw string
}

// call runs one command to its end.
func (o *operator) call(ctx context.Context, args ...string) (report, error) {
	// the program under test
	cmd := exec.CommandContext(ctx, o.program, append(append([]string{}, args...), o.flags...)...)
	cmd.WaitDelay = 10 * time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	s := report{raw: strings.TrimSpace(out.String() + errs.String())}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		s.code = exit.ExitCode()
		var refusal struct{ Error json.RawMessage }
		if err := json.Unmarshal(errs.Bytes(), &refusal); err != nil {
			return s, fmt.Errorf("%s: exit %d without a refusal in JSON: %s", strings.Join(args, " "), s.code, s.raw)
		}
		return s, json.Unmarshal(refusal.Error, &s.refusal)
	}
	if err != nil {
		return s, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, s.raw)
	}
	return s, json.Unmarshal(out.Bytes(), &s.data)
}

// does runs a command that must succeed.
func (o *operator) does(args ...string) map[string]any {
	o.t.Helper()
	s, err := o.call(o.t.ctx, args...)
	if err == nil && s.code != 0 {
		err = fmt.Errorf("exit %d: %s", s.code, s.raw)
	}
	if err != nil {
		o.t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return s.data
}

// refused runs a command in the wrong order: the refusal must have the reason, the unmet condition and the remedy.
func (o *operator) refused(reason, helps string, args ...string) {
	o.t.Helper()
	s, err := o.call(o.t.ctx, args...)
	switch r := s.refusal; {
	case err != nil:
		o.t.Fatalf("%s: %v", strings.Join(args, " "), err)
	case s.code != exitRefused || r.Reason != reason:
		o.t.Errorf("%s: exit %d, reason %q, want %d, %q: %s", strings.Join(args, " "), s.code, r.Reason, exitRefused, reason,
			s.raw)
	case len(r.Unmet) == 0 || !strings.Contains(r.Remedy, helps):
		o.t.Errorf("%s: refused without what is unmet (%q), or without %q in what helps (%q)", strings.Join(args, " "),
			r.Unmet, helps, r.Remedy)
	default:
		o.t.Logf("%s: %s; unmet: %s; what helps: %s", strings.Join(args, " "), r.Reason, strings.Join(r.Unmet, ", "),
			r.Remedy)
	}
}

// awaits polls until a workspace is in a state.
func (o *operator) awaits(ref, state string) map[string]any {
	o.t.Helper()
	var got map[string]any
	o.t.must(ref+" to be "+state, 2*time.Minute, func(ctx context.Context) error {
		s, err := o.call(ctx, "workspaces", "get", ref)
		if err != nil {
			return err
		}
		if got = s.data; got["state"] != state {
			return fmt.Errorf("it is %v: %s", got["state"], s.raw)
		}
		return nil
	})
	return got
}

// waitsFor polls until the standing run of a workspace is at a step that waits for the instance's agent, which cannot
// connect: the operation stays in its middle.
func (o *operator) waitsFor(ref, run string) {
	o.t.Helper()
	o.t.must("the operation of "+ref+" to be under way", 2*time.Minute, func(ctx context.Context) error {
		s, err := o.call(ctx, "workspaces", "get", ref)
		if err != nil {
			return err
		}
		if s.data["state"] != "provisioning" || s.data["run_id"] != run || s.data["current_step"] == "" {
			return fmt.Errorf("it is %v, run %v at %v", s.data["state"], s.data["run_id"], s.data["current_step"])
		}
		return nil
	})
}

// TestTheRunbookByHand walks the runbook of a stuck provisioning through the command line as an operator does, with
// each wrong order tried first: a wedged create is cancelled, reset and retried until the retries are used up, and then
// comes up.
func TestTheRunbookByHand(tt *testing.T) {
	t := beside(tt, 15*time.Minute)
	c := start(t, cluster.Config{})
	createTenant(t, c)
	o := newOperator(t, c)
	const ref = tenant + "/walked"

	// No agent can connect, so that each operation stays in its middle for as long as the test needs.
	if _, err := c.ShutOut(c.Plan.Addresses.Agents, true); err != nil {
		t.Fatal(err)
	}
	created := o.does("workspaces", "create", "walked", "--tenant", tenant)
	runs := []string{text(created["operation_id"])}
	for tries := 0; ; tries++ {
		run := runs[len(runs)-1]
		o.waitsFor(ref, run)
		o.refused("operation_in_progress", "cancel", "workspaces", "decommission", ref, "--reason", "in mid-run", "--yes")
		o.refused("precondition_failed", "cancel", "workspaces", "reset", ref)
		if state := o.does("workspaces", "cancel", ref, "--reason", "wedged")["state"]; state != "cancelling" {
			t.Errorf("a cancel answers %v", state)
		}
		o.awaits(ref, "failed")
		o.refused("not_reset", "reset", "workspaces", "retry", ref)
		o.does("workspaces", "reset", ref)
		if tries == 3 {
			break
		}
		retried := o.does("workspaces", "retry", ref)
		runs = append(runs, text(retried["operation_id"]))
	}
	o.refused("retry_limit_reached", "decommission", "workspaces", "retry", ref)

	// The cause is gone, and an operator overrides the limit with a reason.
	if _, err := c.ShutOut(c.Plan.Addresses.Agents, false); err != nil {
		t.Fatal(err)
	}
	last := o.does("workspaces", "retry", ref, "--override", "--reason", "the way in is open again")
	runs = append(runs, text(last["operation_id"]))
	o.awaits(ref, "active")
	t.must("its agent to act", time.Minute, func(ctx context.Context) error {
		s, err := o.call(ctx, "workspaces", "get", ref)
		if err == nil && (s.data["agent_connected"] != true || s.data["user_state"] != "normal") {
			err = fmt.Errorf("connected %v, %v to its user: %v", s.data["agent_connected"], s.data["user_state"],
				s.data["agent_detail"])
		}
		return err
	})

	// The runs that the resets archived can be read.
	for _, run := range runs {
		history := o.does("workspaces", "timeline", ref, "--run", run)
		items, _ := history["items"].([]any)
		if listed, _ := history["history"].([]any); len(listed) < len(runs) || len(items) == 0 {
			t.Errorf("run %s has %d items among %d runs", run, len(items), len(listed))
			continue
		}
		if first, _ := items[0].(map[string]any); first["run_id"] != run {
			t.Errorf("the timeline of run %s shows run %v", run, first["run_id"])
		}
	}
	if s, err := o.call(t.ctx, "workspaces", "timeline", ref, "--run", text(created["workspace_id"])); err != nil ||
		s.code != exitMissing {
		t.Errorf("a run that is none: exit %d, %v", s.code, err)
	}

	o.does("workspaces", "decommission", ref, "--reason", "the walk is over", "--yes")
	o.awaits(text(created["workspace_id"]), "decommissioned")
	quiet(t, c)
	checkLedger(t, c)
	checkWorld(t, c)
}

func text(v any) string { s, _ := v.(string); return s }
