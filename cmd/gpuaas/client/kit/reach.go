package kit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/person"
)

// explainFailure adds to the error of a failed connection which server was addressed and what answers there. It changes
// only the client's own error, not one that a peer returned.
func (s *Session) explainFailure(err error) error {
	e, ok := fault.As(err)
	if !ok || e.Reason != commonv1.Reason_REASON_UNAVAILABLE || e.CorrelationID != "" || errors.Is(err, context.Canceled) {
		return err
	}
	failed, ok := errors.AsType[*connect.Error](e)
	if !ok || connect.IsWireError(failed) {
		return err
	}
	if public, remedy := s.foundElse(err); public != "" {
		found := fault.New(e.Reason, public, fault.Cause(err), fault.Remedy(remedy),
			fault.WithAction(commonv1.Action_ACTION_STOP))
		found.RetryAfter = 0 // a retry would have the same result
		return found
	}
	return fault.New(e.Reason, fmt.Sprintf("%s cannot be reached: %s", s.server, failed.Message()), fault.Cause(err),
		fault.Remedy("start the mesh (`gpuaas dev`), or name another server with --server or --context"))
}

// foundElse returns what answers at the server's address instead of the API, and what to do. It returns empty texts if
// that is not known.
func (s *Session) foundElse(err error) (string, string) {
	const api = "name the address of the API with --server (`gpuaas dev` prints it), or choose a context with --context"
	if other, ok := errors.AsType[*pki.WrongServerError](err); ok {
		public := fmt.Sprintf("%s was reached, but another service of the mesh listens there: %s", s.server, other.Got.Name)
		return public, api
	}
	if domain, ok := errors.AsType[*pki.TrustDomainError](err); ok {
		public := fmt.Sprintf("%s was reached, but it belongs to the trust domain %q, and %q was expected", s.server,
			domain.Got, domain.Want)
		return public, "correct --trust-domain or the context, if this is the mesh that you mean; else name another server"
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		public := s.server + " was reached, but its certificate is not from the authority that is trusted here: it " +
			"belongs to another mesh, or is no mesh"
		return public, "if the mesh was made anew, start it again or write its context anew; else correct --server, " +
			"--context or --ca-file"
	}
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		return fmt.Sprintf("%s was reached, but its certificate is not valid: %v", s.server, invalid),
			"compare the clocks of both machines; then look at the log of the server"
	}
	if record, ok := errors.AsType[tls.RecordHeaderError](err); ok || errors.Is(err, http.ErrSchemeMismatch) {
		what := "it does not speak TLS"
		if errors.Is(err, http.ErrSchemeMismatch) || string(record.RecordHeader[:]) == "HTTP/" {
			what = "it speaks plain HTTP, without TLS"
		}
		return fmt.Sprintf("%s was reached, but %s: it is not the API of a mesh", s.server, what), api
	}
	if errors.Is(err, pki.ErrIdentity) {
		return fmt.Sprintf("%s was reached, but its certificate is not that of the service %s", s.server, person.Service), api
	}
	return "", ""
}

// misdirected reports whether a connection failed because another program listens at the address, so that a retry would
// have the same result.
func misdirected(err error) bool {
	public, _ := (&Session{}).foundElse(err)
	return public != ""
}

// tooLate is an interceptor that adds to the error of a timeout, if the request only reads, that the request changed
// nothing.
func tooLate(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		e, ok := fault.As(err)
		if ok && e.Reason == commonv1.Reason_REASON_DEADLINE_EXCEEDED && onlyReads(req.Spec().Procedure) {
			e.Public = "no answer came in time; the request only reads: nothing was changed"
			e.Remedy = "ask again, with a longer --request-timeout if it stays"
		}
		return resp, err
	}
}

// onlyReads reports whether a method of the people's API changes nothing.
func onlyReads(procedure string) bool {
	method := procedure[strings.LastIndexByte(procedure, '/')+1:]
	return slices.ContainsFunc([]string{"Explain", "Get", "List", "Read", "Resolve", "Verify", "Watch", "WhoAmI"},
		func(verb string) bool { return strings.HasPrefix(method, verb) })
}
