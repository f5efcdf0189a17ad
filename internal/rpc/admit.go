package rpc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// admitted is the result of the intake for a caller.
type admitted struct {
	asserted *assertion // to be compared with the request, nil without one
}

type admittedKey struct{}

// withAdmitted notes in the context of a request that its caller has passed the intake, with the assertion that is yet
// to be compared with the request.
func withAdmitted(ctx context.Context, asserted *assertion) context.Context {
	return context.WithValue(ctx, admittedKey{}, admitted{asserted: asserted})
}

// Authenticator returns the person of a request by credentials that only readmodel can verify: a session cookie or a
// bearer token. Its refusal is a fault.
type Authenticator func(ctx context.Context, procedure string, header http.Header) (Person, error)

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
