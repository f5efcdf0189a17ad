package guard

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
)

// admitted is the result of the intake for a caller.
type admitted struct {
	asserted *assertion.Assertion // to be compared with the request, nil without one
}

type admittedKey struct{}

// WithAdmitted notes in the context of a request that its caller has passed the intake, with the assertion that is yet
// to be compared with the request.
func WithAdmitted(ctx context.Context, asserted *assertion.Assertion) context.Context {
	return context.WithValue(ctx, admittedKey{}, admitted{asserted: asserted})
}

// Authenticator returns the person of a request by credentials that only readmodel can verify: a session cookie or a
// bearer token. Its refusal is a fault.
type Authenticator func(ctx context.Context, procedure string, header http.Header) (rpc.Person, error)

// Identify determines the caller and the person, from the connection and the header alone. It returns an assertion that
// is yet to be compared with the request. Whether the roles of the person allow the method is decided by admit, which
// has the request.
func (g *Guard) Identify(ctx context.Context, policy rpc.Policy, header http.Header) (context.Context,
	*assertion.Assertion, error,
) {
	caller := rpc.CallerOf(ctx)
	switch {
	case caller != rpc.CallerAnonymous && policy.Allows(caller):
		return g.identifyPeer(ctx, policy, header)
	case policy.Allows(rpc.CallerPerson) && g.Authenticate != nil:
		person, err := g.Authenticate(ctx, policy.Procedure, header)
		if err != nil {
			return ctx, nil, err
		}
		return rpc.WithPerson(ctx, person), nil, nil
	case policy.Allows(rpc.CallerAnonymous):
		return ctx, nil, nil
	case caller == rpc.CallerAnonymous:
		return ctx, nil, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
	default:
		return ctx, nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(fmt.Errorf("%s may not call this method", caller)))
	}
}

// admit refuses a caller that did not pass the intake, and a person whose roles do not allow the method.
func (g *Guard) admit(ctx context.Context, procedure string) (*assertion.Assertion, error) {
	policy, ok := g.Policies(procedure)
	if !ok {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(errors.New("the method has no policy")))
	}
	seen, ok := ctx.Value(admittedKey{}).(admitted)
	if !ok {
		return nil, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "",
			fault.Cause(errors.New("the request did not come by the port's intake")))
	}
	person, known := rpc.PersonFrom(ctx)
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
func (g *Guard) denied(ctx context.Context, procedure string, message any, err error) {
	if _, known := rpc.PersonFrom(ctx); known && g.OnDenied != nil &&
		fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		g.OnDenied(ctx, Denial{Procedure: procedure, Message: message, Err: err})
	}
}

// personService is the service that calls on behalf of people alone, also where other services may call on their own
// behalf.
const personService = "readmodel"

func (g *Guard) identifyPeer(ctx context.Context, policy rpc.Policy, header http.Header) (context.Context,
	*assertion.Assertion,
	error,
) {
	signed := header.Values(assertion.Header)
	switch {
	case policy.Person == commonv1.Person_PERSON_NONE:
		return ctx, nil, nil
	case len(signed) == 0 && policy.Person == commonv1.Person_PERSON_OPTIONAL && rpc.CallerOf(ctx) != personService:
		return ctx, nil, nil
	case len(signed) != 1:
		return ctx, nil, assertion.Refuse("none, or more than one, was sent")
	}
	a, err := g.Persons.Verify(signed[0], policy.Procedure)
	if err != nil {
		return ctx, nil, err
	}
	return rpc.WithPerson(ctx, a.Person()), &a, nil
}

func checkRoles(policy rpc.Policy, person rpc.Person) error {
	if len(policy.Roles) > 0 && !person.Has(policy.Roles...) {
		needed := "it needs one of the roles "
		if len(policy.Roles) == 1 {
			needed = "it needs the role "
		}
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow this",
			fault.Unmet(needed+strings.Join(policy.Roles, ", ")+"; you have "+strings.Join(person.Roles, ", ")),
			fault.Cause(fmt.Errorf("needs one of %v, has %v", policy.Roles, person.Roles)))
	}
	if policy.Operators() && person.TenantID != "" {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator",
			fault.Unmet("you are bound to a tenant"))
	}
	return nil
}
