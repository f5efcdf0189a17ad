package contexts

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Announced is the result of Announce and Share.
type Announced struct {
	Name  string
	Taken bool // the requested name belongs to a context of another running mesh or of a person
}

// Announce writes the context of a mesh on this machine and makes it current. Its name is base, or base-2, base-3 and
// so on if the name belongs to another running mesh or to a context that a person wrote. A mesh that has a context
// keeps its name. c.Mesh is required; c.Name is ignored.
func Announce(ctx context.Context, path, base string, c Context) (Announced, error) {
	return announce(ctx, path, base, c, true)
}

// Share is Announce for a further person of the mesh, whose context does not become current.
func Share(ctx context.Context, path, base string, c Context) (Announced, error) {
	return announce(ctx, path, base, c, false)
}

func announce(ctx context.Context, path, base string, c Context, current bool) (Announced, error) {
	if c.Mesh == "" {
		return Announced{}, errors.New("announce mesh: it has no directory")
	}
	var out Announced
	err := change(path, func(f *File) error {
		out = f.nameFor(ctx, base, c)
		c.Name = out.Name
		f.put(c, current)
		return nil
	})
	return out, err
}

// nameFor chooses the name of a mesh's context.
func (f *File) nameFor(ctx context.Context, base string, c Context) Announced {
	free, taken := "", false
	for n := 1; n <= len(f.Contexts)+1; n++ {
		name := base
		if n > 1 {
			name += "-" + strconv.Itoa(n)
		}
		have, err := f.Get(name)
		if err == nil && have.Mesh == c.Mesh {
			return Announced{name, taken}
		}
		if free == "" {
			if err != nil || have.Server == c.Server || abandoned(ctx, have) {
				free = name
			} else if name == base {
				taken = true
			}
		}
	}
	return Announced{free, taken}
}

// abandoned reports whether a context belongs to a mesh on this machine that does not run now. A context without a
// directory may be a person's own, so it counts only if it points at this machine.
func abandoned(ctx context.Context, c Context) bool {
	host, port := address(c.Server)
	if c.Mesh == "" && !local(host) {
		return false
	}
	const within = time.Second
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return true
	}
	_ = conn.Close()
	return false
}

// address returns the host and the port of a server.
func address(server string) (string, string) {
	if u, err := url.Parse(server); err == nil && u.Host != "" {
		server = u.Host
	}
	host, port, err := net.SplitHostPort(server)
	if err != nil {
		return server, "443"
	}
	return host, port
}

func local(host string) bool {
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

// RemoveMesh removes all contexts of the mesh in a directory from the file, those of its further persons included. If
// one of them was current, the context that was current before becomes current again. It does not change a context that
// now points at another mesh.
func RemoveMesh(path, dir string) error {
	return removeIf(path, func(c Context) bool { return dir != "" && c.Mesh == dir })
}

// RemoveDead removes the contexts of ephemeral meshes whose directory does not exist, as RemoveMesh does.
func RemoveDead(path string) error {
	return removeIf(path, func(c Context) bool {
		if !c.Ephemeral || c.Mesh == "" {
			return false
		}
		_, err := os.Lstat(c.Mesh)
		return errors.Is(err, fs.ErrNotExist)
	})
}

// removeIf removes the contexts for which gone returns true. It does not write the file if there are none.
func removeIf(path string, gone func(Context) bool) error {
	f, err := Load(path)
	if err != nil || !slices.ContainsFunc(f.Contexts, gone) {
		return err
	}
	return change(path, func(f *File) error {
		f.remove(gone)
		return nil
	})
}
