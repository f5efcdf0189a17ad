package port

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"connectrpc.com/validate"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/codec"
)

// HandlerOptions returns the options of every generated handler of this server: limits, the guard, validation.
func (s *Server) HandlerOptions() []connect.HandlerOption {
	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(s.cfg.MaxReadBytes),
		// A small message costs more to compress than to send.
		connect.WithCompressMinBytes(16 << 10),
		connect.WithInterceptors(
			s.guard,
			validate.NewInterceptor(),
		),
	}
	// On a port for people, other people read the names that they give.
	return append(options, codec.Options(codec.TextRules{Names: s.deps.Authenticate != nil})...)
}

// Mount adds a service by the path and handler that its generated constructor returned. A service with a method that
// has no policy, or a policy that this server could admit no caller by, is an error.
func (s *Server) Mount(path string, handler http.Handler) error {
	name, ok := serviceOfPath(path)
	if !ok {
		return fmt.Errorf("mount %q: not the path of a service", path)
	}
	descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return fmt.Errorf("mount %q: %w", path, err)
	}
	service, ok := descriptor.(protoreflect.ServiceDescriptor)
	if !ok {
		return fmt.Errorf("mount %q: not a service", path)
	}
	set, err := rpc.ServicePolicies(service)
	if err != nil {
		return fmt.Errorf("mount %q: %w", path, err)
	}
	for procedure, policy := range set {
		if err := s.servable(policy); err != nil {
			return fmt.Errorf("mount %s: %w", procedure, err)
		}
		s.policies[procedure] = policy
	}
	s.services[name] = handler
	return nil
}

// servable returns an error if the port lacks something that a method's policy needs.
func (s *Server) servable(policy rpc.Policy) error {
	if policy.Allows(rpc.CallerPerson) && s.deps.Authenticate == nil {
		return errors.New("persons may call it, and this port cannot authenticate them")
	}
	person := policy.Person == commonv1.Person_PERSON_REQUIRED && !policy.Allows(rpc.CallerPerson)
	if person && s.deps.Persons == nil {
		return errors.New("it needs a person, and this port has no keys to verify one")
	}
	return nil
}

// MountUnchecked adds a handler for one service's path without policies: health and reflection, which are no services
// of ours. A service of gpuaas is refused.
func (s *Server) MountUnchecked(path string, handler http.Handler) error {
	name, ok := serviceOfPath(path)
	if !ok || isOurs(name) {
		return fmt.Errorf("mount %q without a policy: refused", path)
	}
	s.services[name], s.unchecked[name] = handler, true
	return nil
}

// Services returns the names of the services that are mounted with policies.
func (s *Server) Services() []string {
	seen := map[string]bool{}
	var out []string
	for procedure := range s.policies {
		name, _ := serviceOfPath(procedure)
		if !seen[name] {
			seen[name] = true
			out = append(out, name)
		}
	}
	return out
}

func (s *Server) policy(procedure string) (rpc.Policy, bool) {
	policy, ok := s.policies[procedure]
	return policy, ok
}

func isOurs(service string) bool { return len(service) > 7 && service[:7] == "gpuaas." }

// serviceOfPath returns the service of a procedure or of the path that a generated handler is mounted on.
func serviceOfPath(path string) (string, bool) {
	rest, ok := strings.CutPrefix(path, "/")
	if !ok {
		return "", false
	}
	service, _, ok := strings.Cut(rest, "/")
	return service, ok && service != ""
}
