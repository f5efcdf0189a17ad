package contexts

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"sigs.k8s.io/yaml"

	"github.com/gpuaas/mesh/internal/pki"
)

// EnvPath is the environment variable that overrides the path of the file.
const EnvPath = "GPUAAS_CONTEXTS"

// DefaultTrustDomain is the trust domain of a context that names none.
const DefaultTrustDomain = "mesh.local"

// ErrUnknown is returned if the file has no context of that name.
var ErrUnknown = errors.New("no such context")

// ErrExposed is returned if users other than the owner may read or write the file.
var ErrExposed = errors.New("others than its owner may read or write it")

// Context is one mesh and one person.
type Context struct {
	Name        string `json:"name"`
	Server      string `json:"server"`                 // host:port or https://host:port of the API for people
	TrustDomain string `json:"trust_domain,omitempty"` // of the server's identity; default `mesh.local`
	CAPEM       string `json:"ca_pem,omitempty"`       // authority of services, PEM; or
	CAFile      string `json:"ca_file,omitempty"`      // the file it stands in
	Token       string `json:"token,omitempty"`        // bearer token; or
	TokenFile   string `json:"token_file,omitempty"`   // the file it stands in
	// Mesh is the directory of the mesh on this machine that wrote the context. It is empty in a context that a person
	// wrote.
	Mesh string `json:"mesh,omitempty"`
	// Ephemeral marks the context of a mesh whose directory is removed, with its content, when the mesh ends.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Previous is the context that was current before this one became current.
	Previous string `json:"previous,omitempty"`
}

// File is the content of the contexts file.
type File struct {
	Current  string    `json:"current"`
	Contexts []Context `json:"contexts"`
}

// DefaultPath returns the path of the file: $GPUAAS_CONTEXTS, else gpuaas/contexts.yaml in the person's configuration
// directory.
func DefaultPath() (string, error) {
	if path := os.Getenv(EnvPath); path != "" {
		return path, nil
	}
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("find configuration directory: %w", err)
	}
	return filepath.Join(dir, "gpuaas", "contexts.yaml"), nil
}

// Read reads the file at DefaultPath, and returns the path as well.
func Read() (string, File, error) {
	path, err := DefaultPath()
	if err != nil {
		return "", File{}, err
	}
	file, err := Load(path)
	return path, file, err
}

// Load reads the file. A file that does not exist counts as an empty one. The error wraps ErrExposed if the mode lets
// other users read or write the file.
func Load(path string) (File, error) {
	var f File
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return f, fmt.Errorf("look at contexts: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return f, fmt.Errorf("%s has mode %#o: %w", path, info.Mode().Perm(), ErrExposed)
	}
	data, err := pki.ReadFile(path)
	if err != nil {
		return f, fmt.Errorf("read contexts: %w", err)
	}
	if err := yaml.UnmarshalStrict(data, &f); err != nil {
		return File{}, fmt.Errorf("read contexts: %s: %w", path, err)
	}
	if err := f.validate(); err != nil {
		return File{}, fmt.Errorf("read contexts: %s: %w", path, err)
	}
	return f, nil
}

func (f *File) validate() error {
	var problems []error
	seen := map[string]bool{}
	for i, c := range f.Contexts {
		switch {
		case c.Name == "":
			problems = append(problems, fmt.Errorf("context %d has no name", i+1))
		case seen[c.Name]:
			problems = append(problems, fmt.Errorf("context %q stands there twice", c.Name))
		}
		seen[c.Name] = true
		if c.Server == "" {
			problems = append(problems, fmt.Errorf("context %q has no server", c.Name))
		}
		if c.CAPEM != "" && c.CAFile != "" {
			problems = append(problems, fmt.Errorf("context %q has both ca_pem and ca_file", c.Name))
		}
		if c.Token != "" && c.TokenFile != "" {
			problems = append(problems, fmt.Errorf("context %q has both token and token_file", c.Name))
		}
	}
	if f.Current != "" && !seen[f.Current] {
		problems = append(problems, fmt.Errorf("current context %q is not among the contexts", f.Current))
	}
	return errors.Join(problems...)
}

// Get returns a context by name; the empty name means the current one. The error wraps ErrUnknown if there is none.
func (f *File) Get(name string) (Context, error) {
	if name == "" {
		name = f.Current
	}
	if name == "" {
		return Context{}, fmt.Errorf("no current context: %w", ErrUnknown)
	}
	i := slices.IndexFunc(f.Contexts, func(c Context) bool { return c.Name == name })
	if i < 0 {
		return Context{}, fmt.Errorf("context %q: %w", name, ErrUnknown)
	}
	return f.Contexts[i], nil
}

// Put writes a context into the file, in place of the one of its name if there is one, and makes it current if asked.
func Put(path string, c Context, current bool) error {
	return change(path, func(f *File) error {
		f.put(c, current)
		return nil
	})
}

// put does in memory what Put does.
func (f *File) put(c Context, current bool) {
	if current && f.Current != c.Name {
		if !f.leadsTo(f.Current, c.Name) {
			c.Previous = f.Current
		}
		f.Current = c.Name
	}
	i := slices.IndexFunc(f.Contexts, func(have Context) bool { return have.Name == c.Name })
	if i < 0 {
		f.Contexts = append(f.Contexts, c)
		return
	}
	c.Previous = cmp.Or(c.Previous, f.Contexts[i].Previous)
	f.Contexts[i] = c
}

// leadsTo reports whether other is among the contexts that the chain of Previous from name leads to.
func (f *File) leadsTo(name, other string) bool {
	for range f.Contexts {
		c, err := f.Get(name)
		if name == "" || err != nil {
			return false
		}
		if c.Previous == other {
			return true
		}
		name = c.Previous
	}
	return false
}

// Use makes a context the current one. The error wraps ErrUnknown if there is no such context.
func Use(path, name string) error {
	return change(path, func(f *File) error {
		if _, err := f.Get(name); err != nil {
			return err
		}
		f.Current = name
		return nil
	})
}

// remove removes contexts. If a removed context was the Previous of another one, its own Previous takes its place.
func (f *File) remove(gone func(Context) bool) {
	for {
		at := slices.IndexFunc(f.Contexts, gone)
		if at < 0 {
			return
		}
		c := f.Contexts[at]
		f.Contexts = slices.Delete(f.Contexts, at, at+1)
		previous := c.Previous
		if _, err := f.Get(previous); err != nil || previous == c.Name {
			previous = ""
		}
		for i := range f.Contexts {
			if f.Contexts[i].Previous == c.Name {
				f.Contexts[i].Previous = onlyUnless(previous, f.Contexts[i].Name)
			}
		}
		if f.Current == c.Name {
			f.Current = previous
		}
	}
}

// onlyUnless returns name unless it equals other, because no context is its own Previous.
func onlyUnless(name, other string) string {
	if name == other {
		return ""
	}
	return name
}

// Write writes a new file with one context, which is current. It is for a directory that is handed over, so it leaves
// no other file there, such as a lock.
func Write(path string, c Context) error {
	f := File{}
	f.put(c, true)
	return f.write(path)
}

// write checks the file and replaces the one at path with it.
func (f *File) write(path string) error {
	if err := f.validate(); err != nil {
		return fmt.Errorf("change contexts: %w", err)
	}
	data, err := yaml.Marshal(f)
	if err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	if err := pki.WriteFile(path, data); err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	return nil
}

func change(path string, apply func(*File) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make configuration directory: %w", err)
	}
	return pki.WithLock(path+".lock", func() error {
		f, err := Load(path)
		if err != nil {
			return err
		}
		if err := apply(&f); err != nil {
			return err
		}
		return f.write(path)
	})
}
