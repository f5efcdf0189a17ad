package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/codec"
)

// Finish logs an error with its cause and returns the error that the client may get.
func (g *Guard) Finish(ctx context.Context, procedure string, began time.Time, err error) *connect.Error {
	// A stream that this server ended gets the server's reason, whatever error its method made of the end of its context.
	if cause, ok := fault.As(context.Cause(ctx)); ok && ctx.Err() != nil {
		if _, own := fault.As(err); !own {
			err = cause
		}
	}
	err = codec.ValidationFault(err)
	if _, typed := fault.As(err); !typed && g.Translate != nil {
		err = g.Translate(err)
	}
	g.Metrics.refused(procedure, fault.ReasonOf(err))
	g.log(ctx, procedure, began, err)
	id := obs.From(ctx).CorrelationID
	wire := fault.ToConnect(err, id)
	wire.Meta().Set(rpc.HeaderCorrelationID, id)
	return wire
}

// log logs a call: an internal error at level error with its cause, a refusal below it, an answer for debugging.
func (g *Guard) log(ctx context.Context, procedure string, began time.Time, err error) {
	attrs := []slog.Attr{
		slog.String("procedure", procedure),
		slog.String("caller", rpc.CallerOf(ctx)),
		slog.Duration("took", time.Since(began)),
	}
	if person, ok := rpc.PersonFrom(ctx); ok {
		attrs = append(attrs, slog.String("person", person.Subject))
	}
	if err == nil {
		g.Logger.LogAttrs(ctx, slog.LevelDebug, "request answered", attrs...)
		return
	}
	attrs = append(attrs, obs.Reason(err), obs.Err(err))
	if fault.ReasonOf(err) == commonv1.Reason_REASON_INTERNAL {
		g.Logger.LogAttrs(ctx, slog.LevelError, "request failed", attrs...)
		return
	}
	g.Logger.LogAttrs(ctx, slog.LevelInfo, "request refused", attrs...)
}

// recovered turns a panic of a method into an internal error with its stack. The abort of a handler is net/http's own
// and goes on.
func recovered(what any, err *error) {
	if what == nil {
		return
	}
	if e, ok := what.(error); ok && errors.Is(e, http.ErrAbortHandler) {
		panic(what) //nolint:forbidigo // net/http asks for this panic, and expects it back.
	}
	*err = fmt.Errorf("method panicked: %v\n%s", what, debug.Stack())
}
