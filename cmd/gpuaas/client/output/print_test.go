package output_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
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
	pr := &output.Printer{
		Format: output.FormatTable, Out: &out, Err: &errOut, TTY: true, Relative: true, Width: 100,
		Now: noon,
	}
	if err := output.List(pr, nodes.View, fleet, ""); err != nil {
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
	pr.Color = true
	if err := output.List(pr, nodes.View, fleet, ""); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "\x1b[32mnormal") || strings.Contains(out.String(), "\x1b]0") {
		t.Errorf("colours: %q", out.String())
	}
	out.Reset()
	if err := output.List(pr, nodes.View, nil, ""); err != nil || out.Len() > 0 || errOut.String() != "none\n" {
		t.Errorf("an empty list: %q, %q, %v", out.String(), errOut.String(), err)
	}
}

func TestWhen(t *testing.T) {
	pr := &output.Printer{Relative: true, Now: noon}
	for d, want := range map[time.Duration]string{
		0: "0s ago", 59 * time.Second: "59s ago", 61 * time.Second: "1m ago", 90 * time.Minute: "1h30m ago",
		49 * time.Hour: "2d ago", -5 * time.Minute: "in 5m",
	} {
		if got := pr.When(ago(d)); got != want {
			t.Errorf("%s: %q, want %q", d, got, want)
		}
	}
	if got := pr.When(nil); got != "" {
		t.Errorf("no time: %q", got)
	}
}

func TestMembersKeepTheirOrder(t *testing.T) {
	if diff := cmp.Diff(`{"b":1,"a":"x"}`,
		string(output.Members(output.With("b", 1), output.With("a", "x")))); diff != "" {
		t.Error(diff)
	}
}
