package saga

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Cancellable reports whether the definition of a run lets it be cancelled, whatever its state. It returns true for a
// run whose definition this build does not have: Cancel marks the run for the build that drives it.
func (c *Core) Cancellable(r *runs.Run) bool {
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	return !known || !def.Uncancellable
}

// Key returns the name and version of the definition, as "name:version".
func (d *Definition) Key() string { return key(d.Name, d.Version) }

// key names one version of a definition.
func key(name string, version int) string { return fmt.Sprintf("%s:%d", name, version) }

// Registry holds the definitions that this build can run: the current one of each name, and older versions that runs
// may still be pinned to.
type Registry struct {
	byKey  map[string]*Definition
	newest map[string]*Definition
	keys   []string
}

// NewRegistry checks the definitions and returns their registry, or an error with all problems.
func NewRegistry(definitions ...Definition) (*Registry, error) {
	r := &Registry{byKey: map[string]*Definition{}, newest: map[string]*Definition{}}
	var problems []error
	for _, in := range definitions {
		d, err := normalized(in)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		k := d.Key()
		if r.byKey[k] != nil {
			problems = append(problems, fmt.Errorf("definition %s is registered twice", k))
			continue
		}
		r.byKey[k] = &d
		r.keys = append(r.keys, k)
		if n := r.newest[d.Name]; n == nil || n.Version < d.Version {
			r.newest[d.Name] = &d
		}
	}
	return r, errors.Join(problems...)
}

// Keys returns the name and version, as "name:version", of every definition.
func (r *Registry) Keys() []string { return r.keys }

// Newest returns the definition that new runs of that name start with.
func (r *Registry) Newest(name string) (*Definition, bool) {
	d, ok := r.newest[name]
	return d, ok
}

// All returns the newest version of every definition.
func (r *Registry) All() []*Definition {
	out := make([]*Definition, 0, len(r.newest))
	for _, name := range slices.Sorted(maps.Keys(r.newest)) {
		out = append(out, r.newest[name])
	}
	return out
}

// Versions returns every version of every definition, in the order in which they were registered.
func (r *Registry) Versions() []*Definition {
	out := make([]*Definition, 0, len(r.keys))
	for _, k := range r.keys {
		out = append(out, r.byKey[k])
	}
	return out
}

// Get returns one version of a definition.
func (r *Registry) Get(name string, version int) (*Definition, bool) {
	d, ok := r.byKey[key(name, version)]
	return d, ok
}

// Drivable returns the definition by which this build drives a run, or why it cannot.
func (c *Core) Drivable(r *runs.Run) (*Definition, error) {
	def, ok := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case !ok:
		return nil, errors.New("its definition is not registered")
	case r.Step >= len(def.Steps) || !slices.Equal(r.StepNames, def.stepNames()):
		return nil, fmt.Errorf("its steps are not those of %s", def.Key())
	}
	return def, nil
}

// Drives reports whether this build can drive a run. Trying again does not help a run that it cannot drive.
func (c *Core) Drives(r *runs.Run) bool {
	_, err := c.Drivable(r)
	return err == nil
}
