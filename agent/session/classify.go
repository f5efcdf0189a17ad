package session

import (
	"context"
	"errors"
	"strings"

	"github.com/gpuaas/mesh/agent/diag/cause"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

var (
	errOpenTimeout = cause.New(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT, "no admission in time")
	errStreamEnded = errors.New("the stream ended")
	errSilent      = errors.New("nothing came from the control plane for too long")
	errNoIdentity  = cause.New(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED, "no certificate is held")
	errProtocol    = errors.New("the control plane broke the protocol")
	errDrained     = errors.New("replaced")
	errGoodbye     = errors.New("the agent ends")
)

// is reports whether an error of type E is in the tree of err.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// codeOf returns the diagnostic code of an error.
func (c *Client) codeOf(err error) commonv1.DiagnosticCode {
	clock := cause.Clock{Wall: c.deps.Clock.Wall()}
	if server, ok := c.deps.Clock.Server(); ok {
		clock.Server = server
	}
	return cause.Of(err, cause.Session, clock)
}

// detailOf returns one line for the record: reason and text of a refusal, else the error. Errors of this package have
// no secrets in them.
func detailOf(err error) string {
	if errors.Is(err, context.Canceled) {
		return "canceled"
	}
	text := err.Error()
	if f, ok := fault.As(err); ok {
		text = names.Of(f.Reason) + ": " + f.Public
		if below := errors.Unwrap(f); below != nil {
			text += ": " + below.Error()
		}
	}
	const most = 512
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}
