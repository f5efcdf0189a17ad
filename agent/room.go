package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/room"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	codeDiskFull  = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL
	codeStateFile = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED
)

// openRoom begins to watch the directories that this agent writes to, and opens the reserve for its identity and
// diagnostics.
func (a *Agent) openRoom(ctx context.Context) error {
	const closed = 0o700
	if err := os.MkdirAll(a.cfg.StateDir, closed); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	a.room = room.New(room.Config{Dirs: []string{a.cfg.StateDir, a.cfg.EtcDir, a.cfg.WorkDir}, Now: a.clock.Wall})
	a.room.Check()
	spare, err := room.OpenReserve(filepath.Join(a.cfg.StateDir, room.ReserveFile))
	if err == nil {
		a.spare = spare
	}
	a.warn(ctx, "no room is reserved for identity and diagnostics", err)
	return nil
}

// openDiagnostics opens the diagnostic record. A file that cannot be read as one is set aside and reported.
func (a *Agent) openDiagnostics(ctx context.Context) error {
	var err error
	if a.diag, err = diag.Open(diag.Config{
		Path: filepath.Join(a.cfg.StateDir, DiagnosticsFile), Now: a.clock.Wall,
		Room: a.spare, Mirror: a.mirror,
	}); err != nil {
		return err
	}
	if aside := a.diag.SetAside(); aside != nil {
		a.problems(ctx, "diagnostics", []string{DiagnosticsFile + " was set aside and a new record begins: " + aside.Error()})
	}
	return nil
}

// problems logs and records which of the agent's own files were found broken.
func (a *Agent) problems(ctx context.Context, of string, found []string) {
	for _, problem := range found {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "state file problem", slog.String("of", of),
			slog.String("problem", problem))
		a.record(ctx, codeStateFile, problem, 0)
	}
}

// record keeps a diagnostic and returns what is kept; next is the time until the agent tries again, zero if nothing is
// tried again.
func (a *Agent) record(
	ctx context.Context, code commonv1.DiagnosticCode, detail string, next time.Duration,
) diag.Entry {
	kept, err := a.diag.Record(code, detail, next)
	if a.noted(err) != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
	}
	return kept
}

// noted passes err to the watch, which notes errors for want of room, and returns err.
func (a *Agent) noted(err error) error {
	a.room.Note(err)
	return err
}

// recordExit records why this agent cannot start, so that the record of a host whose supervisor starts the agent again
// and again has the cause. The directory of another agent is left alone.
func (a *Agent) recordExit(ctx context.Context, why error) {
	if _, other := errors.AsType[*identity.LockedError](why); other || a.room == nil {
		return
	}
	if a.diag == nil && a.openDiagnostics(ctx) != nil {
		return // the error is in the log only
	}
	code := codeStateFile
	if room.IsFull(why) {
		code = codeDiskFull
	}
	a.record(ctx, code, "the agent cannot start: "+why.Error(), 0)
}

// watchRoom checks the disks until ctx ends, and reports every change: in the host's record, which is told over the
// stream, and as a fact of the host.
func (a *Agent) watchRoom(ctx context.Context) error {
	ticker := time.NewTicker(a.cfg.RoomEvery)
	defer ticker.Stop()
	a.checkRoom(ctx, true)
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
		a.checkRoom(ctx, false)
	}
}

// checkRoom checks once. The first check also ends a diagnostic that an earlier process of the agent recorded.
func (a *Agent) checkRoom(ctx context.Context, first bool) {
	state, changed := a.room.Check()
	a.facts.setRoom(diskOf(state))
	if !state.Full {
		a.warn(ctx, "reserve not filled", a.spare.Refill())
	}
	if !changed && !first {
		return
	}
	if state.Full {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "no room on the disk of the agent's directories",
			slog.String("dir", state.Dir), slog.String("detail", state.Detail))
		a.meters.Retry(codeDiskFull)
		a.record(ctx, codeDiskFull, state.Dir+": "+state.Detail, 0)
		return
	}
	ended, err := a.diag.End(codeDiskFull)
	if err != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", a.noted(err)))
	}
	if ended {
		a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "the disk of the agent's directories has room again",
			slog.String("dir", state.Dir))
	}
}

// withDisk adds the diagnostic of a full disk that is not over, however long ago it was recorded.
func (a *Agent) withDisk(sent []*commonv1.Diagnostic) []*commonv1.Diagnostic {
	last, ok := a.diag.Last(codeDiskFull)
	if !ok || !last.EndedAt.IsZero() ||
		slices.ContainsFunc(sent, func(d *commonv1.Diagnostic) bool { return d.GetCode() == codeDiskFull }) {
		return sent
	}
	if len(sent) == diag.MaxInHello {
		sent = sent[1:]
	}
	return append(sent, last.Proto())
}

// diskOf returns the state of the disks as a fact of the host.
func diskOf(s room.State) *commonv1.StateDisk {
	return &commonv1.StateDisk{
		Full: s.Full, Path: s.Dir, SizeBytes: s.SizeBytes, FreeBytes: s.FreeBytes, Since: timestamppb.New(s.Since),
		Detail: s.Detail,
	}
}

// noRoom returns the error with which tasks that need more disk space are refused; nil if there is room.
func (a *Agent) noRoom() error {
	state := a.room.State()
	if !state.Full {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_NODE_DISK_FULL,
		fmt.Sprintf("the node's state directory has no room: %s: %s", state.Dir, state.Detail))
}
