package process

import (
	"fmt"
	"regexp"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/workrules"
)

const (
	maxNameLength = 63
	defaultPath   = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

func validName(s string) bool {
	if s == "" || len(s) > maxNameLength || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' })
}

// validWorkspace reports whether s is an id: 36 hexadecimal digits and dashes, so that it is always a single element of
// a path.
func validWorkspace(s string) bool {
	return len(s) == 36 && !strings.ContainsFunc(s,
		func(c rune) bool { return (c < 'a' || c > 'f') && (c < '0' || c > '9') && c != '-' })
}

func invalid(format string, args ...any) error {
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, fmt.Sprintf(format, args...))
}

func validate(req Request) error {
	w := req.Deploy.GetWorkload()
	switch {
	case !validWorkspace(req.WorkspaceID):
		return invalid("the workspace's id is malformed")
	case !validName(w.GetName()):
		return invalid("the workload's name must be of a-z, 0-9 and -, at most %d characters", maxNameLength)
	case len(w.GetCommand()) == 0 && w.GetImage() != "":
		return fault.New(commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			"this node runs workloads as processes: container runtimes are not available on it, so an image cannot be run",
			fault.Remedy("give a command, or place the workspace on nodes with a container runtime"))
	case len(w.GetSealedEnv())+len(req.Deploy.GetSealedSecretEnv()) > 0:
		// The replica that signed the task could not open the sealed values. Without its variables the workload would be
		// another one.
		return invalid("the workload's environment values are sealed, and an agent cannot open them: lifecycle runs in " +
			"two versions")
	}
	for _, p := range workrules.Check(w) {
		// In specs from before requests with these names were refused, the platform's values override the tenant's.
		if p.Kind != workrules.Reserved {
			return invalid("the workload's %s", p)
		}
	}
	if len(w.GetEnv())+len(req.Deploy.GetSecretEnv()) > workrules.MaxVariables {
		return invalid("the workload has too many variables")
	}
	for k, v := range req.Deploy.GetSecretEnv() {
		if p, bad := workrules.CheckVariable(k, v); bad {
			return invalid("the workload's secret %s", p)
		}
	}
	seen := map[string]bool{}
	for _, p := range w.GetPorts() {
		if p.GetPort() < 0 || p.GetPort() > 65535 || seen[p.GetName()] ||
			(p.GetName() != "" && !validName(strings.ToLower(p.GetName()))) {
			return invalid("port %q of the workload is malformed or named twice", p.GetName())
		}
		seen[p.GetName()] = true
	}
	ready := w.GetReadiness()
	if ready.GetHttpPath() != "" && !strings.HasPrefix(ready.GetHttpPath(), "/") {
		return invalid("the readiness path must begin with /")
	}
	if (ready.GetHttpPath() != "" || ready.GetTcp()) && len(w.GetPorts()) == 0 {
		return invalid("readiness is asked of a port, and the workload has none")
	}
	if ready.GetPort() != "" && !seen[ready.GetPort()] {
		return invalid("readiness names port %q, which the workload does not have", ready.GetPort())
	}
	if least := ready.GetMinUptime().AsDuration(); least < 0 || least > maxMinUptime {
		return invalid("the workload's least uptime must be between 0 and %s", maxMinUptime)
	}
	for _, id := range req.Deploy.GetGpuDeviceIds() {
		if !deviceID().MatchString(id) {
			return invalid("device id %q is malformed", id)
		}
	}
	return nil
}

func deviceID() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`) }
