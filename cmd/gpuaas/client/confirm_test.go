package client_test

import (
	"bytes"
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// screen has the text that a terminal has shown.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	said chan struct{}
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// read collects what the terminal shows until it is closed.
func (s *screen) read(from *os.File) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		s.mu.Lock()
		s.text.Write(buf[:n])
		s.mu.Unlock()
		select {
		case s.said <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// until waits for a text on the screen.
func (s *screen) until(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !strings.Contains(s.String(), want) {
		select {
		case <-s.said:
		case <-deadline:
			t.Fatalf("no %q on the screen: %s", want, s)
		}
	}
}

// all returns what was written to a terminal up to now.
func (s *screen) all(t *testing.T, terminal *os.File) string {
	t.Helper()
	const end = "(end)"
	if _, err := terminal.WriteString(end); err != nil {
		t.Error(err)
	}
	s.until(t, end)
	return strings.TrimSuffix(s.String(), end)
}

// asked runs a command line on a terminal whose person waits for the question and then acts.
func asked(t *testing.T, act func(keyboard *os.File, interrupt context.CancelFunc), args ...string) (result, string) {
	t.Helper()
	person, terminal := testkit.Terminal(t)
	shown := &screen{said: make(chan struct{}, 1)}
	go shown.read(person)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := started(ctx, terminal, args...)
	shown.until(t, "to go ahead: ")
	act(person, cancel)
	select {
	case got := <-ended:
		return got, shown.all(t, terminal)
	case <-time.After(time.Minute):
		t.Fatalf("the command does not end: %s", shown)
		return result{}, ""
	}
}

// onATerminal runs on a terminal a command line that ends by itself, and returns the text that the terminal showed.
func onATerminal(t *testing.T, args ...string) (result, string) {
	t.Helper()
	person, terminal := testkit.Terminal(t)
	shown := &screen{said: make(chan struct{}, 1)}
	go shown.read(person)
	select {
	case got := <-started(t.Context(), terminal, args...):
		return got, shown.all(t, terminal)
	case <-time.After(time.Minute):
		t.Fatalf("the command does not end: %s", shown)
		return result{}, ""
	}
}

// started runs a command line on a terminal, and returns the channel that gets its result.
func started(ctx context.Context, terminal *os.File, args ...string) <-chan result {
	ended := make(chan result, 1)
	go func() {
		var out, errs bytes.Buffer
		program := kit.New()
		root := &cobra.Command{Use: "gpuaas"}
		client.Attach(program, root)
		root.SetArgs(args)
		root.SetIn(terminal)
		root.SetOut(&out)
		root.SetErr(terminal)
		err := root.ExecuteContext(ctx)
		exit.Report(&errs, err, program.JSON())
		ended <- result{out.String(), errs.String(), exit.CodeOf(err)}
	}()
	return ended
}

func types(t *testing.T, text string) func(*os.File, context.CancelFunc) {
	t.Helper()
	return func(keyboard *os.File, _ context.CancelFunc) {
		if _, err := keyboard.WriteString(text); err != nil {
			t.Error(err)
		}
	}
}

// destructive has the verbs that ask, with the name to type and the text about the loss in the question.
var destructive = []struct {
	line, name, lost string
	dry              bool // the verb has --dry-run
}{
	{"workspaces decommission demo2 --reason r", "acme/demo2", "acme/demo2 will be ended for good", true},
	{"workspaces recreate demo2 --reason r", "acme/demo2", "what they keep on that instance is lost", true},
	{"workspaces skip-undo demo2 --reason r", "acme/demo2", "stays behind as orphan claims", true},
	{
		"allocations force-release " + taskID + " --expected-fence 3 --fenced-proof powered_off --reason r", "acme/demo2",
		"will be free for others", true,
	},
	{"nodes retire " + nodeID + " --reason r", "node-1", "will be ended for good", false},
	{"nodes fence node-1 --reason r", "node-1", "only the security role lets it in again", false},
	{"instances end process:1 --reason r", "process:1", "its data is lost", true},
	{"people end " + claimID[len(claimID)-8:] + " --reason r", "ana", "The token of ana will be good no more", false},
	{
		"events drop lifecycle/sessions 7 --reason r", "lifecycle/sessions",
		"will pass over the event node.changed at 7 for good", true,
	},
	{"rollback accept --reason r", "rollback", "cannot be taken back", false},
}

// acted counts the requests that change something.
func acted(f *fake) int {
	n := len(sent[*readmodelv1.ChangeNodeIdentityRequest](f)) + len(
		sent[*readmodelv1.AcceptRollbackRequest](f),
	) + len(sent[*readmodelv1.EndPersonRequest](f))
	for _, req := range sent[*readmodelv1.OperateWorkspaceRequest](f) {
		if !req.GetDryRun() {
			n++
		}
	}
	for _, req := range sent[*readmodelv1.ForceReleaseRequest](f) {
		if !req.GetRequest().GetDryRun() {
			n++
		}
	}
	for _, req := range sent[*readmodelv1.DropParkedRequest](f) {
		if !req.GetDryRun() {
			n++
		}
	}
	for _, req := range sent[*readmodelv1.EndInstanceRequest](f) {
		if !req.GetRequest().GetDryRun() {
			n++
		}
	}
	return n
}

func destructible(t *testing.T) *fake {
	t.Helper()
	f := mesh(t)
	stock(f)
	always(f, "GetAllocation", &readmodelv1.GetAllocationResponse{Allocation: &lifecyclev1.Allocation{
		AllocationId: taskID,
		WorkspaceId:  workspaceID,
	}})
	always(
		f, "ForceRelease", &readmodelv1.ForceReleaseResponse{
			Response: &lifecyclev1.ForceReleaseResponse{Operation: operation()},
		},
	)
	always(f, "ChangeNodeIdentity", &readmodelv1.ChangeNodeIdentityResponse{
		Node: &recoveryv1.NodeIdentity{
			NodeId: nodeID, Name: "node-1",
			State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		}, Pos: "5",
	})
	always(
		f, "EndInstance", &readmodelv1.EndInstanceResponse{
			Response: &lifecyclev1.EndInstanceResponse{Consequence: "ends the instance"},
		},
	)
	always(f, "DropParked", &readmodelv1.DropParkedResponse{
		Event: &readmodelv1.ParkedEvent{Consumer: "lifecycle/sessions", Position: 7, Kind: "node.changed"},
	})
	always(f, "GetRollback", &readmodelv1.GetRollbackResponse{Rollback: rolledBack()})
	always(f, "AcceptRollback", &readmodelv1.AcceptRollbackResponse{Rollback: &recoveryv1.RollbackMode{}})
	return f
}

// TestDestructiveVerbsAsk: on a terminal each acts only after the name is typed, and the question before it gives what
// will be lost.
func TestDestructiveVerbsAsk(t *testing.T) {
	f := destructible(t)
	for _, verb := range destructive {
		t.Run(verb.line, func(t *testing.T) {
			args, before := strings.Fields(verb.line), acted(f)
			got, shown := asked(t, types(t, "yes\n"), args...)
			if got.code != 1 || !strings.HasPrefix(got.err, "error: cancelled: nothing was changed") || acted(f) != before {
				t.Errorf("another answer: exit %d, %s, %d acts", got.code, got.err, acted(f)-before)
			}
			if !strings.Contains(shown, verb.lost) || !strings.Contains(shown, "Type "+verb.name+" to go ahead: ") {
				t.Errorf("the question is: %s", shown)
			}
			if question, _, _ := strings.Cut(shown, "Type "); strings.Count(question, "\n") > 2 {
				t.Errorf("the question has more than two lines: %s", question)
			}
			if got, _ := asked(t, types(t, "\x04"), args...); got.code != 1 || acted(f) != before {
				t.Errorf("no answer: exit %d, %s, %d acts", got.code, got.err, acted(f)-before)
			}
			// Ctrl-D after the name ends the input in the middle of the line: twice, the first only hands over what was typed.
			got, shown = asked(t, types(t, verb.name+"\x04\x04"), args...)
			if got.code != 1 || acted(f) != before || !strings.HasSuffix(shown, "to go ahead: "+verb.name+"\r\n") {
				t.Errorf("an unfinished line: exit %d, %s, %d acts, %q", got.code, got.err, acted(f)-before, shown)
			}
			got, _ = asked(t, func(_ *os.File, interrupt context.CancelFunc) { interrupt() }, args...)
			if got.code != 130 || got.err != "interrupted; nothing was changed\n" || acted(f) != before {
				t.Errorf("interrupted: exit %d, %q, %d acts", got.code, got.err, acted(f)-before)
			}
			if got, _ := asked(t, types(t, verb.name+"\n"), args...); got.code != 0 || acted(f) != before+1 {
				t.Errorf("the name: exit %d, %s, %d acts", got.code, got.err, acted(f)-before)
			}
		})
	}
}

// TestTheImpossibleIsNotAsked: a request that the mesh refuses now fails before the person must type a name.
func TestTheImpossibleIsNotAsked(t *testing.T) {
	f := destructible(t)
	refuse(f, "OperateWorkspace", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "skip_undo is not possible now",
		fault.Unmet("no operation of the workspace is stuck")))
	refuse(f, "ForceRelease", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "",
		fault.Unmet("the allocation is released, not release_failed")))
	refuse(f, "EndInstance", fault.New(commonv1.Reason_REASON_STATE_TERMINAL, ""))
	refuse(f, "DropParked", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "",
		fault.Unmet("the event is parked")))
	always(f, "GetRollback", &readmodelv1.GetRollbackResponse{Rollback: &recoveryv1.RollbackMode{}})
	always(f, "ListPeople", &readmodelv1.ListPeopleResponse{Items: []*readmodelv1.Person{
		{PersonId: claimID, Name: "ana", State: readmodelv1.PersonState_PERSON_STATE_ENDED, EndedAt: at(3), EndedBy: "root"},
	}})
	for _, verb := range destructive {
		if strings.HasPrefix(verb.line, "nodes ") { // the view of a node may be behind: its owner decides
			continue
		}
		before := acted(f)
		got, shown := onATerminal(t, strings.Fields(verb.line)...)
		want := 5
		if strings.HasPrefix(verb.line, "people end") {
			want = 0
			if !strings.Contains(shown, "ana was ended already, at 2026-01-02T03:04:03Z by root: nothing was changed") {
				t.Errorf("ended already: %s", shown)
			}
		}
		if got.code != want || strings.Contains(shown, "to go ahead") || acted(f) != before {
			t.Errorf("%s: exit %d, %s, %d acts, asked: %s", verb.line, got.code, got.err, acted(f)-before, shown)
		}
	}
}

// TestDestructiveVerbsNeedYesWithoutATerminal: no request is sent, and the error names the flag to add. A dry run needs
// none.
func TestDestructiveVerbsNeedYesWithoutATerminal(t *testing.T) {
	f := destructible(t)
	for _, verb := range destructive {
		t.Run(verb.line, func(t *testing.T) {
			args, before := strings.Fields(verb.line), len(f.requests)
			got := call(t, args...).wants(t, 2)
			if !strings.Contains(got.err, "--yes") || strings.Contains(got.err, "--dry-run") != verb.dry ||
				len(f.requests) != before {
				t.Errorf("%d requests: %s", len(f.requests)-before, got.err)
			}
			done := acted(f)
			got = call(t, append(args, "--yes")...).wants(t, 0)
			if strings.HasPrefix(verb.line, "instances end") &&
				!strings.Contains(got.err, "the instance process:1 has been ended") {
				t.Errorf("it does not say what happened: %s%s", got.out, got.err)
			}
			if acted(f) != done+1 {
				t.Errorf("%d acts after --yes", acted(f)-done)
			}
			if verb.dry {
				call(t, append(args, "--dry-run")...).wants(t, 0)
			}
		})
	}
	// The operations that take a reason are refused without one, except that a dry run goes without.
	for _, verb := range []string{"decommission", "recreate", "skip-undo"} {
		before := len(f.requests)
		got := call(t, "workspaces", verb, "demo2", "--yes").wants(t, 2)
		if !strings.HasPrefix(got.err, "error: reason_required: ") || !strings.Contains(got.err, "--reason TEXT") ||
			len(f.requests) != before {
			t.Errorf("%s: %d requests, %s", verb, len(f.requests)-before, got.err)
		}
		call(t, "workspaces", verb, "demo2", "--dry-run").wants(t, 0)
	}
}

// TestInterruptedWaits: the one line reports that the operation goes on and how to wait for it, by the workspace's
// name.
func TestInterruptedWaits(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(
		f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{
			Workspace: workspace(commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING),
		},
	)
	ending := operation()
	ending.Kind = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
	always(f, "OperateWorkspace", &readmodelv1.OperateWorkspaceResponse{Operation: ending})
	for line, want := range map[string]string{
		"workspaces create demo2 --tenant acme --wait": "interrupted; the operation goes on: gpuaas workspaces " +
			"wait acme/demo2\n",
		"workspaces wait demo2 --for state=active,failed": "interrupted; acme/demo2 goes on: gpuaas workspaces wait " +
			"acme/demo2 --for state=active,failed\n",
		"workspaces decommission demo2 --reason r --yes --wait": "interrupted; the operation goes on: gpuaas workspaces " +
			"wait acme/demo2 --for state=decommissioned\n",
		"workspaces watch demo2": "interrupted\n",
	} {
		for _, form := range []string{"table", "json"} {
			ctx, cancel := context.WithCancel(t.Context())
			f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, _ send) error {
				cancel()
				return keepOpen(ctx)
			})
			got := callIn(ctx, nil, append(strings.Fields(line), "-o", form)...).wants(t, 130)
			cancel()
			last := got.err[strings.LastIndexByte(strings.TrimSuffix(got.err, "\n"), '\n')+1:]
			if form == "table" && (last != want || strings.Contains(got.err, "error:")) {
				t.Errorf("%s: %q, want %q", line, got.err, want)
			}
			if form == "json" && (strings.Count(got.err, `"error":`) != 1 || !strings.Contains(last, `"reason":"cancelled"`)) {
				t.Errorf("%s: %s", line, got.err)
			}
		}
	}
}
