package rpc

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
)

// guard is the outermost server interceptor: correlation, panics, allow-list, person, log, metrics, sanitising.
type guard struct {
	policies     func(procedure string) (Policy, bool)
	persons      *PersonVerifier
	authenticate Authenticator
	onDenied     func(ctx context.Context, d Denial)
	translate    func(error) error
	logger       *slog.Logger
	metrics      *metrics
}

// WrapUnary implements connect.Interceptor.
func (g *guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		began := time.Now()
		procedure := req.Spec().Procedure
		ctx = g.correlate(ctx, req.Header())
		resp, err := g.unary(ctx, req, next)
		if err != nil {
			wire := g.finish(ctx, procedure, began, err)
			g.metrics.unary(procedure, wire.Code().String(), time.Since(began))
			return nil, wire
		}
		g.metrics.unary(procedure, "ok", time.Since(began))
		g.log(ctx, procedure, began, nil)
		resp.Header().Set(HeaderCorrelationID, obs.From(ctx).CorrelationID)
		return resp, nil
	}
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g *guard) unary(ctx context.Context, req connect.AnyRequest, next connect.UnaryFunc) (resp connect.AnyResponse,
	err error,
) {
	defer func() { recovered(recover(), &err) }()
	asserted, err := g.admit(ctx, req.Spec().Procedure)
	if err != nil {
		g.denied(ctx, req.Spec().Procedure, req.Any(), err)
		return nil, err
	}
	if err := problemOf(req.Any()); err != nil {
		return nil, err
	}
	if asserted != nil {
		if err := g.settle(*asserted, req.Any()); err != nil {
			return nil, err
		}
	}
	return next(ctx, req)
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *guard) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		began := time.Now()
		procedure := conn.Spec().Procedure
		ctx = g.correlate(ctx, conn.RequestHeader())
		open := g.metrics.open.WithLabelValues(procedure)
		open.Inc()
		err := g.stream(ctx, conn, next)
		open.Dec()
		if err == nil {
			g.metrics.streams.WithLabelValues(procedure, "ok").Inc()
			g.log(ctx, procedure, began, nil)
			return nil
		}
		wire := g.finish(ctx, procedure, began, err)
		g.metrics.streams.WithLabelValues(procedure, wire.Code().String()).Inc()
		return wire
	}
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g *guard) stream(ctx context.Context, conn connect.StreamingHandlerConn,
	next connect.StreamingHandlerFunc,
) (err error) {
	defer func() { recovered(recover(), &err) }()
	asserted, err := g.admit(ctx, conn.Spec().Procedure)
	if err != nil {
		g.denied(ctx, conn.Spec().Procedure, nil, err)
		return err
	}
	conn.ResponseHeader().Set(HeaderCorrelationID, obs.From(ctx).CorrelationID)
	return next(context.WithValue(ctx, framesKey{}, g),
		&guardedConn{StreamingHandlerConn: conn, guard: g, asserted: asserted})
}

// WrapStreamingClient implements connect.Interceptor; this one is for servers.
func (g *guard) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// guardedConn refuses messages that could not be decoded, and compares the first one with the assertion before the
// method sees it.
type guardedConn struct {
	connect.StreamingHandlerConn

	guard    *guard
	asserted *assertion // nil: there is none, or it was compared
}

func (c *guardedConn) Receive(message any) error {
	if err := c.StreamingHandlerConn.Receive(message); err != nil {
		return err
	}
	if err := problemOf(message); err != nil {
		return err
	}
	if c.asserted == nil {
		return nil
	}
	asserted := *c.asserted
	c.asserted = nil
	return c.guard.settle(asserted, message)
}

func (g *guard) settle(a assertion, message any) error {
	if err := a.checkDigest(message); err != nil {
		return err
	}
	return g.persons.spend(a)
}

// correlate puts the ids of a request into its context, unless the intake has done so.
func (g *guard) correlate(ctx context.Context, header http.Header) context.Context {
	if obs.From(ctx).CorrelationID != "" {
		return ctx
	}
	peer, ok := PeerFrom(ctx)
	return readCorrelation(ctx, header, ok && peer.ID.Kind == pki.KindService)
}
