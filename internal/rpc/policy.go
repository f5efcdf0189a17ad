package rpc

import (
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Callers that are not names of services.
const (
	CallerNode      = "node"
	CallerPerson    = "person"
	CallerAnonymous = "anonymous"
)

// Callers returns all callers that a policy may name.
func Callers() []string {
	return []string{"nodeapi", "lifecycle", "recovery", "readmodel", CallerNode, CallerPerson, CallerAnonymous}
}

// Roles returns all roles that a policy may name.
func Roles() []string { return []string{"operator", "security", "tenant", "viewer"} }

// Policy lists the callers of one method, as its proto defines them.
type Policy struct {
	Procedure string // /package.Service/Method
	Callers   []string
	Person    commonv1.Person
	Roles     []string
	method    protoreflect.MethodDescriptor
}

// Allows reports whether a caller (a service's name, node, person or anonymous) is in the list.
func (p Policy) Allows(caller string) bool { return slices.Contains(p.Callers, caller) }

// Operators reports whether the method is for people of the operator alone: it has roles, and none that people of a
// tenant have by themselves. Such a method concerns the fleet, so no role admits a person who is bound to a tenant.
func (p Policy) Operators() bool {
	return len(p.Roles) > 0 && !slices.Contains(p.Roles, "tenant") && !slices.Contains(p.Roles, "viewer")
}

// StreamsRequests reports whether the requests are a stream.
func (p Policy) StreamsRequests() bool { return p.method.IsStreamingClient() }

// StreamsAnswers reports whether the responses are a stream.
func (p Policy) StreamsAnswers() bool { return p.method.IsStreamingServer() }

// Method returns the method's descriptor.
func (p Policy) Method() protoreflect.MethodDescriptor { return p.method }

// PolicySet holds the policies of a server, by procedure. It does not change once it is made.
type PolicySet map[string]Policy

// Policies reads the policies of all methods of files. A method without a complete policy is an error that names it,
// and all of them are named at once.
func Policies(files ...protoreflect.FileDescriptor) (PolicySet, error) {
	var services []protoreflect.ServiceDescriptor
	for _, file := range files {
		for i := range file.Services().Len() {
			services = append(services, file.Services().Get(i))
		}
	}
	return ServicePolicies(services...)
}

// ServicePolicies reads the policies of single services; see Policies.
func ServicePolicies(services ...protoreflect.ServiceDescriptor) (PolicySet, error) {
	set := PolicySet{}
	var problems []error
	for _, service := range services {
		for i := range service.Methods().Len() {
			policy, err := methodPolicy(service.Methods().Get(i))
			if err != nil {
				problems = append(problems, err)
				continue
			}
			set[policy.Procedure] = policy
		}
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return set, nil
}

func methodPolicy(method protoreflect.MethodDescriptor) (Policy, error) {
	procedure := "/" + string(method.Parent().FullName()) + "/" + string(method.Name())
	refuse := func(format string, args ...any) (Policy, error) {
		return Policy{}, fmt.Errorf("policy of %s: %s", procedure, fmt.Sprintf(format, args...))
	}
	options, ok := method.Options().(*descriptorpb.MethodOptions)
	if !ok || !proto.HasExtension(options, commonv1.E_Policy) {
		return refuse("missing")
	}
	declared, ok := proto.GetExtension(options, commonv1.E_Policy).(*commonv1.MethodPolicy)
	if !ok || declared == nil {
		return refuse("missing")
	}
	policy := Policy{
		Procedure: procedure, Callers: declared.GetCallers(), Person: declared.GetPerson(), Roles: declared.GetRoles(),
		method: method,
	}
	if len(policy.Callers) == 0 {
		return refuse("no caller")
	}
	for _, caller := range policy.Callers {
		if !slices.Contains(Callers(), caller) {
			return refuse("unknown caller %q", caller)
		}
	}
	for _, role := range policy.Roles {
		if !slices.Contains(Roles(), role) {
			return refuse("unknown role %q", role)
		}
	}
	switch policy.Person {
	case commonv1.Person_PERSON_NONE:
		if len(policy.Roles) > 0 {
			return refuse("roles without a person")
		}
		if policy.Allows(CallerPerson) {
			return refuse("a person calls, but there is none")
		}
	case commonv1.Person_PERSON_OPTIONAL, commonv1.Person_PERSON_REQUIRED:
	default:
		return refuse("does not say whether there is a person")
	}
	return policy, nil
}
