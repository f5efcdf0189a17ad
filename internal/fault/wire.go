package fault

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// ToConnect returns err as it may leave a Connect server: the fault's code and sentence with its Denial as a detail. An
// error that is not a fault leaves as "internal error". nil stays nil.
func ToConnect(err error, correlationID string) *connect.Error {
	if err == nil {
		return nil
	}
	e := From(err)
	out := connect.NewError(RowOf(e.Reason).Code, errors.New(e.Public))
	if detail, derr := connect.NewErrorDetail(ToDenial(e, correlationID)); derr == nil {
		out.AddDetail(detail)
	}
	return out
}

// FromConnect returns the error of a Connect call as a fault of ours: made from the Denial that the peer sent, or from
// the code alone if there is no Denial. In the second case the sender may be a proxy and not a peer of ours, and the
// action is wait. The wire error stays as the cause, for logs. nil stays nil.
func FromConnect(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := As(err); ok {
		return err
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return fromTransport(err)
	}
	for _, detail := range ce.Details() {
		value, derr := detail.Value()
		if derr != nil {
			continue
		}
		if denial, ok := value.(*commonv1.Denial); ok {
			return fromDenial(denial, err)
		}
	}
	return fromCode(codes.Code(ce.Code()), err)
}

// ToGRPC returns err as it may leave a grpc-go server, like ToConnect. nil stays nil.
func ToGRPC(err error, correlationID string) error {
	if err == nil {
		return nil
	}
	e := From(err)
	st := status.New(codes.Code(RowOf(e.Reason).Code), e.Public)
	if with, derr := st.WithDetails(ToDenial(e, correlationID)); derr == nil {
		st = with
	}
	return st.Err()
}

// FromGRPC is FromConnect for the errors of a grpc-go client.
func FromGRPC(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := As(err); ok {
		return err
	}
	st, ok := status.FromError(err)
	if !ok {
		return fromTransport(err)
	}
	for _, detail := range st.Details() {
		if denial, ok := detail.(*commonv1.Denial); ok {
			return fromDenial(denial, err)
		}
	}
	return fromCode(st.Code(), err)
}

// fromTransport returns the fault of an error that carries no code: a dial that failed, a context that ended.
func fromTransport(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "", Cause(err))
	}
	return New(commonv1.Reason_REASON_UNAVAILABLE, "", Cause(err), WithAction(commonv1.Action_ACTION_WAIT))
}

// fromCode returns the fault of a refusal without a Denial: no service of ours sends one, so the sender knows nothing
// of our identities, and a node must do no more than wait because of it.
func fromCode(code codes.Code, err error) error {
	reason := commonv1.Reason_REASON_INTERNAL
	switch code { // every other code is an internal error of the peer
	case codes.Unavailable, codes.Canceled, codes.Aborted, codes.Unauthenticated, codes.PermissionDenied:
		reason = commonv1.Reason_REASON_UNAVAILABLE
	case codes.DeadlineExceeded:
		reason = commonv1.Reason_REASON_DEADLINE_EXCEEDED
	case codes.ResourceExhausted:
		reason = commonv1.Reason_REASON_RATE_LIMITED
	case codes.Unimplemented:
		reason = commonv1.Reason_REASON_UNIMPLEMENTED
	}
	return New(reason, "", Cause(err), WithAction(commonv1.Action_ACTION_WAIT))
}

// fromLocalConnect recognises errors that connect itself or an interceptor in this process made (validation, a message
// over the limit). An error that came over the network is not one of them: it would pass a peer's text off as ours.
func fromLocalConnect(err error) (*Error, bool) {
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok || connect.IsWireError(ce) {
		return nil, false
	}
	switch ce.Code() { // the rest is internal
	case connect.CodeInvalidArgument:
		return New(commonv1.Reason_REASON_INVALID_ARGUMENT, clean(ce.Message()), Cause(err)), true
	case connect.CodeResourceExhausted:
		return New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", Cause(err)), true
	case connect.CodeUnimplemented:
		return New(commonv1.Reason_REASON_UNIMPLEMENTED, "", Cause(err)), true
	case connect.CodeUnauthenticated:
		return New(commonv1.Reason_REASON_UNAUTHENTICATED, "", Cause(err)), true
	case connect.CodePermissionDenied:
		return New(commonv1.Reason_REASON_PERMISSION_DENIED, "", Cause(err)), true
	case connect.CodeUnavailable, connect.CodeCanceled:
		return New(commonv1.Reason_REASON_UNAVAILABLE, "", Cause(err)), true
	case connect.CodeDeadlineExceeded:
		return New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "", Cause(err)), true
	default:
		return nil, false
	}
}
