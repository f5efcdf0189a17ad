package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ports"
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
		return invalid("the workload's environment values are sealed, and an agent cannot open them: lifecycle runs in two versions")
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

// build makes the spec of a deploy: uid, working directory, ports, environment, control groups. The next deploy of the
// same name reuses what build has made on the host.
func (r *Runtime) build(ctx context.Context, w *workload, req Request, digest string) (spec, error) {
	wl := req.Deploy.GetWorkload()
	s := spec{
		WorkspaceID: req.WorkspaceID, Name: wl.GetName(), Epoch: req.Epoch, OpSeq: req.OpSeq, Digest: digest,
		Argv: slices.Concat(wl.GetCommand(), wl.GetArgs()), Dir: req.Dir, UID: -1, Policy: policyOf(wl.GetRestartPolicy()),
		GPUs: req.Deploy.GetGpuDeviceIds(), LogBytes: r.cfg.LogBytes, BackoffMin: r.cfg.BackoffMin,
		BackoffMax: r.cfg.BackoffMax,
		CalmAfter:  r.cfg.CalmAfter,
		Ready: probe{
			HTTPPath: wl.GetReadiness().GetHttpPath(), Port: wl.GetReadiness().GetPort(), TCP: wl.GetReadiness().GetTcp(),
			Timeout: wl.GetReadiness().GetTimeout().AsDuration(),
		},
	}
	if least := wl.GetReadiness().GetMinUptime(); least != nil {
		asked := least.AsDuration()
		s.Ready.MinUptime = &asked
	}
	if !r.cfg.NoRoot && r.deps.UIDs.Enabled() {
		id, err := r.deps.UIDs.Of(req.WorkspaceID)
		if err != nil {
			return spec{}, err
		}
		s.UID = id
	}
	var err error
	if s.Dir == "" {
		if s.Dir, err = r.makeScratch(w.key, s.UID); err != nil {
			return spec{}, err
		}
	}
	if err := r.substituteDemo(&s); err != nil {
		return spec{}, err
	}
	if s.Ports, err = r.bindPorts(ctx, w.key, wl.GetPorts(), w.spec.Ports); err != nil {
		return spec{}, err
	}
	s.Env = environment(wl, req, s)
	if s.Cgroups, err = r.cfg.Cgroups.create(req.WorkspaceID, s.Name, r.cfg.MaxPIDs,
		deniedDevices(r.cfg.GPUs, s.GPUs)); err != nil {
		// If the host gives no groups any longer the workload still runs; its status reports that it has none.
		r.deps.Logger.Warn("workload gets no control group", slog.String("workspace_id", req.WorkspaceID),
			slog.String("workload", s.Name), slog.Any("error", err))
		s.Cgroups = nil
	}
	return s, nil
}

func environment(wl *nodev1.Workload, req Request, s spec) map[string]string {
	env := map[string]string{
		"PATH": defaultPath, "HOME": s.Dir, "LANG": "C.UTF-8", "TMPDIR": s.Dir,
		"GPUAAS_WORKSPACE_ID": req.WorkspaceID, "GPUAAS_WORKLOAD": s.Name, "GPUAAS_EPOCH": strconv.FormatInt(req.Epoch, 10),
	}
	maps.Copy(env, wl.GetEnv())
	maps.Copy(env, req.Deploy.GetSecretEnv())
	maps.Copy(env, portVariables(s.Ports))
	// The variable is always set, also when it is empty: without it a program sees every device.
	env["CUDA_VISIBLE_DEVICES"] = strings.Join(s.GPUs, ",")
	return env
}

// portVariables returns the variables that hold the numbers of ports.
func portVariables(ports []port) map[string]string {
	out := map[string]string{}
	for i, p := range ports {
		number := strconv.Itoa(int(p.Port))
		if i == 0 {
			out["PORT"] = number
		}
		if p.Name != "" {
			out[workrules.PortVariable(p.Name)] = number
		}
	}
	return out
}

func policyOf(p nodev1.RestartPolicy) string {
	switch p {
	case nodev1.RestartPolicy_RESTART_POLICY_ALWAYS:
		return policyAlways
	case nodev1.RestartPolicy_RESTART_POLICY_NEVER:
		return policyNever
	case nodev1.RestartPolicy_RESTART_POLICY_ON_FAILURE, nodev1.RestartPolicy_RESTART_POLICY_UNSPECIFIED:
		return policyOnFailure
	default:
		return policyOnFailure
	}
}

// scratch returns the working directory of a workload without storage.
func (r *Runtime) scratch(k key) string {
	return filepath.Join(r.cfg.WorkDir, "work", k.workspaceID, k.name)
}

func (r *Runtime) makeScratch(k key, owner int) (string, error) {
	dir := r.scratch(k)
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil { //nolint:gosec // passed through, not read
		return "", fmt.Errorf("make working directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make working directory: %w", err)
	}
	if owner >= 0 {
		if err := os.Lchown(dir, owner, owner); err != nil {
			return "", fmt.Errorf("give working directory to the workspace: %w", err)
		}
	}
	return dir, nil
}

// bindPorts returns the ports of a workload. For those without a number it keeps the one picked before if that is free,
// and else picks a free one.
func (r *Runtime) bindPorts(ctx context.Context, k key, asked []*nodev1.Port, before []port) ([]port, error) {
	out := make([]port, 0, len(asked))
	for _, a := range asked {
		p := port{Name: a.GetName(), Port: a.GetPort()}
		if p.Port == 0 {
			p.Picked = true
			for _, b := range before {
				if b.Picked && b.Name == p.Name && portFree(b.Port) {
					p.Port = b.Port
				}
			}
		}
		if p.Port == 0 {
			picked, err := r.pickPort(ctx, k)
			if err != nil {
				return nil, err
			}
			p.Port = picked
		}
		out = append(out, p)
	}
	return out, nil
}

// pickPort picks a free port and keeps it from other workloads of this agent, which may not have bound theirs yet.
func (r *Runtime) pickPort(ctx context.Context, k key) (int32, error) {
	picked, err := ports.Pick(ctx, "")
	if err != nil {
		return 0, err
	}
	n := int32(picked) //nolint:gosec // below 65536
	r.mu.Lock()
	r.claimed[n] = k
	r.mu.Unlock()
	return n, nil
}

func portFree(n int32) bool {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(int(n))) //nolint:gosec,noctx // closed at once
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}

const nvidiaMajor = 195

// deniedDevices returns the device control group's rules that keep a workload from the real GPUs it was not given.
func deniedDevices(host []*commonv1.Gpu, given []string) []string {
	var rules []string
	for _, g := range host {
		if !g.GetSimulated() && !slices.Contains(given, g.GetDeviceId()) {
			rules = append(rules, fmt.Sprintf("c %d:%d rwm", nvidiaMajor, g.GetIndex()))
		}
	}
	return rules
}
