package client

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

func noon() time.Time { return time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC) }

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(noon().Add(-d)) }

// TestTerminal: on a terminal a table has a header, columns, relative times, and colours unless they are not wanted;
// text from a node cannot control the terminal.
func TestTerminal(t *testing.T) {
	fleet := []*readmodelv1.Node{
		{
			Name: "node-1", Connected: true, UserState: commonv1.UserState_USER_STATE_NORMAL,
			LastHeartbeatAt: ago(3 * time.Second),
		},
		{
			Name: "bad\x1b]0;title\x07", UserState: commonv1.UserState_USER_STATE_RECOVERING,
			LastHeartbeatAt: ago(2 * time.Hour),
		},
	}
	var out, errOut bytes.Buffer
	pr := &printer{format: formatTable, out: &out, err: &errOut, tty: true, relative: true, width: 100, now: noon}
	if err := list(pr, nodeView, fleet, ""); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out.String(), "\n")
	for i, want := range []string{
		"NAME CONNECTED STATE IDENTITY WORK SLOTS GPUS HEARTBEAT REASON WORKSPACE",
		"node-1 yes normal 3s ago", "bad ]0;title no recovering 2h0m ago",
	} {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != want {
			t.Errorf("line %d is %q, want %q", i, got, want)
		}
	}
	if strings.ContainsAny(out.String(), "\x1b\x07\t") {
		t.Errorf("control characters without colours: %q", out.String())
	}
	out.Reset()
	pr.color = true
	if err := list(pr, nodeView, fleet, ""); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "\x1b[32mnormal") || strings.Contains(out.String(), "\x1b]0") {
		t.Errorf("colours: %q", out.String())
	}
	out.Reset()
	if err := list(pr, nodeView, nil, ""); err != nil || out.Len() > 0 || errOut.String() != "none\n" {
		t.Errorf("an empty list: %q, %q, %v", out.String(), errOut.String(), err)
	}
}

func TestWhen(t *testing.T) {
	pr := &printer{relative: true, now: noon}
	for d, want := range map[time.Duration]string{
		0: "0s ago", 59 * time.Second: "59s ago", 61 * time.Second: "1m ago", 90 * time.Minute: "1h30m ago",
		49 * time.Hour: "2d ago", -5 * time.Minute: "in 5m",
	} {
		if got := pr.when(ago(d)); got != want {
			t.Errorf("%s: %q, want %q", d, got, want)
		}
	}
	if got := pr.when(nil); got != "" {
		t.Errorf("no time: %q", got)
	}
}

func TestBytes(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "512": 512, "10Gi": 10 << 30, "1.5Mi": 3 << 19, "2G": 2e9,
		"1Ti": 1 << 40, "3GiB": 3 << 30, "4k": 4000,
	} {
		if got, err := parseBytes(text); err != nil || got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "ten", "-1", "1Xi", "NaN", "Inf", "9999999Pi", "Gi"} {
		if got, err := parseBytes(text); err == nil {
			t.Errorf("%q was read as %d", text, got)
		}
	}
	for n, want := range map[int64]string{0: "0", 1023: "1023", 10 << 30: "10Gi", 3 << 29: "1.5Gi"} {
		if got := bytesText(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

// TestExitOfEveryReason: every reason of the catalogue has a fitting exit code, also if its error is wrapped.
func TestExitOfEveryReason(t *testing.T) {
	for _, reason := range names.All[commonv1.Reason]() {
		err := fmt.Errorf("outer: %w", fault.New(reason, ""))
		if code := Exit(err); code < ExitError || code > ExitRefused {
			t.Errorf("%s exits %d", names.Of(reason), code)
		}
		if f := describe(err); f.Message == "" || f.Action == "" || f.Remedy == "" || f.Reason != names.Of(reason) {
			t.Errorf("%s is described as %+v", names.Of(reason), f)
		}
	}
	for err, want := range map[error]int{
		nil: ExitOK, errors.New("x"): ExitError, Usage(errors.New("x")): ExitUsage,
		&exitError{code: ExitTimeout}:                                    ExitTimeout,
		&tracedError{cause: fmt.Errorf("a: %w", Usage(errors.New("x")))}: ExitUsage,
	} {
		if got := Exit(err); got != want {
			t.Errorf("%v exits %d, want %d", err, got, want)
		}
	}
}

// TestHelp: every command has a description and an example, and the example is one of that command.
func TestHelp(t *testing.T) {
	root := &cobra.Command{Use: "gpuaas"}
	root.AddCommand(&cobra.Command{Use: "config", Run: func(*cobra.Command, []string) {}})
	Attach(New(), root)
	var paths []string
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			walk(sub)
			paths = append(paths, sub.CommandPath())
			if sub.HasSubCommands() || !sub.Runnable() {
				continue
			}
			if sub.Short == "" || strings.HasSuffix(sub.Short, ".") || !strings.Contains(sub.Example, sub.CommandPath()) {
				t.Errorf("%s: short %q, example %q", sub.CommandPath(), sub.Short, sub.Example)
			}
			if strings.Contains(sub.UsageString(), "``") {
				t.Errorf("%s: %s", sub.CommandPath(), sub.UsageString())
			}
		}
	}
	walk(root)
	for _, want := range []string{
		"policy get", "policy set", "status", "tenants create", "tenants list", "tenants get", "nodes list", "nodes get",
		"nodes watch", "nodes enroll", "nodes hold", "nodes quarantine", "nodes fence", "nodes reactivate", "nodes retire",
		"nodes cordon", "nodes uncordon", "nodes probe", "workspaces create", "workspaces list", "workspaces get",
		"workspaces watch", "workspaces wait", "workspaces timeline", "workspaces logs", "workspaces actions",
		"workspaces cancel", "workspaces reset", "workspaces retry", "workspaces retry-undo", "workspaces skip-undo",
		"workspaces recreate", "workspaces decommission", "instances list", "claims list", "allocations list",
		"allocations get", "tasks list", "tasks get", "tasks cancel", "tasks requeue", "tasks close", "explain reason",
		"config view", "config use-context",
		"man",
	} {
		if !slices.Contains(paths, "gpuaas "+want) {
			t.Errorf("there is no command %q", want)
		}
	}
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"man"})
	if err := root.ExecuteContext(t.Context()); err != nil || !strings.Contains(out.String(), "workspaces") {
		t.Errorf("manual: %v, %q", err, out.String())
	}
}

func TestHostPort(t *testing.T) {
	for server, want := range map[string]string{
		"127.0.0.1:7443": "127.0.0.1:7443", "https://mesh.test": "mesh.test:443", "https://mesh.test:1/": "mesh.test:1",
		"[::1]:5": "[::1]:5", "mesh.test": "mesh.test:443", "http://mesh.test": "", "https://user@mesh.test": "",
		"https://mesh.test/x": "", "https://mesh.test?a": "", "": "",
		"ftp://x": "",
	} {
		got, err := hostPort(server)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", server, got, err)
		}
	}
}

func TestMembersKeepTheirOrder(t *testing.T) {
	if diff := cmp.Diff(`{"b":1,"a":"x"}`, string(members(with("b", 1), with("a", "x")))); diff != "" {
		t.Error(diff)
	}
}
