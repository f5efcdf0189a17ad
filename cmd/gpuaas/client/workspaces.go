package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// fullName is how a workspace is named where names of several tenants stand together.
func fullName(w *readmodelv1.Workspace) string {
	if w.GetTenant() == "" {
		return w.GetName()
	}
	return w.GetTenant() + "/" + w.GetName()
}

// agent says whether the agent that acts for a workspace can: why it cannot, where that is known, else whether it is connected.
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

// environment lists the names of each workload's variables, a line for each workload that has any. No answer has their values.
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
	columns: []column[*readmodelv1.Workspace]{
		{"TENANT", false, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetTenant() }},
		{"NAME", false, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetName() }},
		{"STATE", false, func(_ *printer, w *readmodelv1.Workspace) string { return word(w.GetState()) }},
		{"USER STATE", false, func(_ *printer, w *readmodelv1.Workspace) string { return word(w.GetUserState()) }},
		{"AGENT", false, func(_ *printer, w *readmodelv1.Workspace) string { return agent(w) }},
		{"EPOCH", false, func(_ *printer, w *readmodelv1.Workspace) string { return number(w.GetEpoch()) }},
		{"STEP", false, func(_ *printer, w *readmodelv1.Workspace) string {
			return strings.TrimSpace(w.GetCurrentStep() + onlyIf(w.GetStalled(), " (stalled)"))
		}},
		{"NODE", false, func(_ *printer, w *readmodelv1.Workspace) string { return or(w.GetNodeName(), w.GetNodeId()) }},
		{"SINCE", false, func(pr *printer, w *readmodelv1.Workspace) string { return pr.when(w.GetStateAt()) }},
		{"LAST ERROR", false, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetLastError() }},
		{"AGENT SINCE", true, func(pr *printer, w *readmodelv1.Workspace) string { return pr.when(w.GetAgentSince()) }},
		{"AGENT DETAIL", true, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetAgentDetail() }},
		{"ID", true, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetWorkspaceId() }},
		{"GPUS", true, func(_ *printer, w *readmodelv1.Workspace) string { return number(w.GetSpec().GetGpus()) }},
		{"PLACEMENT", true, func(_ *printer, w *readmodelv1.Workspace) string { return word(w.GetSpec().GetPlacement()) }},
		{"CREATED BY", true, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetCreatedBy() }},
	},
	more: []column[*readmodelv1.Workspace]{
		{"ENDPOINTS", false, func(_ *printer, w *readmodelv1.Workspace) string {
			lines := make([]string, 0, len(w.GetEndpoints()))
			for _, e := range w.GetEndpoints() {
				lines = append(lines, strings.TrimSpace(e.GetUrl()+" "+strings.Trim(e.GetWorkload()+"/"+e.GetName(), "/")))
			}
			return strings.Join(lines, "\n")
		}},
		{"ENVIRONMENT", false, func(_ *printer, w *readmodelv1.Workspace) string { return environment(w.GetSpec().GetWorkloads()) }},
		{"FINDINGS", false, func(_ *printer, w *readmodelv1.Workspace) string { return findingLines(w.GetFindings()) }},
		{"WAITING FOR", false, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetWhyWaiting() }},
		{"RUN", false, func(_ *printer, w *readmodelv1.Workspace) string { return w.GetRunId() }},
		{"CREATED", false, func(pr *printer, w *readmodelv1.Workspace) string { return pr.when(w.GetCreatedAt()) }},
	},
}

var operationView = view[*lifecyclev1.Operation]{
	name: (*lifecyclev1.Operation).GetOperationId,
	columns: []column[*lifecyclev1.Operation]{
		{"OPERATION", false, func(_ *printer, o *lifecyclev1.Operation) string { return o.GetOperationId() }},
		{"KIND", false, func(_ *printer, o *lifecyclev1.Operation) string { return word(o.GetKind()) }},
		{"JOINED", false, func(_ *printer, o *lifecyclev1.Operation) string { return fmt.Sprint(o.GetJoined()) }},
		{"WORKSPACE", false, func(_ *printer, o *lifecyclev1.Operation) string { return o.GetWorkspaceId() }},
		{"EPOCH", false, func(_ *printer, o *lifecyclev1.Operation) string { return number(o.GetEpoch()) }},
		{"STATE", false, func(_ *printer, o *lifecyclev1.Operation) string { return word(o.GetState()) }},
	},
	more: []column[*lifecyclev1.Operation]{
		{"REPLAYED", false, func(_ *printer, o *lifecyclev1.Operation) string { return onlyIf(o.GetReplayed(), "true") }},
		{"DRY RUN", false, func(_ *printer, o *lifecyclev1.Operation) string { return onlyIf(o.GetDryRun(), "true") }},
		{"WOULD DO", false, func(_ *printer, o *lifecyclev1.Operation) string { return o.GetConsequence() }},
		{"ADVICE", false, func(_ *printer, o *lifecyclev1.Operation) string { return o.GetAdvice() }},
	},
}

func (p *Program) workspacesCommand() *cobra.Command {
	return group("workspaces", "Workspaces of tenants", []string{"workspace", "ws"},
		p.workspacesCreate(), p.workspacesList(), p.workspacesGet(), p.workspacesWatch(), p.workspacesWait(), p.workspacesTimeline(), p.workspacesActions(), p.workspacesRecoveries(),
		p.workspacesEscalate(),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_CANCEL, "End the open operation and undo what it did", false),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_RESET, "Make a failed workspace ready for another try", false),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_RETRY, "Provision a failed workspace again", false),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO, "Try the undo of a stuck workspace again", false),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO, "Give up an undo that cannot succeed; its claims become orphans", true),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_RECREATE, "End the workspace's box and launch another with the next epoch", false),
		p.workspacesOperate(commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, "End a workspace and give back all it holds", false),
	)
}

func (p *Program) workspacesList() *cobra.Command {
	var (
		page  paging
		state string
	)
	req := &readmodelv1.ListWorkspacesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List workspaces", Example: "  gpuaas workspaces list --tenant acme --state active", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			var err error
			if req.State, err = parseEnum[commonv1.WorkspaceState]("state", state); err != nil {
				return err
			}
			items, next, err := pages(page.limit, page.token, func(size int32, token string) ([]*readmodelv1.Workspace, string, error) {
				req.PageSize, req.PageToken = size, token
				answer, err := s.query.ListWorkspaces(ctx, req)
				return answer.GetItems(), answer.GetNextPageToken(), err
			})
			if err != nil {
				return err
			}
			return list(s.printer, workspaceView, items, next)
		}),
	}
	page.flags(cmd)
	cmd.Flags().StringVar(&req.Tenant, "tenant", "", "only those of this tenant")
	cmd.Flags().StringVar(&state, "state", "", "only those in this state: "+strings.Join(names.Spellings[commonv1.WorkspaceState](), ", "))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.completeTenants)
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(names.Spellings[commonv1.WorkspaceState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (p *Program) workspacesGet() *cobra.Command {
	return &cobra.Command{
		Use: "get WS", Aliases: []string{"describe"}, Short: "Show one workspace (an id, tenant/name, or a bare name if it is unique)", Example: "  gpuaas workspaces get acme/demo2", Args: args("WS"),
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
		{"STEP", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetStep() }},
		{"NAME", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetName() }},
		{"DIRECTION", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return word(i.GetDirection()) }},
		{"ATTEMPT", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return positive(i.GetAttempt()) }},
		{"STATE", false, func(_ *printer, i *readmodelv1.TimelineItem) string {
			return or(word(i.GetState()), "not begun") + onlyIf(i.GetStalled(), " (stalled)")
		}},
		{"STARTED", false, func(pr *printer, i *readmodelv1.TimelineItem) string { return pr.when(i.GetStartedAt()) }},
		{"DURATION", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return seconds(i.GetDurationSeconds()) }},
		{"HEARTBEAT", false, func(_ *printer, i *readmodelv1.TimelineItem) string {
			return onlyIf(i.GetHeartbeatAgeSeconds() > 0, seconds(i.GetHeartbeatAgeSeconds())+" ago")
		}},
		{"PROGRESS", false, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetProgress() }},
		{"ERROR", false, func(_ *printer, i *readmodelv1.TimelineItem) string {
			layer := word(i.GetErrorLayer())
			return onlyIf(layer != "" && i.GetError() != "", "["+layer+"] ") + or(i.GetError(), i.GetWhyWaiting()) + onlyIf(i.GetCause() != "", ": "+i.GetCause())
		}},
		{"CAUSE", true, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetLikelyCause() }},
		{"ADVICE", true, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetAdvice() }},
		{"ROUND", true, func(_ *printer, i *readmodelv1.TimelineItem) string { return positive(i.GetRound()) }},
		{"RUN", true, func(_ *printer, i *readmodelv1.TimelineItem) string { return i.GetRunId() }},
	},
}

// runView lists the runs of a workspace under the timeline of one.
var runView = view[*readmodelv1.RunBrief]{
	name: (*readmodelv1.RunBrief).GetRunId,
	columns: []column[*readmodelv1.RunBrief]{
		{"RUN", false, func(_ *printer, r *readmodelv1.RunBrief) string { return r.GetRunId() }},
		{"KIND", false, func(_ *printer, r *readmodelv1.RunBrief) string { return verb(r.GetKind()) }},
		{"STATE", false, func(_ *printer, r *readmodelv1.RunBrief) string { return word(r.GetState()) }},
		{"STARTED", false, func(pr *printer, r *readmodelv1.RunBrief) string { return pr.when(r.GetStartedAt()) }},
		{"ENDED", false, func(pr *printer, r *readmodelv1.RunBrief) string { return pr.when(r.GetEndedAt()) }},
		{"FAILED STEP", false, func(_ *printer, r *readmodelv1.RunBrief) string { return r.GetFailedStep() }},
		{"SHOWN", false, func(_ *printer, r *readmodelv1.RunBrief) string { return onlyIf(r.GetShown(), "above") }},
		{"ERROR", true, func(_ *printer, r *readmodelv1.RunBrief) string {
			layer := word(r.GetErrorLayer())
			return onlyIf(layer != "" && r.GetError() != "", "["+layer+"] ") + r.GetError()
		}},
	},
}

func (p *Program) workspacesTimeline() *cobra.Command {
	req := &readmodelv1.GetTimelineRequest{}
	cmd := &cobra.Command{
		Use: "timeline WS", Short: "Show every attempt at every step of a run, as recorded, and which runs there were",
		Example: "  gpuaas workspaces timeline acme/demo2\n  gpuaas workspaces timeline acme/demo2 --run 0192f0c1-0000-7000-8000-000000000003 -o wide", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Workspace = args[0]
			answer, err := s.query.GetTimeline(ctx, req)
			if err != nil {
				return err
			}
			err = list(s.printer, timelineView, answer.GetItems(), "", member{"workspace", messages(answer.GetWorkspace())[0]},
				member{"runs", messages(answer.GetRuns()...)}, member{"history", messages(answer.GetHistory()...)})
			if err != nil || s.printer.structured() || s.printer.format == formatName || len(answer.GetHistory()) < 2 {
				return err
			}
			if err := s.printer.line(""); err != nil {
				return err
			}
			return list(s.printer, runView, answer.GetHistory(), "")
		}),
	}
	cmd.Flags().StringVar(&req.RunId, "run", "", "show this run instead of the one that stands: one of those that the timeline lists")
	return cmd
}

var actionView = view[*lifecyclev1.ActionOption]{
	name: func(a *lifecyclev1.ActionOption) string { return verb(a.GetKind()) },
	columns: []column[*lifecyclev1.ActionOption]{
		{"ACTION", false, func(_ *printer, a *lifecyclev1.ActionOption) string { return verb(a.GetKind()) }},
		{"POSSIBLE", false, func(_ *printer, a *lifecyclev1.ActionOption) string { return yesNo(a.GetPossible()) }},
		{"WHAT IT WOULD DO", false, func(_ *printer, a *lifecyclev1.ActionOption) string { return a.GetConsequence() }},
		{"UNMET", false, func(_ *printer, a *lifecyclev1.ActionOption) string { return strings.Join(a.GetUnmet(), "; ") }},
		{"REASON", false, func(_ *printer, a *lifecyclev1.ActionOption) string { return word(a.GetReason()) }},
	},
}

// verb is a kind of operation as the command is called.
func verb(kind commonv1.OperationKind) string { return strings.ReplaceAll(word(kind), "_", "-") }

func (p *Program) workspacesActions() *cobra.Command {
	return &cobra.Command{
		Use: "actions WS", Short: "Show which operations are possible now, why the others are not, and what each would do", Example: "  gpuaas workspaces actions acme/demo2", Args: args("WS"),
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

// restingState is where a workspace comes to rest when an operation went well.
var restingState = map[commonv1.OperationKind]commonv1.WorkspaceState{
	commonv1.OperationKind_OPERATION_KIND_CREATE:       commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RETRY:        commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_RECREATE:     commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	commonv1.OperationKind_OPERATION_KIND_DECOMMISSION: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
	commonv1.OperationKind_OPERATION_KIND_CANCEL:       commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO:   commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
}

func (p *Program) workspacesOperate(kind commonv1.OperationKind, short string, destructive bool) *cobra.Command {
	var (
		req     = &readmodelv1.OperateWorkspaceRequest{Kind: kind}
		wait    bool
		timeout time.Duration
		proof   string
	)
	name := verb(kind)
	example := "  gpuaas workspaces " + name + " acme/demo2 --dry-run"
	if destructive {
		example += "\n  gpuaas workspaces " + name + " acme/demo2 --reason 'why, for the record'"
	}
	cmd := &cobra.Command{
		Use: name + " WS", Short: short, Example: example, Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			if destructive && !req.GetDryRun() && strings.TrimSpace(req.GetReason()) == "" {
				return Usage(fmt.Errorf("%s wants --reason TEXT: it goes into the record (or --dry-run, to see what it would do)", name))
			}
			var err error
			if req.FencedProof, err = parseEnum[commonv1.FencedProof]("fenced-proof", proof); err != nil {
				return err
			}
			if proof != "" && strings.TrimSpace(req.GetReason()) == "" {
				return Usage(errors.New("--fenced-proof wants --reason TEXT: it goes into the record"))
			}
			req.Workspace = args[0]
			answer, err := s.command.OperateWorkspace(ctx, req)
			if err != nil {
				return err
			}
			op := answer.GetOperation()
			if want, ok := restingState[op.GetKind()]; ok && wait && !op.GetDryRun() {
				return s.awaitOperation(ctx, op, want, timeout)
			}
			return one(s.printer, operationView, op)
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&req.Reason, "reason", "", "why, in words, for the record"+onlyIf(destructive, " (required)"))
	flags.BoolVar(&req.Override, "override", false, "go beyond the limit of retries; needs the operator role")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only say what it would do, and what is unmet")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "", "the same key answers the same operation")
	if kind == commonv1.OperationKind_OPERATION_KIND_RECREATE {
		proofs := names.Spellings[commonv1.FencedProof]()
		flags.StringVar(&proof, "fenced-proof", "", "an operator's word that nothing runs on a machine that cannot confirm it: "+strings.Join(proofs, ", ")+"; needs --reason")
		_ = cmd.RegisterFlagCompletionFunc("fenced-proof", cobra.FixedCompletions(proofs, cobra.ShellCompDirectiveNoFileComp))
	}
	if _, ok := restingState[kind]; ok {
		flags.BoolVar(&wait, "wait", false, "wait until the operation has ended, and print the workspace")
		flags.DurationVar(&timeout, "timeout", 10*time.Minute, "give up waiting after this long (exit 6); the operation goes on; 0 waits without end")
	}
	return cmd
}
