package process

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/internal/workrules"
)

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
		s.Dir = r.scratch(w.key)
		if err = isolation.MakeDirectory(s.Dir, s.UID); err != nil {
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
	if s.Cgroups, err = r.cfg.Cgroups.Create(req.WorkspaceID, s.Name, r.cfg.MaxPIDs,
		isolation.DeniedDevices(r.cfg.GPUs, s.GPUs)); err != nil {
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
	n := int32(picked)
	r.mu.Lock()
	r.claimed[n] = k
	r.mu.Unlock()
	return n, nil
}

func portFree(n int32) bool {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(int(n))) //nolint:noctx // closed at once
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}
