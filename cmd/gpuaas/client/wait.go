package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// messages makes values of members of API messages.
func messages[M proto.Message](items ...M) []json.RawMessage {
	out := make([]json.RawMessage, len(items))
	for i, item := range items {
		raw, err := names.MarshalJSON(item)
		if err != nil {
			raw = []byte("null")
		}
		out[i] = raw
	}
	return out
}

// condition is what `--for` asks of a workspace.
type condition struct {
	text  string
	holds func(*readmodelv1.Workspace) bool
}

// parseCondition reads `state=active`, `state=active,failed`, or `user_state=normal`.
func parseCondition(text string) (condition, error) {
	field, values, ok := strings.Cut(text, "=")
	if !ok || values == "" {
		return condition{}, Usage(fmt.Errorf("--for %q is not FIELD=VALUE, such as state=active", text))
	}
	wanted := map[string]bool{}
	for value := range strings.SplitSeq(values, ",") {
		wanted[value] = true
		var err error
		switch field {
		case "state":
			_, err = parseEnum[commonv1.WorkspaceState]("for", value)
		case "user_state":
			_, err = parseEnum[commonv1.UserState]("for", value)
		default:
			err = Usage(fmt.Errorf("--for %q: only state and user_state can be waited for", text))
		}
		if err != nil {
			return condition{}, err
		}
	}
	return condition{text, func(w *readmodelv1.Workspace) bool {
		if field == "state" {
			return wanted[word(w.GetState())]
		}
		return wanted[word(w.GetUserState())]
	}}, nil
}

func (p *Program) workspacesWait() *cobra.Command {
	var (
		for_    string
		timeout time.Duration
		minPos  string
	)
	cmd := &cobra.Command{
		Use: "wait WS --for state=active", Short: "Wait until a workspace is in a state, and print it",
		Example: "  gpuaas workspaces wait acme/demo2 --for state=active --timeout 60s\n  gpuaas workspaces wait acme/demo2 --for state=active,failed",
		Args:    args("WS"), ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			want, err := parseCondition(for_)
			if err != nil {
				return err
			}
			ctx, cancel := within(ctx, timeout)
			defer cancel()
			last, told := (*readmodelv1.Workspace)(nil), ""
			err = s.followWorkspace(ctx, args[0], minPos, func(item *readmodelv1.WatchItem) (bool, error) {
				w := item.GetWorkspace()
				if w == nil {
					return false, nil
				}
				last = w
				if want.holds(w) {
					return true, nil
				}
				if now := word(w.GetState()); now != told {
					note(s.err, "%s is %s%s", fullName(w), now, onlyIf(w.GetLastError() != "", ": "+clean(w.GetLastError())))
					told = now
				}
				if w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
					return false, &exitError{
						code: ExitRefused, reason: commonv1.Reason_REASON_STATE_TERMINAL,
						message: fmt.Sprintf("%s is decommissioned and stays so: %s will never hold", fullName(w), want.text),
					}
				}
				if s.restsFailed(ctx, w) {
					return false, endedElsewhere(w, "decide what is done about it: gpuaas workspaces actions "+fullName(w))
				}
				return false, nil
			})
			switch {
			case errors.Is(err, errWaited):
				return waitedTooLong(fmt.Sprintf("%s is not %s after %s", args[0], want.text, timeout), last)
			case err != nil && ctx.Err() != nil:
				ref := args[0]
				if last != nil {
					ref = fullName(last)
				}
				return interrupted(fmt.Sprintf("interrupted; %s goes on: gpuaas workspaces wait %s --for %s", ref, ref, want.text))
			case err != nil:
				return err
			}
			return one(s.printer, workspaceView, last)
		}),
	}
	cmd.Flags().StringVar(&for_, "for", "state=active", "what to wait for: state=S[,S...] or user_state=S[,S...]")
	_ = cmd.RegisterFlagCompletionFunc("for", completeConditions)
	cmd.Flags().DurationVar(&timeout, "timeout", 60*time.Second, "give up after this long (exit 6); 0 waits without end")
	cmd.Flags().StringVar(&minPos, "min-pos", "", "`position` that an earlier command printed as pos: ignore anything older")
	return cmd
}

// waitedTooLong says how far it came in the time it had.
func waitedTooLong(text string, last *readmodelv1.Workspace) error {
	if last != nil {
		text += ": it is " + word(last.GetState())
		if last.GetCurrentStep() != "" {
			text += ", at " + last.GetCurrentStep()
		}
		if why := or(last.GetWhyWaiting(), last.GetLastError()); why != "" {
			text += " (" + why + ")"
		}
	}
	return &exitError{code: ExitTimeout, reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED, message: text, remedy: "it goes on without you: look with `gpuaas workspaces timeline`, or wait longer with --timeout"}
}

// followWorkspace follows one workspace with its runs and steps.
func (s *session) followWorkspace(ctx context.Context, ref, minPos string, each func(*readmodelv1.WatchItem) (bool, error)) error {
	// What does not exist is found out at once, and the watch goes by id: a bare name may stop being unique.
	answer, err := s.query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref, MinPos: minPos})
	id := ref
	switch {
	case err == nil:
		id = answer.GetWorkspace().GetWorkspaceId()
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case !mends(err):
		return err
	}
	poll := func(ctx context.Context) ([]*readmodelv1.WatchItem, error) {
		answer, err := s.query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: id, MinPos: minPos})
		return []*readmodelv1.WatchItem{{Topic: readmodelv1.Topic_TOPIC_WORKSPACES, Object: &readmodelv1.WatchItem_Workspace{Workspace: answer.GetWorkspace()}}}, err
	}
	if err == nil {
		// The first look may already be the last.
		done, ferr := each(&readmodelv1.WatchItem{Topic: readmodelv1.Topic_TOPIC_WORKSPACES, Object: &readmodelv1.WatchItem_Workspace{Workspace: answer.GetWorkspace()}})
		if done || ferr != nil {
			return ferr
		}
	}
	return s.follow(ctx, &readmodelv1.WatchRequest{
		Topics:    []readmodelv1.Topic{readmodelv1.Topic_TOPIC_RUNS, readmodelv1.Topic_TOPIC_STEPS, readmodelv1.Topic_TOPIC_WORKSPACES},
		Workspace: id, MinPos: minPos,
	}, poll, each)
}

// awaitOperation waits until an operation has ended, tells its steps on stderr, and prints the workspace. It is refused if the workspace comes to
// rest elsewhere than wanted. The name is what the person called the workspace.
func (s *session) awaitOperation(ctx context.Context, op *lifecyclev1.Operation, name string, want commonv1.WorkspaceState, timeout time.Duration) error {
	ctx, cancel := within(ctx, timeout)
	defer cancel()
	note(s.err, "%s %s (epoch %d)%s", word(op.GetKind()), op.GetOperationId(), op.GetEpoch(), onlyIf(op.GetJoined(), ", joined one under way"))
	steps := &stepTeller{s: s, runID: op.GetOperationId(), told: map[string]bool{}, open: map[int32]bool{}}
	var last *readmodelv1.Workspace
	err := s.followWorkspace(ctx, op.GetWorkspaceId(), op.GetPos(), func(item *readmodelv1.WatchItem) (bool, error) {
		steps.tell(item)
		w := item.GetWorkspace()
		if w == nil {
			return false, nil
		}
		last = w
		return atRest(w, want), nil
	})
	if err == nil && len(steps.open) > 0 {
		steps.rest(ctx, op.GetWorkspaceId())
	}
	steps.flush()
	switch {
	case errors.Is(err, errWaited):
		return waitedTooLong(fmt.Sprintf("%s has not ended after %s", word(op.GetKind()), timeout), last)
	case err != nil:
		if ctx.Err() != nil {
			if last != nil {
				name = fullName(last)
			}
			wait := "gpuaas workspaces wait " + name
			if want != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
				wait += " --for state=" + word(want)
			}
			return interrupted("interrupted; the operation goes on: " + wait)
		}
		return err
	}
	if err := one(s.printer, workspaceView, last); err != nil {
		return err
	}
	if last.GetState() == want {
		return nil
	}
	for _, text := range s.lastOutput(ctx, op) {
		note(s.err, "%s", text)
	}
	remedy := "see where it failed: gpuaas workspaces timeline " + fullName(last)
	if text := last.GetLastError(); strings.Contains(text, "ended before it was ready") && strings.Contains(text, "status 0") {
		remedy += "; a job that may end sooner is ready at once with --min-uptime 0s"
	}
	return endedElsewhere(last, remedy)
}

// endedElsewhere is the refusal of a wait for a workspace that came to rest in another state than was waited for.
func endedElsewhere(w *readmodelv1.Workspace, remedy string) error {
	reason, err := names.Parse[commonv1.Reason](w.GetLastErrorCode())
	if err != nil || reason == commonv1.Reason_REASON_UNSPECIFIED {
		reason = commonv1.Reason_REASON_PRECONDITION_FAILED
	}
	return &exitError{
		code: ExitRefused, reason: reason, remedy: remedy,
		message: fmt.Sprintf("%s is %s: %s", fullName(w), word(w.GetState()), or(w.GetLastError(), "no error is recorded")),
	}
}

// restsFailed reports whether a workspace is failed or stuck with nothing under way, so that only another operation leads on. The view may not know yet of
// one that has begun: its owner is asked, and where that cannot be had the view is believed.
func (s *session) restsFailed(ctx context.Context, w *readmodelv1.Workspace) bool {
	state := w.GetState()
	if state != commonv1.WorkspaceState_WORKSPACE_STATE_FAILED && state != commonv1.WorkspaceState_WORKSPACE_STATE_STUCK {
		return false
	}
	answer, err := s.query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: w.GetWorkspaceId()})
	if err != nil {
		return ctx.Err() == nil
	}
	possible := func(kind commonv1.OperationKind) bool {
		return slices.ContainsFunc(answer.GetActions(), func(a *lifecyclev1.ActionOption) bool { return a.GetKind() == kind && a.GetPossible() })
	}
	if state == commonv1.WorkspaceState_WORKSPACE_STATE_STUCK {
		return possible(commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO)
	}
	return !possible(commonv1.OperationKind_OPERATION_KIND_CANCEL)
}

// lastOutput returns the lines that a failed workload wrote last, for the person who waits. What cannot be read, or may not be seen, is left out.
func (s *session) lastOutput(ctx context.Context, op *lifecyclev1.Operation) []string {
	timeline, err := s.query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: op.GetWorkspaceId(), RunId: op.GetOperationId()})
	if err != nil {
		return nil
	}
	for _, i := range slices.Backward(timeline.GetItems()) {
		if i.GetLastOutput() != "" {
			lines := []string{"  last output:"}
			for _, line := range indented(i.GetLastOutput()) {
				lines = append(lines, "  "+line)
			}
			return lines
		}
	}
	return nil
}

// atRest says whether nothing further happens to the workspace by itself. `failed` is at rest only where no operation is open on it, which the mesh
// guarantees: it is the end of one.
func atRest(w *readmodelv1.Workspace, want commonv1.WorkspaceState) bool {
	switch w.GetState() { //nolint:exhaustive // every other state is under way
	case want, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
		return true
	}
	return false
}

// stepTeller tells a person how far a run is. Changes that come together come in no order: what is said of a step waits until the steps before it
// are known to have ended, so that the story reads forwards.
type stepTeller struct {
	s     *session
	runID string
	names []string
	told  map[string]bool
	open  map[int32]bool
	held  []stepLine
}

// stepLine is one line of the story.
type stepLine struct {
	step int32
	open bool // the attempt has not ended
	text string
}

// say tells a line when its turn has come.
func (t *stepTeller) say(line stepLine) {
	t.held = append(t.held, line)
	for {
		i := slices.IndexFunc(t.held, func(l stepLine) bool {
			for step := range t.open {
				if step < l.step {
					return false
				}
			}
			return true
		})
		if i < 0 {
			return
		}
		t.print(t.held[i])
		t.held = slices.Delete(t.held, i, i+1)
	}
}

func (t *stepTeller) print(line stepLine) {
	note(t.s.err, "  step %s", line.text)
	delete(t.open, line.step)
	if line.open {
		t.open[line.step] = true
	}
}

// rest tells how the steps ended whose end was not heard of: the workspace's own change can come before those of its steps. What cannot be read is not
// told: the workspace is what was waited for.
func (t *stepTeller) rest(ctx context.Context, workspaceID string) {
	timeline, err := t.s.query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: workspaceID, RunId: t.runID})
	if err != nil {
		return
	}
	for _, i := range timeline.GetItems() {
		n, err := strconv.ParseInt(i.GetStep(), 10, 32)
		if err != nil || i.GetFinishedAt() == nil || i.GetDirection() != commonv1.Direction_DIRECTION_DO || !t.open[int32(n)-1] {
			continue
		}
		t.tell(&readmodelv1.WatchItem{Object: &readmodelv1.WatchItem_Step{Step: &lifecyclev1.StepAttempt{
			RunId: t.runID, Step: int32(n) - 1, Name: i.GetName(), Direction: i.GetDirection(), Attempt: i.GetAttempt(), State: i.GetState(),
			StartedAt: i.GetStartedAt(), FinishedAt: i.GetFinishedAt(), Error: i.GetError(),
		}}})
	}
}

// flush tells which of what is held has ended, in the order of the steps: that the others once began is no news any more.
func (t *stepTeller) flush() {
	slices.SortStableFunc(t.held, func(a, b stepLine) int { return int(a.step - b.step) })
	for _, line := range t.held {
		if !line.open {
			t.print(line)
		}
	}
	t.held, t.open = nil, map[int32]bool{}
}

func (t *stepTeller) tell(item *readmodelv1.WatchItem) {
	if run := item.GetRun(); run != nil && run.GetRunId() == t.runID {
		t.names = run.GetStepNames()
	}
	step := item.GetStep()
	if step == nil || step.GetRunId() != t.runID {
		return
	}
	key := fmt.Sprintf("%s/%d/%d", word(step.GetDirection()), step.GetStep(), step.GetAttempt())
	text := word(step.GetState())
	switch {
	case step.GetFinishedAt() != nil && step.GetStartedAt() != nil:
		text += " in " + step.GetFinishedAt().AsTime().Sub(step.GetStartedAt().AsTime()).Round(time.Millisecond).String()
		if step.GetError() != "" {
			text += ": " + clean(step.GetError())
		}
	case step.GetWhyWaiting() != "":
		text += ": " + clean(step.GetWhyWaiting())
	}
	if key += " " + text; t.told[key] { // a step that polls goes from waiting to running and back, many times
		return
	}
	t.told[key] = true
	name := or(step.GetName(), "?")
	if step.GetDirection() == commonv1.Direction_DIRECTION_UNDO {
		name = "undo " + name
	}
	if step.GetAttempt() > 1 {
		name += fmt.Sprintf(" (attempt %d)", step.GetAttempt())
	}
	position := number(step.GetStep() + 1) // counted from zero on the wire, from one for people
	if len(t.names) > 0 {
		position += "/" + number(int64(len(t.names)))
	}
	line := stepLine{
		step: step.GetStep(), text: fmt.Sprintf("%s %s: %s", position, clean(name), text),
		open: step.GetState() == commonv1.AttemptState_ATTEMPT_STATE_RUNNING || step.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING,
	}
	if step.GetDirection() == commonv1.Direction_DIRECTION_UNDO { // these go backwards
		t.flush()
		note(t.s.err, "  step %s", line.text)
		return
	}
	t.say(line)
}

func (p *Program) workspacesWatch() *cobra.Command {
	return &cobra.Command{
		Use: "watch [WS]", Short: "Print every change of a workspace with its steps, or of all workspaces, until Ctrl-C",
		Example: "  gpuaas workspaces watch acme/demo2\n  gpuaas workspaces watch -o jsonl", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req := &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
			if len(args) == 1 {
				id, err := s.workspaceID(ctx, args[0])
				if err != nil {
					return err
				}
				req.Workspace = id
				req.Topics = append(req.Topics, readmodelv1.Topic_TOPIC_STEPS)
			}
			return s.printChanges(ctx, req, func(item *readmodelv1.WatchItem) (string, []string) {
				if step := item.GetStep(); step != nil {
					return "step " + number(step.GetStep()+1) + " " + step.GetName(), []string{
						word(step.GetDirection()), word(step.GetState()), "attempt " + number(step.GetAttempt()), or(step.GetError(), step.GetWhyWaiting()),
					}
				}
				w := item.GetWorkspace()
				return or(fullName(w), item.GetId()), []string{word(w.GetState()), word(w.GetUserState()), w.GetCurrentStep(), or(or(or(w.GetAgentDetail(), w.GetWorkloadDetail()), w.GetLastError()), w.GetWhyWaiting())}
			})
		}),
	}
}

// printChanges prints what a watch brings until the person ends it.
func (s *session) printChanges(ctx context.Context, req *readmodelv1.WatchRequest, row func(*readmodelv1.WatchItem) (string, []string)) error {
	err := s.follow(ctx, req, nil, func(item *readmodelv1.WatchItem) (bool, error) {
		if s.structured() {
			raw, err := names.MarshalJSON(item)
			if err != nil {
				return false, fmt.Errorf("print change: %w", err)
			}
			if s.format == formatYAML {
				if err := s.line("---"); err != nil {
					return false, err
				}
				return false, s.document(raw)
			}
			// One change is one line: a stream of them is read line by line.
			lines := *s.printer
			lines.format = formatJSONL
			return false, lines.document(raw)
		}
		name, fields := row(item)
		if s.format == formatName {
			return false, s.line(clean(name))
		}
		fields = append([]string{s.now().UTC().Format("15:04:05.000"), word(item.GetChange()), name}, fields...)
		for i, field := range fields {
			fields[i] = clean(field)
			if s.tty {
				fields[i] = s.paint(fields[i])
			}
		}
		separator := "\t"
		if s.tty {
			separator = "  "
		}
		return false, s.line(strings.TrimRight(strings.Join(fields, separator), "\t "))
	})
	return err
}
