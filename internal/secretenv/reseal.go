package secretenv

import (
	"encoding/hex"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// Unsealed takes the place of a key's id for a value that is sealed under none.
const Unsealed = "!"

// IDs returns the ids of all keys in the set, the first one first.
func (k *Keys) IDs() []string {
	if k == nil {
		return nil
	}
	rest := slices.DeleteFunc(slices.Sorted(maps.Keys(k.byID)), func(id string) bool { return id == k.first.id })
	return append([]string{k.first.id}, rest...)
}

// Has reports whether the set has the key of an id.
func (k *Keys) Has(id string) bool {
	_, ok := k.find(id)
	return ok
}

// HasAll reports whether the set has every key of a list of ids with commas.
func (k *Keys) HasAll(ids string) bool {
	for id := range strings.SplitSeq(ids, ",") {
		if id != "" && id != Unsealed && !k.Has(id) {
			return false
		}
	}
	return true
}

// Reseal returns a copy of a stored spec with all its values sealed under the first key, and the sum of the spec with
// its values.
func (k *Keys) Reseal(spec *lifecyclev1.WorkspaceSpec, owner Owner) (*lifecyclev1.WorkspaceSpec, Sum, error) {
	open := proto.CloneOf(spec)
	for _, w := range open.GetWorkloads() {
		env, err := k.openAll(w.GetEnv(), w.GetSealedEnv(), owner, w.GetName(), ofTenant)
		if err != nil {
			return nil, "", err
		}
		w.Env, w.SealedEnv, w.EnvNames = env, nil, nil
	}
	sum, err := SumOf(open)
	if err != nil {
		return nil, "", err
	}
	out, err := k.Seal(open, owner)
	return out, sum, err
}

// ResealDeploy seals all values of a stored deploy under the first key.
func (k *Keys) ResealDeploy(deploy *nodev1.WorkloadDeploy, owner Owner) error {
	if err := k.OpenDeploy(deploy, owner); err != nil {
		return err
	}
	return k.SealDeploy(deploy, owner)
}

// KeysOfSpec returns the ids of the keys that a stored spec and its digest are under, as lifecycle.secret_keys of the
// database does: in order, with commas.
func KeysOfSpec(spec *lifecyclev1.WorkspaceSpec, digest string) string {
	ids := map[string]bool{}
	for _, w := range spec.GetWorkloads() {
		keysOf(ids, len(w.GetEnv()), w.GetSealedEnv())
	}
	if rest, keyed := strings.CutPrefix(digest, digestPrefix); keyed {
		id, _, _ := strings.Cut(rest, ".")
		ids[id] = true
	} else if _, bare := Bare(digest); bare {
		ids[Unsealed] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(ids)), ",")
}

// KeysOfDeploy returns the ids of the keys that the values of a deploy are under.
func KeysOfDeploy(deploy *nodev1.WorkloadDeploy) string {
	ids := map[string]bool{}
	keysOf(ids, len(deploy.GetWorkload().GetEnv())+len(deploy.GetSecretEnv()), deploy.GetWorkload().GetSealedEnv(),
		deploy.GetSealedSecretEnv())
	return strings.Join(slices.Sorted(maps.Keys(ids)), ",")
}

func keysOf(ids map[string]bool, plain int, sealed ...map[string][]byte) {
	if plain > 0 {
		ids[Unsealed] = true
	}
	for _, values := range sealed {
		for _, value := range values {
			id := Unsealed
			if len(value) >= 1+idSize {
				id = hex.EncodeToString(value[1 : 1+idSize])
			}
			ids[id] = true
		}
	}
}

// Part is a range of lists of keys: those after (From, FromID), in the order of the lists and then of the rows' ids,
// and before Below.
type Part struct{ From, FromID, Below string }

// Others returns the ranges that hold every list of keys but the empty one and that of the first key alone: rows under
// the first key are passed over, however many there are.
func Others(first string) []Part {
	const least, most = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
	return []Part{{From: "", FromID: least, Below: first}, {From: first, FromID: most, Below: "~"}}
}
