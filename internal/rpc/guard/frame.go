package guard

import (
	"context"
	"errors"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/codec"
)

// framesKey is the context key of the guard of the stream that a frame came by.
type framesKey struct{}

// Frame handles a message that came as one of many over a stream as a unary method would: ctx is that of the stream's
// handler, and procedure the method whose place the frame takes. It checks the message against the policy of the method
// and against its rules, turns a panic into an error, and counts and logs the result as that of a call. A refusal is
// returned in the form that goes over the wire.
//
// It is for methods that need no person: a stream has at most one.
func Frame(ctx context.Context, procedure string, message proto.Message,
	handle func(context.Context) error,
) *commonv1.Denial {
	g, ok := ctx.Value(framesKey{}).(*Guard)
	if !ok {
		return fault.ToDenial(errors.New("a frame came by no stream of a server"), "")
	}
	began := time.Now()
	err := g.frame(ctx, procedure, message, handle)
	if err == nil {
		g.Metrics.Unary(procedure, "ok", time.Since(began))
		g.log(ctx, procedure, began, nil)
		return nil
	}
	wire := g.Finish(ctx, procedure, began, err)
	g.Metrics.Unary(procedure, wire.Code().String(), time.Since(began))
	return fault.ToDenial(fault.FromConnect(wire), obs.From(ctx).CorrelationID)
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g *Guard) frame(ctx context.Context, procedure string, message proto.Message,
	handle func(context.Context) error,
) (err error) {
	defer func() { recovered(recover(), &err) }()
	policy, ok := g.Policies(procedure)
	if !ok || policy.Person != commonv1.Person_PERSON_NONE || !policy.Allows(rpc.CallerOf(ctx)) {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(errors.New("the method is not for frames of this peer")))
	}
	if err := codec.Problem(message); err != nil {
		return err
	}
	if err := protovalidate.Validate(message); err != nil {
		return err
	}
	return handle(ctx)
}
