package kit

import (
	"context"
	"fmt"
	"strconv"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// onlyText is an interceptor that refuses a request with a value that is no text, and names the field. The encoder's
// own error is an internal one, which says that the mesh failed and that the request may be sent again.
type onlyText struct{}

// WrapUnary checks the request of a call.
func (onlyText) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := checkText(req.Any()); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient checks what is sent on a stream.
func (onlyText) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return textStream{next(ctx, spec)}
	}
}

// WrapStreamingHandler returns next: a client handles no streams.
func (onlyText) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type textStream struct{ connect.StreamingClientConn }

// Send refuses a message with a value that is no text.
func (s textStream) Send(message any) error {
	if err := checkText(message); err != nil {
		return err
	}
	return s.StreamingClientConn.Send(message)
}

// checkText returns a refusal of a message with a value that is no text, else nil.
func checkText(message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return nil
	}
	if wrong := notText("", m.ProtoReflect()); len(wrong) > 0 {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "a value is not UTF-8 text", fault.Unmet(wrong...))
	}
	return nil
}

// notText returns a text for each field of a message, with its path, that is not valid UTF-8.
func notText(path string, m protoreflect.Message) []string {
	var wrong []string
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		at := path + string(field.Name())
		switch {
		case field.IsMap():
			value.Map().Range(func(key protoreflect.MapKey, v protoreflect.Value) bool {
				wrong = append(wrong, valueNotText(at, key.Value())...)
				wrong = append(wrong, valueNotText(at, v)...)
				return true
			})
		case field.IsList():
			for i := range value.List().Len() {
				wrong = append(wrong, valueNotText(fmt.Sprintf("%s[%d]", at, i), value.List().Get(i))...)
			}
		default:
			wrong = append(wrong, valueNotText(at, value)...)
		}
		return true
	})
	return wrong
}

func valueNotText(at string, value protoreflect.Value) []string {
	switch v := value.Interface().(type) {
	case protoreflect.Message:
		return notText(at+".", v)
	case string:
		if !utf8.ValidString(v) {
			return []string{at + ": " + strconv.Quote(v) + " is not UTF-8"}
		}
	}
	return nil
}
