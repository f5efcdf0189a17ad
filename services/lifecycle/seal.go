package lifecycle

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// sealRetry is how long sealStored waits after a failure, and sealAgain after it has sealed all there was.
const (
	sealRetry = 10 * time.Second
	sealAgain = time.Hour
)

// checkKeys returns an error if the key file lacks a key which rows need. It logs every other error of the check and
// returns false: the caller repeats the check.
func checkKeys(ctx context.Context, logger *slog.Logger, sealer *spec.Sealer, lost []string) (bool, error) {
	err := sealer.Check(ctx, lost)
	if fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		return false, err
	}
	if err != nil && ctx.Err() == nil {
		logger.WarnContext(ctx, "keys of workload secrets not checked yet", obs.Err(err))
	}
	return err == nil, nil
}

// sealStored seals stored environment values with the first key: those sealed with a former first key, and those that a
// build before sealed values has stored. It repeats this every sealAgain: a replica of that build, or one with the
// former first key, may end later than this one starts.
func (s *Service) sealStored(ctx context.Context, sealer *spec.Sealer, tasks *dispatch.Server) error {
	checked := false
	for first := true; ; first = false {
		if !checked { // at the start the database may have been away or slow
			var err error
			if checked, err = checkKeys(ctx, s.base.Logger, sealer, s.cfg.WorkloadSecretsLostKeys); err != nil {
				return err
			}
		}
		rows, err := sealer.Seal(ctx)
		queued, taskErr := tasks.SealStored(ctx)
		if rows+queued > 0 {
			s.base.Logger.InfoContext(ctx, "stored environment values sealed", slog.Int("rows", rows), slog.Int("tasks", queued))
		}
		if first || rows+queued > 0 {
			s.reportKeys(ctx, sealer)
		}
		wait := sealRetry
		switch err = errors.Join(err, taskErr); {
		case err == nil && checked:
			wait = sealAgain
		case err == nil: // checkKeys has logged its error
		case ctx.Err() == nil:
			s.base.Logger.WarnContext(ctx, "stored environment values not sealed yet", obs.Err(err))
		}
		if !app.Sleep(ctx, wait) {
			return nil
		}
	}
}

// reportKeys logs which of the keys behind the first one rows still need, and which may leave the file.
func (s *Service) reportKeys(ctx context.Context, sealer *spec.Sealer) {
	former := sealer.Secrets.IDs()[1:]
	if len(former) == 0 {
		return
	}
	need, err := sealer.Need(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.base.Logger.WarnContext(ctx, "keys of workload secrets not looked for", obs.Err(err))
		}
		return
	}
	kept := slices.DeleteFunc(slices.Clone(former), func(id string) bool { return !slices.Contains(need, id) })
	counts, err := sealer.Count(ctx, kept)
	if err != nil && ctx.Err() == nil {
		s.base.Logger.WarnContext(ctx, "rows by key of workload secrets not counted", obs.Err(err))
	}
	for _, id := range former {
		about := []any{slog.String("key", id)}
		if !slices.Contains(kept, id) {
			s.base.Logger.InfoContext(ctx, "no row needs this key of workload secrets: it may leave the file", about...)
			continue
		}
		if err == nil {
			about = append(about, slog.Int64("rows", counts[id]))
		}
		s.base.Logger.InfoContext(ctx, "rows need this key of workload secrets: it must stay in the file", about...)
	}
}
