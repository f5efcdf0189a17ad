package output_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/workspaces"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func terminal(out *bytes.Buffer, width int) *output.Printer {
	return &output.Printer{
		Format: output.FormatTable, Out: out, Err: &bytes.Buffer{}, TTY: true, Relative: true, Width: width,
		Now: noon,
	}
}

// TestKeysAreNeverCut: at any width the keys of every row are whole, and lines are longer than the terminal only where
// the keys alone are.
func TestKeysAreNeverCut(t *testing.T) {
	for _, l := range longLists() {
		for _, width := range []int{60, 80, 100, 140} {
			var out bytes.Buffer
			if err := l.show(terminal(&out, width)); err != nil {
				t.Fatal(err)
			}
			for _, key := range l.keys {
				short := key
				if hexDigits.MatchString(key) && len(key) > 8 {
					short = key[len(key)-8:]
				}
				if !strings.Contains(out.String(), key) && !strings.Contains(out.String(), short) {
					t.Errorf("%s at %d columns cuts %q:\n%s", l.name, width, key, out.String())
				}
			}
			for line := range strings.Lines(out.String()) {
				if got := ansi.StringWidth(strings.TrimSuffix(line, "\n")); got > width && width >= 80 {
					t.Errorf("%s at %d columns has a line of %d: %q", l.name, width, got, line)
				}
			}
		}
	}
}

var hexDigits = regexp.MustCompile(`^[0-9a-f]+$`)

// TestGoldenWidths checks every list as people see it on terminals of three widths.
func TestGoldenWidths(t *testing.T) {
	for _, l := range longLists() {
		t.Run(l.name, func(t *testing.T) {
			var whole bytes.Buffer
			for _, width := range []int{80, 100, 140} {
				whole.WriteString("-- " + map[int]string{80: "80", 100: "100", 140: "140"}[width] + " --\n")
				if err := l.show(terminal(&whole, width)); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join("testdata", "width", l.name+".golden")
			if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
				if err := os.WriteFile(path, whole.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil || string(want) != whole.String() {
				t.Errorf("%s differs (%v):\n%s", path, err, whole.String())
			}
		})
	}
}

// TestLongTextCostsNoColumns: a long error is cut before other columns are dropped.
func TestLongTextCostsNoColumns(t *testing.T) {
	var out bytes.Buffer
	failed := &readmodelv1.Workspace{
		WorkspaceId: uuidOne, Tenant: "acme", Name: "demo2", State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, Epoch: 3,
		StateAt: ago(time.Minute), UserState: commonv1.UserState_USER_STATE_NORMAL, LastError: longError,
	}
	if err := output.List(terminal(&out, 80), workspaces.View, []*readmodelv1.Workspace{failed}, ""); err != nil {
		t.Fatal(err)
	}
	header, row, _ := strings.Cut(out.String(), "\n")
	if diff := cmp.Diff("TENANT NAME STATE USER STATE EPOCH SINCE LAST ERROR",
		strings.Join(strings.Fields(header), " ")); diff != "" {
		t.Errorf("columns (-want +got):\n%s\n%s", diff, out.String())
	}
	if got := ansi.StringWidth(strings.TrimSuffix(row, "\n")); got != 80 || !strings.Contains(row, "launch_box: the box") {
		t.Errorf("the error does not fill the width: %d\n%s", got, out.String())
	}
}

// TestWideCutsNothing: `-o wide` on a terminal shows every column and every value whole, ids too.
func TestWideCutsNothing(t *testing.T) {
	for _, l := range longLists() {
		var out bytes.Buffer
		pr := terminal(&out, 80)
		pr.Format = output.FormatWide
		if err := l.show(pr); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "...") {
			t.Errorf("%s -o wide cuts:\n%s", l.name, out.String())
		}
	}
}

// TestGetKeepsItsLabels: the names of the lines are never cut, whatever the width.
func TestGetKeepsItsLabels(t *testing.T) {
	node := &readmodelv1.Node{
		NodeId: uuidOne, Name: "n1", Gate: &lifecyclev1.NodeGate{Host: &commonv1.HostFacts{
			Hostname: strings.Repeat("very-long-host-name-", 8), Os: "linux", Kernel: "6.18", Cpus: 2, MemoryBytes: 1 << 34,
		}},
	}
	for _, width := range []int{40, 80, 100} {
		var out bytes.Buffer
		if err := output.One(terminal(&out, width), nodes.View, node); err != nil {
			t.Fatal(err)
		}
		for _, label := range []string{"NAME", "CONNECTED", "STATE", "HEARTBEAT", "ID", "gate: epochs", "host"} {
			if !regexp.MustCompile(`(?m)^` + label + `( |$)`).MatchString(out.String()) {
				t.Errorf("at %d columns there is no line %q:\n%s", width, label, out.String())
			}
		}
	}
}

// full is a writer to a full disk.
type full struct{}

var errFull = errors.New("no space left on device")

func (full) Write([]byte) (int, error) { return 0, errFull }

// TestWriteErrorsFail: a failed write fails the command, on a terminal and in a pipe.
func TestWriteErrorsFail(t *testing.T) {
	fleet := []*readmodelv1.Node{{Name: "node-1"}}
	for _, tty := range []bool{true, false} {
		pr := &output.Printer{Format: output.FormatTable, Out: full{}, Err: &bytes.Buffer{}, TTY: tty, Width: 80, Now: noon}
		if err := output.List(pr, nodes.View, fleet, ""); !errors.Is(err, errFull) {
			t.Errorf("list with tty %t: %v", tty, err)
		}
		if err := output.One(pr, nodes.View, fleet[0]); !errors.Is(err, errFull) {
			t.Errorf("one with tty %t: %v", tty, err)
		}
	}
}

// TestFollowedRowsStayInTheirColumns: a row that changes is aligned with the columns above it; if it does not fit, the
// header is printed again.
func TestFollowedRowsStayInTheirColumns(t *testing.T) {
	var out bytes.Buffer
	rows := output.NewFollower(terminal(&out, 80), workspaces.View)
	workspace := func(id, name, failure string) *readmodelv1.Workspace {
		return &readmodelv1.Workspace{
			WorkspaceId: id, Tenant: "acme", Name: name,
			State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, LastError: failure,
		}
	}
	for _, err := range []error{
		rows.Begin([]*readmodelv1.Workspace{workspace(uuidOne, "one", "")}),
		rows.Change(workspace(uuidOne, "one", ""), true),
		rows.Change(workspace(uuidTwo, "two", ""), true),
		rows.Change(workspace(uuidThree, "a-name-that-is-longer", ""), true),
		rows.Change(workspace(uuidOne, "one", longError), true),
		rows.Change(workspace(uuidOne, "one", "short"), false),
		rows.Change(workspace(uuidOne, "one", "gone"), false),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 80 {
			t.Errorf("a line of %d: %q", width, line)
		}
		got = append(got, strings.Join(strings.Fields(line)[:2], " "))
	}
	want := []string{
		"TENANT NAME", "acme one", "acme two", "TENANT NAME", "acme a-name-that-is-longer", "TENANT NAME",
		"acme one", "acme one",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s\n%s", diff, out.String())
	}
}

// TestWideCharacters: columns are aligned whatever the width of the characters, and a cut text stays within the width.
func TestWideCharacters(t *testing.T) {
	var out bytes.Buffer
	fleet := []*readmodelv1.Node{{Name: "東京-1", Connected: true}, {Name: "n", Connected: true}}
	if err := output.List(terminal(&out, 80), nodes.View, fleet, ""); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		before, _, found := strings.Cut(line, "yes")
		if found && ansi.StringWidth(before) != len("東京-1")-2+len("  ") { // six bytes that are four wide
			t.Errorf("%q begins its second column at %d", line, ansi.StringWidth(before))
		}
	}
	out.Reset()
	failed := &readmodelv1.Workspace{Tenant: "acme", Name: "demo", LastError: strings.Repeat("東京", 60)}
	if err := output.List(terminal(&out, 80), workspaces.View, []*readmodelv1.Workspace{failed}, ""); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 80 {
			t.Errorf("%q is %d wide", line, width)
		}
	}
	if !strings.Contains(out.String(), "...") {
		t.Errorf("nothing was cut:\n%s", out.String())
	}
}
