package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/showable"
)

// fullName returns the name of a workspace in lists of several tenants: tenant/name.
func fullName(w *readmodelv1.Workspace) string {
	if w.GetTenant() == "" {
		return w.GetName()
	}
	return w.GetTenant() + "/" + w.GetName()
}

// agent returns the text about a workspace's agent: why it cannot act, if that is known, else whether it is connected.
func agent(w *readmodelv1.Workspace) string {
	switch {
	case w.GetReason() != "":
		return w.GetReason()
	case w.GetAgentConnected():
		return "connected"
	case w.GetNodeId() != "" && w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
		return "not connected"
	}
	return ""
}

// environment returns the names of each workload's variables, one line for each workload that has any. No answer of the
// API has their values.
func environment(workloads []*nodev1.Workload) string {
	var lines []string
	for _, w := range workloads {
		if len(w.GetEnvNames()) > 0 {
			lines = append(lines, w.GetName()+": "+strings.Join(w.GetEnvNames(), ", ")+" (values are secret)")
		}
	}
	return strings.Join(lines, "\n")
}

var workspaceView = view[*readmodelv1.Workspace]{
	name: fullName,
	id:   "workspace_id",
	columns: []column[*readmodelv1.Workspace]{
		{title: "TENANT", path: "tenant"},
		{title: "NAME", path: "name"},
		{title: "STATE", path: "state"},
		{title: "USER STATE", drop: 1, path: "user_state"},
		{title: "AGENT", drop: 5, of: func(_ *printer, w *readmodelv1.Workspace) string { return agent(w) }},
		{title: "EPOCH", drop: 7, path: "epoch"},
		{title: "STEP", drop: 4, of: func(_ *printer, w *readmodelv1.Workspace) string {
			return strings.TrimSpace(w.GetCurrentStep() + onlyIf(w.GetStalled(), " (stalled)"))
		}},
		{title: "NODE", drop: 6, id: true, path: "node_name|node_id"},
		{title: "SINCE", drop: 8, moves: true, path: "state_at"},
		{title: "LAST ERROR", drop: 2, text: true, path: "last_error"},
		{title: "WORKLOADS", drop: 3, text: true, path: "workload_detail"},
		{title: "AGENT SINCE", moves: true, path: "agent_since", wide: true},
		{title: "AGENT DETAIL", path: "agent_detail", wide: true},
		{title: "ID", path: "workspace_id", wide: true},
		{title: "GPUS", path: "spec.gpus", wide: true},
		{title: "PLACEMENT", path: "spec.placement", wide: true},
		{title: "CREATED BY", path: "created_by", wide: true},
	},
	more: []column[*readmodelv1.Workspace]{
		{title: "NEXT ACTION", path: "next_action"},
		{title: "ENDPOINTS", of: func(_ *printer, w *readmodelv1.Workspace) string {
			lines := make([]string, 0, len(w.GetEndpoints()))
			for _, e := range w.GetEndpoints() {
				lines = append(lines, strings.TrimSpace(e.GetUrl()+" "+strings.Trim(e.GetWorkload()+"/"+e.GetName(), "/")))
			}
			return strings.Join(lines, "\n")
		}},
		{title: "ENVIRONMENT", of: func(_ *printer, w *readmodelv1.Workspace) string { return environment(w.GetSpec().GetWorkloads()) }},
		{title: "FINDINGS", of: func(_ *printer, w *readmodelv1.Workspace) string { return findingLines(w.GetFindings()) }},
		{title: "WAITING FOR", path: "why_waiting"},
		{title: "RUN", path: "run_id"},
		{title: "CREATED", path: "created_at"},
	},
}

var operationView = view[*lifecyclev1.Operation]{
	name: (*lifecyclev1.Operation).GetOperationId,
	columns: []column[*lifecyclev1.Operation]{
		{title: "OPERATION", path: "operation_id"},
		{title: "KIND", path: "kind"},
		{title: "JOINED", path: "joined", as: trueFalse},
		{title: "WORKSPACE", path: "workspace_id"},
		{title: "EPOCH", path: "epoch"},
		{title: "STATE", path: "state"},
	},
	more: []column[*lifecyclev1.Operation]{
		{title: "REPLAYED", path: "replayed", as: trueOnly},
		{title: "ADVICE", path: "advice"},
	},
}

// dryRunView prints what an operation would do. It has no operation id, because no operation was begun.
var dryRunView = view[*lifecyclev1.Operation]{
	name: func(o *lifecyclev1.Operation) string { return verb(o.GetKind()) },
	columns: []column[*lifecyclev1.Operation]{
		{title: "DRY RUN", path: "kind", as: dashed},
		{title: "WORKSPACE", path: "workspace_id"},
		{title: "WOULD DO", path: "consequence"},
	},
}

// printOperation prints the answer to a command: the operation that it began or joined, or what it would do. name is the
// full name of the workspace; if it is empty, printOperation reads it from the mesh.
func printOperation(ctx context.Context, s *session, o *lifecyclev1.Operation, name string) error {
	if s.structured() || s.format == formatName {
		if o.GetDryRun() && !s.structured() {
			return one(s.printer, dryRunView, o)
		}
		return one(s.printer, operationView, o)
	}
	if name == "" && o.GetWorkspaceId() != "" {
		// A person who may operate and not read sees only the id.
		if answer, err := s.query.GetWorkspace(ctx,
			&readmodelv1.GetWorkspaceRequest{Workspace: o.GetWorkspaceId()}); err == nil {
			name = fullName(answer.GetWorkspace())
		}
	}
	if !o.GetDryRun() {
		return one(s.printer, withWorkspace(operationView, name), o)
	}
	note(s.err, "dry run: nothing was changed")
	return one(s.printer, withWorkspace(dryRunView, name), o)
}

// withWorkspace returns a view of operations that prints the workspace's name and the end of its id.
func withWorkspace(v view[*lifecyclev1.Operation], name string) view[*lifecyclev1.Operation] {
	if name == "" {
		return v
	}
	v.columns = slices.Clone(v.columns)
	for i, c := range v.columns {
		if c.path != "workspace_id" {
			continue
		}
		v.columns[i].of = func(_ *printer, o *lifecyclev1.Operation) string {
			return name + onlyIf(o.GetWorkspaceId() != "", " ("+shorten([]string{o.GetWorkspaceId()})[0]+")")
		}
	}
	return v
}

func workspacesCommand(p *Program) *cobra.Command {
	return group("workspaces", "Workspaces of tenants", []string{"workspace", "ws"},
		workspacesCreate(p), workspacesList(p), workspacesGet(p), workspacesWatch(p), workspacesWait(p),
		workspacesTimeline(p), workspacesLogs(p), workspacesActions(p), workspacesRecoveries(p),
		workspacesEscalate(p),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_CANCEL, "End the open operation and undo what it did"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RESET, "Make a failed workspace ready for another try"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RETRY, "Provision a failed workspace again"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO, "Try the undo of a stuck workspace again"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO,
			"Give up an undo that cannot succeed; its claims become orphans"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_RECREATE,
			"End the workspace's instance and launch another with the next epoch"),
		workspacesOperate(p, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, "End a workspace and give back all it holds"),
	)
}

func workspacesList(p *Program) *cobra.Command {
	var (
		page  paging
		state string
	)
	var tenant string
	req := &readmodelv1.ListWorkspacesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List workspaces",
		Example: "  gpuaas workspaces list --tenant acme --state active", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			var err error
			if req.State, err = parseEnum[commonv1.WorkspaceState]("state", state); err != nil {
				return err
			}
			if req.Tenant, err = s.tenantID(ctx, tenant); err != nil {
				return err
			}
			return show(ctx, s, page, source[*readmodelv1.Workspace]{
				view: workspaceView, topic: readmodelv1.Topic_TOPIC_WORKSPACES, changed: (*readmodelv1.WatchItem).GetWorkspace,
				keep: func(w *readmodelv1.Workspace) bool {
					tenant := req.GetTenant()
					return (tenant == "" || w.GetTenant() == tenant || w.GetTenantId() == tenant) &&
						(req.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED || w.GetState() == req.GetState())
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.Workspace, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.query.ListWorkspaces(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	cmd.Flags().StringVar(&tenant, "tenant", "", "only those of this tenant: its name, its id or a part of the id")
	cmd.Flags().StringVar(&state, "state", "",
		"only those in this state: "+strings.Join(names.Spellings[commonv1.WorkspaceState](), ", "))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.completeTenants)
	_ = cmd.RegisterFlagCompletionFunc("state",
		cobra.FixedCompletions(names.Spellings[commonv1.WorkspaceState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func workspacesGet(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "get WS", Aliases: []string{"describe"},
		Short:   "Show one workspace (an id, tenant/name, or a bare name if it is unique)",
		Example: "  gpuaas workspaces get acme/demo2", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return one(s.printer, workspaceView, answer.GetWorkspace())
		}),
	}
}

var timelineView = view[*readmodelv1.TimelineItem]{
	name: (*readmodelv1.TimelineItem).GetName,
	columns: []column[*readmodelv1.TimelineItem]{
		{title: "STEP", path: "step"},
		{title: "NAME", path: "name direction", as: undone},
		{title: "DIRECTION", path: "direction", wide: true},
		{title: "ATTEMPT", drop: 1, path: "attempt", as: nonzero},
		{title: "STATE", of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			return cmp.Or(enumText(i.GetState()), "not begun") + onlyIf(i.GetStalled(), " (stalled)")
		}},
		{title: "STARTED", drop: 4, moves: true, path: "started_at"},
		{title: "DURATION", drop: 2, moves: true, path: "duration_seconds"},
		{title: "HEARTBEAT", drop: 5, moves: true, of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			return onlyIf(i.GetHeartbeatAgeSeconds() > 0, seconds(i.GetHeartbeatAgeSeconds())+" ago")
		}},
		{title: "PROGRESS", drop: 3, path: "progress"},
		{title: "ERROR", drop: 6, below: true, of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			layer := enumText(i.GetErrorLayer())
			return onlyIf(layer != "" && i.GetError() != "", "["+layer+"] ") + cmp.Or(i.GetError(),
				i.GetWhyWaiting()) + onlyIf(i.GetCause() != "", ": "+i.GetCause())
		}},
		{title: "CAUSE", path: "likely_cause", wide: true},
		{title: "ADVICE", path: "advice", wide: true},
		{title: "ROUND", path: "round", as: nonzero, wide: true},
		{title: "RUN", path: "run_id", wide: true},
	},
}

// runView lists the runs of a workspace under the timeline of one.
var runView = view[*readmodelv1.RunBrief]{
	name: (*readmodelv1.RunBrief).GetRunId,
	columns: []column[*readmodelv1.RunBrief]{
		{title: "RUN", id: true, path: "run_id"},
		{title: "KIND", path: "kind", as: dashed},
		{title: "STATE", path: "state"},
		{title: "STARTED", drop: 3, moves: true, path: "started_at"},
		{title: "ENDED", drop: 4, moves: true, path: "ended_at"},
		{title: "FAILED STEP", drop: 1, path: "failed_step"},
		{title: "SHOWN", drop: 2, of: func(_ *printer, r *readmodelv1.RunBrief) string { return onlyIf(r.GetShown(), "above") }},
		{title: "ERROR", wide: true, path: "error_layer error", as: layered},
	},
}

func workspacesTimeline(p *Program) *cobra.Command {
	req := &readmodelv1.GetTimelineRequest{}
	cmd := &cobra.Command{
		Use: "timeline WS", Short: "Show every attempt at every step of a run, as recorded, and which runs there were",
		Example: "  gpuaas workspaces timeline acme/demo2\n  gpuaas workspaces timeline acme/demo2 --run 0192f0c1-0000-7000-8000-000000000003 -o wide", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Workspace = args[0]
			if req.GetRunId() != "" {
				id, err := s.id(ctx, kindRun, req.GetRunId())
				if err != nil {
					return err
				}
				req.RunId = id
			}
			answer, err := s.query.GetTimeline(ctx, req)
			if err != nil {
				return err
			}
			err = list(s.printer, timelineView, answer.GetItems(), "", with("workspace", messages(answer.GetWorkspace())[0]),
				with("runs", messages(answer.GetRuns()...)), with("history", messages(answer.GetHistory()...)))
			if err != nil || s.printer.structured() || s.printer.format == formatName {
				return err
			}
			if err := lastOutputs(s, answer.GetItems()); err != nil || len(answer.GetHistory()) < 2 {
				return err
			}
			return under(s.printer, runView.columns, answer.GetHistory())
		}),
	}
	cmd.Flags().StringVar(&req.RunId, "run", "",
		"show this `run` instead of the newest: one of those that the timeline lists")
	return cmd
}

// lastOutputs prints, under a timeline, the last output of the workloads whose failures it shows, and what to do about
// them.
func lastOutputs(s *session, items []*readmodelv1.TimelineItem) error {
	for _, i := range items {
		if i.GetLastOutput() == "" {
			continue
		}
		title := fmt.Sprintf("last output at step %s (%s), attempt %d:", i.GetStep(), clean(i.GetName()), i.GetAttempt())
		for _, text := range append([]string{"", title}, indented(i.GetLastOutput())...) {
			if err := s.line(text); err != nil {
				return err
			}
		}
	}
	return nil
}

// indented returns the lines of a text, cleaned and indented by two spaces.
func indented(text string) []string {
	var out []string
	for line := range strings.Lines(showable.Clean([]byte(text))) {
		out = append(out, "  "+strings.TrimRight(line, "\n"))
	}
	return out
}

var actionView = view[*lifecyclev1.ActionOption]{
	name: func(a *lifecyclev1.ActionOption) string { return verb(a.GetKind()) },
	columns: []column[*lifecyclev1.ActionOption]{
		{title: "ACTION", path: "kind", as: dashed},
		{title: "POSSIBLE", of: func(_ *printer, a *lifecyclev1.ActionOption) string {
			if a.GetPossible() {
				return "yes"
			}
			return "not now"
		}},
		{title: "WHAT IT WOULD DO", drop: 1, path: "consequence"},
		{
			title: "WHY NOT", text: true,
			of: func(_ *printer, a *lifecyclev1.ActionOption) string { return strings.Join(a.GetUnmet(), "; ") },
		},
		{title: "REASON", path: "reason", wide: true},
	},
}

// verb returns the name of the command for a kind of operation.
func verb(kind commonv1.OperationKind) string { return strings.ReplaceAll(enumText(kind), "_", "-") }

func workspacesActions(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "actions WS", Short: "Show which operations are possible now, why the others are not, and what each would do",
		Example: "  gpuaas workspaces actions acme/demo2", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return list(s.printer, actionView, answer.GetActions(), "")
		}),
	}
}

// restingState is the state in which a workspace comes to rest after an operation that succeeded.
var restingState = map[commonv1.OperationKind]commonv1.WorkspaceState{
	commonv1.OperationKind_OPERATION_KIND_CREATE:       commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RETRY:        commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RECREATE:     commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_DECOMMISSION: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
	commonv1.OperationKind_OPERATION_KIND_CANCEL:       commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO:   commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
}

// restsIn returns the state in which a workspace comes to rest after a verb, and whether there is one. The operation
// that a verb on an open run results in is the run's own, of kind run: a create that is cancelled ends failed, and a
// decommission whose undo is tried again ends decommissioned.
func restsIn(verb, run commonv1.OperationKind) (commonv1.WorkspaceState, bool) {
	kind := run
	if restingState[verb] == commonv1.WorkspaceState_WORKSPACE_STATE_FAILED &&
		run != commonv1.OperationKind_OPERATION_KIND_DECOMMISSION {
		kind = verb
	}
	state, ok := restingState[kind]
	return state, ok
}

func workspacesOperate(p *Program, kind commonv1.OperationKind, short string) *cobra.Command {
	var (
		req     = &readmodelv1.OperateWorkspaceRequest{Kind: kind}
		wait    bool
		timeout time.Duration
		proof   string
	)
	name := verb(kind)
	lost := lostBy[kind]
	example := "  gpuaas workspaces " + name + " acme/demo2 --dry-run"
	if lost != "" {
		example += "\n  gpuaas workspaces " + name + " acme/demo2 --reason 'the project is over'" +
			"\n  gpuaas workspaces " + name + " acme/demo2 --reason 'the project is over' --yes"
	} else {
		example += "\n  gpuaas workspaces " + name + " acme/demo2"
	}
	cmd := &cobra.Command{
		Use: name + " WS", Short: short, Example: example, Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			var err error
			if req.FencedProof, err = parseEnum[commonv1.FencedProof]("fenced-proof", proof); err != nil {
				return err
			}
			if proof != "" && strings.TrimSpace(req.GetReason()) == "" {
				return Usage(errors.New("--fenced-proof needs --reason TEXT: it goes into the record"))
			}
			req.Workspace = args[0]
			if lost != "" {
				if err := s.confirmed(ctx, losesWorkspace(s, req, lost)); err != nil {
					return err
				}
			}
			answer, err := s.command.OperateWorkspace(ctx, req)
			if err != nil {
				return err
			}
			op := answer.GetOperation()
			if want, ok := restsIn(kind, op.GetKind()); ok && wait && !op.GetDryRun() {
				return awaitOperation(ctx, s, op, args[0], want, timeout)
			}
			return printOperation(ctx, s, op, "")
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&req.Reason, "reason", "",
		"why, in words, for the record"+onlyIf(lost != "", " (required, except with --dry-run)"))
	flags.BoolVar(&req.Override, "override", false, "go beyond the limit of retries; needs the operator role")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only show what it would do, or what stands in the way")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "",
		"a repeated request with the same `key` gets the same operation")
	if kind == commonv1.OperationKind_OPERATION_KIND_RECREATE {
		proofs := names.Spellings[commonv1.FencedProof]()
		flags.StringVar(&proof, "fenced-proof", "",
			"an operator's statement that nothing runs on a machine that cannot confirm it: "+strings.Join(proofs, ", ")+
				"; needs --reason")
		_ = cmd.RegisterFlagCompletionFunc("fenced-proof", cobra.FixedCompletions(proofs, cobra.ShellCompDirectiveNoFileComp))
	}
	if _, ok := restingState[kind]; ok {
		flags.BoolVar(&wait, "wait", false, "wait until the operation has ended, and print the workspace")
		flags.DurationVar(&timeout, "timeout", 10*time.Minute,
			"give up waiting after this long (exit 6); the operation goes on; 0 waits without end")
	}
	if lost == "" {
		return cmd
	}
	return needsReason(asks(cmd), &req.Reason)
}

// lostBy has the text about the loss for each operation that must be confirmed.
var lostBy = map[commonv1.OperationKind]string{
	commonv1.OperationKind_OPERATION_KIND_DECOMMISSION: "%s will be ended for good: its workloads stop, and its storage, its database schema and its GPUs are given up.",
	commonv1.OperationKind_OPERATION_KIND_RECREATE:     "The instance of %s will be ended and another launched: its workloads stop, and what they keep on that instance is lost.",
	commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO:    "The undo of %s will be given up: what it has not cleaned stays behind as orphan claims.",
}

// losesWorkspace returns the question about a workspace, by its full name. It returns an error if the mesh reports that the
// operation is not possible now. It puts the id of that workspace in the request, even if another workspace gets the
// name meanwhile.
func losesWorkspace(s *session, req *readmodelv1.OperateWorkspaceRequest, lost string) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		answer, err := s.query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: req.GetWorkspace()})
		if err != nil {
			return question{}, err
		}
		w := answer.GetWorkspace()
		req.Workspace = w.GetWorkspaceId()
		dry := proto.CloneOf(req)
		dry.DryRun, dry.IdempotencyKey = true, ""
		if _, err := s.command.OperateWorkspace(ctx, dry); err != nil {
			return question{}, err
		}
		state := fmt.Sprintf("It is %s now%s.", enumText(w.GetState()),
			onlyIf(w.GetNodeName() != "", ", on "+w.GetNodeName()))
		return question{name: fullName(w), lost: []string{fmt.Sprintf(lost, fullName(w)), state}}, nil
	}
}
