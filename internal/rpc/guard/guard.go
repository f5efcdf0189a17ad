package guard

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/codec"
)

// Guard is the outermost server interceptor: correlation, panics, allow-list, person, log, metrics, sanitising.
type Guard struct {
	Policies     func(procedure string) (rpc.Policy, bool)
	Persons      *assertion.Verifier
	Authenticate Authenticator
	OnDenied     func(ctx context.Context, d Denial)
	Translate    func(error) error
	Logger       *slog.Logger
	Metrics      *Metrics
}

// WrapUnary implements connect.Interceptor.
func (g *Guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		began := time.Now()
		procedure := req.Spec().Procedure
		ctx = g.Correlate(ctx, req.Header())
		resp, err := g.unary(ctx, req, next)
		if err != nil {
			wire := g.Finish(ctx, procedure, began, err)
			g.Metrics.Unary(procedure, wire.Code().String(), time.Since(began))
			return nil, wire
		}
		g.Metrics.Unary(procedure, "ok", time.Since(began))
		g.log(ctx, procedure, began, nil)
		resp.Header().Set(rpc.HeaderCorrelationID, obs.From(ctx).CorrelationID)
		return resp, nil
	}
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g *Guard) unary(ctx context.Context, req connect.AnyRequest, next connect.UnaryFunc) (resp connect.AnyResponse,
	err error,
) {
	defer func() { recovered(recover(), &err) }()
	asserted, err := g.admit(ctx, req.Spec().Procedure)
	if err != nil {
		g.denied(ctx, req.Spec().Procedure, req.Any(), err)
		return nil, err
	}
	if err := codec.Problem(req.Any()); err != nil {
		return nil, err
	}
	if asserted != nil {
		if err := g.spend(*asserted, req.Any()); err != nil {
			return nil, err
		}
	}
	return next(ctx, req)
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *Guard) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		began := time.Now()
		procedure := conn.Spec().Procedure
		ctx = g.Correlate(ctx, conn.RequestHeader())
		open := g.Metrics.open.WithLabelValues(procedure)
		open.Inc()
		err := g.stream(ctx, conn, next)
		open.Dec()
		if err == nil {
			g.Metrics.streams.WithLabelValues(procedure, "ok").Inc()
			g.log(ctx, procedure, began, nil)
			return nil
		}
		wire := g.Finish(ctx, procedure, began, err)
		g.Metrics.streams.WithLabelValues(procedure, wire.Code().String()).Inc()
		return wire
	}
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g *Guard) stream(ctx context.Context, conn connect.StreamingHandlerConn,
	next connect.StreamingHandlerFunc,
) (err error) {
	defer func() { recovered(recover(), &err) }()
	asserted, err := g.admit(ctx, conn.Spec().Procedure)
	if err != nil {
		g.denied(ctx, conn.Spec().Procedure, nil, err)
		return err
	}
	conn.ResponseHeader().Set(rpc.HeaderCorrelationID, obs.From(ctx).CorrelationID)
	return next(context.WithValue(ctx, framesKey{}, g),
		&guardedConn{StreamingHandlerConn: conn, guard: g, asserted: asserted})
}

// WrapStreamingClient implements connect.Interceptor; this one is for servers.
func (g *Guard) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// guardedConn refuses messages that could not be decoded, and compares the first one with the assertion before the
// method sees it.
type guardedConn struct {
	connect.StreamingHandlerConn

	guard    *Guard
	asserted *assertion.Assertion // nil: there is none, or it was compared
}

func (c *guardedConn) Receive(message any) error {
	if err := c.StreamingHandlerConn.Receive(message); err != nil {
		return err
	}
	if err := codec.Problem(message); err != nil {
		return err
	}
	if c.asserted == nil {
		return nil
	}
	asserted := *c.asserted
	c.asserted = nil
	return c.guard.spend(asserted, message)
}

func (g *Guard) spend(a assertion.Assertion, message any) error {
	if err := a.CheckDigest(message); err != nil {
		return err
	}
	return g.Persons.Spend(a)
}

// Correlate puts the ids of a request into its context, unless the intake has done so.
func (g *Guard) Correlate(ctx context.Context, header http.Header) context.Context {
	if obs.From(ctx).CorrelationID != "" {
		return ctx
	}
	peer, ok := rpc.PeerFrom(ctx)
	return rpc.ReadCorrelation(ctx, header, ok && peer.ID.Kind == pki.KindService)
}
