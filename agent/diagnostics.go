package agent

import (
	"context"
	"log/slog"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/diag/cause"
	"github.com/gpuaas/mesh/agent/diag/journald"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/names"
)

// LedgerFile is the name of the task ledger in the state directory.
const LedgerFile = "ledger.db"

// DiagnosticsFile is the name of the diagnostic record in the state directory.
const DiagnosticsFile = "diagnostics.json"

const codeSkewed = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED

// Diagnostics reads the record of an agent that may be running: it takes no lock and changes nothing.
func Diagnostics(stateDir string, now time.Time) ([]diag.Entry, error) {
	return diag.Read(filepath.Join(stateDir, DiagnosticsFile), now)
}

// helloDiagnostics returns the entries of which the control plane was not told yet.
func (a *Agent) helloDiagnostics() []*commonv1.Diagnostic {
	unreported := a.diag.Unreported()
	a.mu.Lock()
	a.inHello = unreported
	a.mu.Unlock()
	return messages(unreported)
}

// helloAccepted notes that a session was admitted, after whose Hello nothing in it is told again. The control plane's
// clock is known now: the record has whether the host's differs by more than certificates allow.
func (a *Agent) helloAccepted(ctx context.Context) {
	a.mu.Lock()
	sent := a.inHello
	a.inHello = nil
	a.mu.Unlock()
	a.warn(ctx, "diagnostics not noted as told, they are told again", a.noted(a.diag.Admitted(sent)))
	skew, ok := a.clock.Skew()
	switch {
	case ok && skew.Abs() > cause.Skewed:
		ahead := "ahead of"
		if skew < 0 {
			ahead = "behind"
		}
		a.record(ctx, codeSkewed,
			"the host's clock is "+skew.Abs().Round(time.Minute).String()+" "+ahead+" the control plane's", 0)
	case ok:
		_, err := a.diag.End(codeSkewed)
		a.warn(ctx, "diagnostic not ended", a.noted(err))
	}
}

// report sends the control plane new entries while a session is admitted, at most once every ReportLeast.
func (a *Agent) report(ctx context.Context) error {
	for {
		wait := a.diag.Changed()
		if news := a.diag.News(); len(news) > 0 && a.session() != nil {
			if a.sendReport(&nodev1.DiagnosticReport{Diagnostics: messages(news)}) {
				a.warn(ctx, "diagnostics not noted as told, they are told again", a.noted(a.diag.NoteReported(news)))
			}
			if !app.Sleep(ctx, a.cfg.ReportLeast) {
				return context.Cause(ctx)
			}
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-wait:
		}
	}
}

// sendReport gives the session a report and returns whether the session took it. A later session sends it in Hello.
func (a *Agent) sendReport(report *nodev1.DiagnosticReport) bool {
	client := a.session()
	return client != nil && client.Diagnose(report) == nil
}

// signOfLife records that this process lives: at its start, and at a slow cadence while no session is admitted.
func (a *Agent) signOfLife(ctx context.Context) error {
	for {
		if err := a.noted(a.diag.Alive("agent " + a.cfg.Version + " runs")); err != nil {
			a.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
		}
		if !app.Sleep(ctx, a.cfg.AliveEvery) {
			return context.Cause(ctx)
		}
	}
}

func messages(entries []diag.Entry) []*commonv1.Diagnostic {
	out := make([]*commonv1.Diagnostic, 0, len(entries))
	for _, e := range entries {
		out = append(out, e.Proto())
	}
	return out
}

// mirror writes an entry of the record to the journal of the host, where there is one.
func (a *Agent) mirror(e diag.Entry) {
	priority, node := journald.Warning, ""
	if e.Code == names.Of(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROCESS_ALIVE) {
		priority = journald.Info
	}
	if a.store != nil {
		known, _ := a.store.Node()
		node = known.NodeID
	}
	stamp := func(at time.Time) string { return at.UTC().Format(time.RFC3339Nano) }
	err := journald.Write(a.cfg.JournalSocket, priority, e.Code+": "+e.Detail,
		journald.Field{Name: "GPUAAS_CODE", Value: e.Code},
		journald.Field{Name: "GPUAAS_NODE_ID", Value: node},
		journald.Field{Name: "GPUAAS_CORRELATION_ID", Value: e.RetryCorrelationID},
		journald.Field{Name: "GPUAAS_DEDUPE_KEY_HASH", Value: e.DedupeKeyHash},
		journald.Field{Name: "GPUAAS_FIRST_SEEN", Value: stamp(e.FirstSeen)},
		journald.Field{Name: "GPUAAS_LAST_SEEN", Value: stamp(e.LastSeen)},
		journald.Field{Name: "GPUAAS_COUNT", Value: strconv.FormatInt(e.Count, 10)})
	if err != nil {
		a.deps.Logger.Warn("journal not written", slog.Any("error", err))
	}
}
