package nodes

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/hostrecord"
)

// RecordView is how the entries of a host's record are printed.
var RecordView = output.View[*commonv1.Diagnostic]{
	Name: (*commonv1.Diagnostic).GetDedupeKeyHash,
	Columns: []output.Column[*commonv1.Diagnostic]{
		{Title: "CODE", Path: "code"},
		{Title: "COUNT", Drop: 4, Path: "count"},
		{Title: "FIRST SEEN", Drop: 3, Path: "first_seen_at"},
		{Title: "LAST SEEN", Drop: 1, Path: "observed_at"},
		{Title: "OVER SINCE", Drop: 5, Path: "ended_at"},
		{Title: "DETAIL", Path: "detail"},
		{Title: "CORRELATION", Path: "retry_correlation_id", Wide: true},
		{Title: "KEY", Path: "dedupe_key_hash", Wide: true},
	},
}

// MergedView is how it is printed what became of a record that was brought.
var MergedView = output.View[*readmodelv1.MergeDiagnosticsResponse]{
	Name: (*readmodelv1.MergeDiagnosticsResponse).GetNodeId,
	Columns: []output.Column[*readmodelv1.MergeDiagnosticsResponse]{
		{Title: "NODE", ID: true, Path: "node_id"},
		{Title: "NEW", Of: func(_ *output.Printer, m *readmodelv1.MergeDiagnosticsResponse) string {
			if m.GetMerged().GetChanged() {
				return "yes"
			}
			return "no: the same record was brought before"
		}},
		{Title: "EXPLAINS", Of: func(_ *output.Printer, m *readmodelv1.MergeDiagnosticsResponse) string {
			return strings.Join(m.GetMerged().GetExplains(), ", ")
		}},
		{Title: "TAKEN", Path: "merged.taken"},
		{Title: "UNKNOWN CODES", Path: "merged.unknown_codes", As: output.NonZero},
		{Title: "OUT OF TIME", Path: "merged.out_of_time", As: output.NonZero},
	},
}

func diagCommand(p *kit.Program) *cobra.Command {
	var (
		file, key string
		timeout   time.Duration
	)
	cmd := &cobra.Command{
		Use:   "diag NODE",
		Short: "Ask a node for its host's diagnostic record, or bring that of one that is not connected",
		Long: "Without --file, the connected agent of the node is asked for what it recorded on its host. An agent that\n" +
			"reaches no API cannot be asked: run `gpuaas-node-agent diag -o json` on the host and bring what it prints, or\n" +
			"the agent's diagnostics.json, with --file. The record explains why the node is not connected; it proves\n" +
			"nothing, and makes no node healthy.",
		Example: "  gpuaas nodes diag node-1\n  gpuaas nodes diag node-1 --file diag.json\n" +
			"  gpuaas nodes diag node-1 --file -",
		Args: kit.Args("NODE"), ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
	}
	cmd.RunE = p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
		if file != "" {
			return bring(ctx, s, args[0], file, cmd.InOrStdin())
		}
		return collect(ctx, s, &readmodelv1.CollectDiagnosticsRequest{Node: args[0], IdempotencyKey: key}, timeout)
	})
	cmd.Flags().StringVar(&file, "file", "", "record of the host to bring: a file, or - for standard input")
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second,
		"give up waiting for the agent after this long (exit 6); 0 waits without end")
	cmd.Flags().StringVar(&key, "idempotency-key", "", "the same key answers the same task")
	return cmd
}

// bring sends the record in a file, or on standard input.
func bring(ctx context.Context, s *kit.Session, node, file string, in io.Reader) error {
	if file != "-" {
		opened, err := os.Open(file)
		if err != nil {
			return unusable(fmt.Errorf("--file: %w", err))
		}
		defer func() { _ = opened.Close() }()
		in = opened
	}
	records, err := hostrecord.Read(in)
	if err != nil {
		return unusable(fmt.Errorf("--file %s: %w", file, err))
	}
	answer, err := s.Client.Diagnostics.MergeDiagnostics(ctx,
		&readmodelv1.MergeDiagnosticsRequest{Node: node, Records: records})
	if err != nil {
		return err
	}
	return output.One(s.Printer, MergedView, answer)
}

// unusable returns the error of a file that is no record.
func unusable(err error) error {
	return &exit.Error{
		Code: exit.CodeUsage, Reason: commonv1.Reason_REASON_INVALID_ARGUMENT, Message: err.Error(),
		Remedy: "run `gpuaas-node-agent diag -o json > diag.json` on the host, and bring that file, or the agent's " +
			"diagnostics.json, with --file",
	}
}

// collect asks the agent of a node, waits for its answer and prints it.
func collect(ctx context.Context, s *kit.Session, req *readmodelv1.CollectDiagnosticsRequest,
	timeout time.Duration,
) error {
	asked, err := s.Client.Diagnostics.CollectDiagnostics(ctx, req)
	if err != nil {
		return err
	}
	last, err := awaitTask(ctx, s, asked.GetTask(), asked.GetPos(), timeout, nil)
	if err := taskOutcome(last, timeout, err); err != nil {
		return err
	}
	answer, err := s.Client.Diagnostics.GetCollectedDiagnostics(ctx,
		&readmodelv1.GetCollectedDiagnosticsRequest{TaskId: last.GetTaskId()})
	if err != nil {
		return err
	}
	return output.List(s.Printer, RecordView, answer.GetDiagnostics(), "")
}
