package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"buf.build/go/protovalidate"
	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
)

// Authenticator returns the person of a request by credentials that only readmodel can verify: a session cookie or a
// bearer token. Its refusal is a fault.
type Authenticator func(ctx context.Context, procedure string, header http.Header) (Person, error)

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

// identify determines the caller and the person, from the connection and the header alone. It returns an assertion that
// is yet to be compared with the request. Whether the roles of the person allow the method is decided by admit, which
// has the request.
func (g *guard) identify(ctx context.Context, policy Policy, header http.Header) (context.Context, *assertion, error) {
	caller := callerOf(ctx)
	switch {
	case caller != CallerAnonymous && policy.Allows(caller):
		return g.identifyPeer(ctx, policy, header)
	case policy.Allows(CallerPerson) && g.authenticate != nil:
		person, err := g.authenticate(ctx, policy.Procedure, header)
		if err != nil {
			return ctx, nil, err
		}
		return WithPerson(ctx, person), nil, nil
	case policy.Allows(CallerAnonymous):
		return ctx, nil, nil
	case caller == CallerAnonymous:
		return ctx, nil, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
	default:
		return ctx, nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(fmt.Errorf("%s may not call this method", caller)))
	}
}

// admit refuses a caller that did not pass the intake, and a person whose roles do not allow the method.
func (g *guard) admit(ctx context.Context, procedure string) (*assertion, error) {
	policy, ok := g.policies(procedure)
	if !ok {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(errors.New("the method has no policy")))
	}
	seen, ok := ctx.Value(admittedKey{}).(admitted)
	if !ok {
		return nil, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "",
			fault.Cause(errors.New("the request did not come by the port's intake")))
	}
	person, known := PersonFrom(ctx)
	if !known {
		return seen.asserted, nil
	}
	return seen.asserted, checkRoles(policy, person)
}

// Denial is a request of a known person that the person's roles do not allow. No method has seen it, and it was not
// validated.
type Denial struct {
	Procedure string
	Message   any // nil for a stream: its first message was not read
	Err       error
}

// denied reports a refusal by role to OnDenied.
func (g *guard) denied(ctx context.Context, procedure string, message any, err error) {
	if _, known := PersonFrom(ctx); known && g.onDenied != nil &&
		fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		g.onDenied(ctx, Denial{Procedure: procedure, Message: message, Err: err})
	}
}

// personService is the service that calls on behalf of people alone, also where other services may call on their own
// behalf.
const personService = "readmodel"

func (g *guard) identifyPeer(ctx context.Context, policy Policy, header http.Header) (context.Context, *assertion,
	error,
) {
	signed := header.Values(HeaderPerson)
	switch {
	case policy.Person == commonv1.Person_PERSON_NONE:
		return ctx, nil, nil
	case len(signed) == 0 && policy.Person == commonv1.Person_PERSON_OPTIONAL && callerOf(ctx) != personService:
		return ctx, nil, nil
	case len(signed) != 1:
		return ctx, nil, refuseAssertion("none, or more than one, was sent")
	}
	a, err := g.persons.verify(signed[0], policy.Procedure)
	if err != nil {
		return ctx, nil, err
	}
	return WithPerson(ctx, a.person()), &a, nil
}

func checkRoles(policy Policy, person Person) error {
	if len(policy.Roles) > 0 && !person.Has(policy.Roles...) {
		needed := "it needs one of the roles "
		if len(policy.Roles) == 1 {
			needed = "it needs the role "
		}
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow this",
			fault.Unmet(needed+strings.Join(policy.Roles, ", ")+"; you have "+strings.Join(person.Roles, ", ")),
			fault.Cause(fmt.Errorf("needs one of %v, has %v", policy.Roles, person.Roles)))
	}
	if policy.operators() && person.TenantID != "" {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator",
			fault.Unmet("you are bound to a tenant"))
	}
	return nil
}

// finish logs an error with its cause and returns the error that the client may get.
func (g *guard) finish(ctx context.Context, procedure string, began time.Time, err error) *connect.Error {
	// A stream that this server ended gets the server's reason, whatever error its method made of the end of its context.
	if cause, ok := fault.As(context.Cause(ctx)); ok && ctx.Err() != nil {
		if _, own := fault.As(err); !own {
			err = cause
		}
	}
	err = validationFault(err)
	if _, typed := fault.As(err); !typed && g.translate != nil {
		err = g.translate(err)
	}
	g.metrics.refused(procedure, fault.ReasonOf(err))
	g.log(ctx, procedure, began, err)
	id := obs.From(ctx).CorrelationID
	wire := fault.ToConnect(err, id)
	wire.Meta().Set(HeaderCorrelationID, id)
	return wire
}

func (g *guard) log(ctx context.Context, procedure string, began time.Time, err error) {
	attrs := []slog.Attr{
		slog.String("procedure", procedure),
		slog.String("caller", callerOf(ctx)),
		slog.Duration("took", time.Since(began)),
	}
	if person, ok := PersonFrom(ctx); ok {
		attrs = append(attrs, slog.String("person", person.Subject))
	}
	if err != nil {
		logRefusal(ctx, g.logger, err, attrs...)
		return
	}
	g.logger.LogAttrs(ctx, slog.LevelDebug, "request answered", attrs...)
}

// logRefusal logs an error with its cause: an internal error at level error, a refusal below it.
func logRefusal(ctx context.Context, logger *slog.Logger, err error, attrs ...slog.Attr) {
	attrs = append(attrs, obs.Reason(err), obs.Err(err))
	if fault.ReasonOf(err) == commonv1.Reason_REASON_INTERNAL {
		logger.LogAttrs(ctx, slog.LevelError, "request failed", attrs...)
		return
	}
	logger.LogAttrs(ctx, slog.LevelInfo, "request refused", attrs...)
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

// validationFault turns the violations that protovalidate found into the fault of a bad request.
func validationFault(err error) error {
	if _, ok := fault.As(err); ok {
		return err
	}
	var violations *protovalidate.ValidationError
	if !errors.As(err, &violations) {
		return err
	}
	unmet := make([]string, 0, len(violations.Violations))
	for _, v := range violations.Violations {
		unmet = append(unmet, protovalidate.FieldPathString(v.Proto.GetField())+": "+plainly(v))
	}
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet(unmet...), fault.Cause(err))
}

// endOfStream reports whether an error of a stream is its ordinary end.
func endOfStream(err error) bool { return errors.Is(err, io.EOF) }
