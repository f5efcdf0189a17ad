package secretenv

import (
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Check refuses a requested spec with fields that only responses and stored specs have. A spec that was read from a
// response has names without values, and would start a workload without them.
func Check(spec *lifecyclev1.WorkspaceSpec) error {
	var unmet []string
	for _, w := range spec.GetWorkloads() {
		if len(w.GetEnvNames()) > 0 {
			unmet = append(unmet, fmt.Sprintf("workload %q has its variables with their values in env, and no env_names",
				w.GetName()))
		}
		if len(w.GetSealedEnv()) > 0 {
			unmet = append(unmet, fmt.Sprintf("workload %q has its variables with their values in env, and no sealed_env",
				w.GetName()))
		}
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
			"environment values are never shown, and so a spec that was read has none to give",
			fault.Unmet(unmet...), fault.Remedy("give each variable with its value in env, and leave env_names and "+
				"sealed_env out"))
	}
	return nil
}

// Seal returns a copy of the spec whose environment values are sealed for their owner. Values that are sealed already
// stay as they are.
func (k *Keys) Seal(spec *lifecyclev1.WorkspaceSpec, owner Owner) (*lifecyclev1.WorkspaceSpec, error) {
	out := proto.CloneOf(spec)
	for _, w := range out.GetWorkloads() {
		if err := k.sealWorkload(w, owner); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (k *Keys) sealWorkload(w *nodev1.Workload, owner Owner) error {
	sealed, err := k.sealAll(w.GetEnv(), owner, w.GetName(), ofTenant)
	if err != nil {
		return err
	}
	if len(sealed) > 0 {
		if w.SealedEnv == nil {
			w.SealedEnv = map[string][]byte{}
		}
		maps.Copy(w.GetSealedEnv(), sealed)
	}
	w.Env, w.EnvNames = nil, nil
	return nil
}

func (k *Keys) sealAll(values map[string]string, owner Owner, workload, purpose string) (map[string][]byte, error) {
	out := make(map[string][]byte, len(values))
	for name, value := range values {
		sealed, err := k.seal(value, place{owner, workload, purpose, name})
		if err != nil {
			return nil, err
		}
		out[name] = sealed
	}
	return out, nil
}

// SealDeploy seals all values of a deploy for their owner.
func (k *Keys) SealDeploy(deploy *nodev1.WorkloadDeploy, owner Owner) error {
	if err := k.sealWorkload(deploy.GetWorkload(), owner); err != nil {
		return err
	}
	sealed, err := k.sealAll(deploy.GetSecretEnv(), owner, deploy.GetWorkload().GetName(), ofMesh)
	if err != nil {
		return err
	}
	if len(sealed) > 0 {
		if deploy.SealedSecretEnv == nil {
			deploy.SealedSecretEnv = map[string][]byte{}
		}
		maps.Copy(deploy.GetSealedSecretEnv(), sealed)
	}
	deploy.SecretEnv = nil
	return nil
}

// OpenDeploy opens all values of a deploy, or none: after an error the deploy is as it was.
func (k *Keys) OpenDeploy(deploy *nodev1.WorkloadDeploy, owner Owner) error {
	w := deploy.GetWorkload()
	env, err := k.openAll(w.GetEnv(), w.GetSealedEnv(), owner, w.GetName(), ofTenant)
	if err != nil {
		return err
	}
	secret, err := k.openAll(deploy.GetSecretEnv(), deploy.GetSealedSecretEnv(), owner, w.GetName(), ofMesh)
	if err != nil {
		return err
	}
	if w != nil {
		w.Env, w.SealedEnv, w.EnvNames = env, nil, nil
	}
	deploy.SecretEnv, deploy.SealedSecretEnv = secret, nil
	return nil
}

func (k *Keys) openAll(
	plain map[string]string, sealed map[string][]byte, owner Owner, workload, purpose string,
) (map[string]string, error) {
	out := make(map[string]string, len(plain)+len(sealed))
	maps.Copy(out, plain)
	for _, name := range slices.Sorted(maps.Keys(sealed)) { // in order, so that the same one is refused each time
		value, err := k.open(sealed[name], place{owner, workload, purpose, name})
		if err != nil {
			return nil, err
		}
		out[name] = value
	}
	return out, nil
}

// Opens returns an error if a stored spec has a value that does not open.
func (k *Keys) Opens(spec *lifecyclev1.WorkspaceSpec, owner Owner) error {
	for _, w := range spec.GetWorkloads() {
		if _, err := k.openAll(nil, w.GetSealedEnv(), owner, w.GetName(), ofTenant); err != nil {
			return err
		}
	}
	return nil
}

// ShowNames replaces a spec's environment by the names alone, whatever form its values are in.
func ShowNames(spec *lifecyclev1.WorkspaceSpec) {
	for _, w := range spec.GetWorkloads() {
		names := map[string]bool{}
		for _, name := range w.GetEnvNames() {
			names[name] = true
		}
		for name := range w.GetEnv() {
			names[name] = true
		}
		for name := range w.GetSealedEnv() {
			names[name] = true
		}
		w.Env, w.SealedEnv, w.EnvNames = nil, nil, slices.Sorted(maps.Keys(names))
	}
}
