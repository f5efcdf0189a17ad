package people

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// Files of a directory that is handed over. All of them but the authority contain the token.
const (
	handContexts = "contexts.yaml"
	handCA       = "ca.pem"
	handToken    = "token"
	handHeader   = "authorization"
)

// tokenPlace is where the token of a new person is written: a context, a directory, or both.
type tokenPlace struct {
	path    string // of the contexts file
	context string
	dir     string
	name    string // of the context in the directory
}

// placeFor chooses the place before the token exists. It returns an error if the place is taken.
func placeFor(ctx context.Context, p *kit.Program, s *kit.Session, req *readmodelv1.CreatePersonRequest, contextName,
	out string,
) (tokenPlace, error) {
	person := req.GetName()
	path, file, err := contexts.Read()
	if err != nil {
		return tokenPlace{}, exit.Usage(err)
	}
	place := tokenPlace{path: path, context: contextName, dir: out, name: cmp.Or(contextName, person)}
	if out == "" && contextName == "" {
		place.context = personContext(s.Target.Context, person)
	}
	if place.context != "" {
		if have, err := file.Get(place.context); err == nil {
			if err := takeOver(ctx, p, s, have, req); err != nil {
				return tokenPlace{}, err
			}
		}
	}
	if out == "" {
		return place, nil
	}
	if err := os.MkdirAll(out, 0o700); err != nil {
		return tokenPlace{}, exit.Usage(fmt.Errorf("--out: %w", err))
	}
	for _, name := range []string{handContexts, handToken, handHeader} {
		switch _, err := os.Lstat(filepath.Join(out, name)); {
		case err == nil:
			return tokenPlace{}, exit.Usage(
				fmt.Errorf("%s is there already: a token is never overwritten", filepath.Join(out, name)),
			)
		case !errors.Is(err, fs.ErrNotExist):
			return tokenPlace{}, exit.Usage(fmt.Errorf("--out: %w", err))
		}
	}
	return place, nil
}

// personContext returns the name of the context of a further person of the mesh, given the name of the mesh's context.
func personContext(mesh, person string) string {
	if mesh == "" {
		return person
	}
	return mesh + "-" + person
}

func (l tokenPlace) write(t kit.Target, token string) error {
	c := contexts.Context{
		Name:        l.context,
		Server:      t.Server,
		TrustDomain: t.TrustDomain,
		CAPEM:       string(t.CA),
		Token:       token,
	}
	if l.context != "" {
		own := c
		own.Mesh, own.Ephemeral = t.Mesh, t.Ephemeral // the context is removed with an ephemeral mesh
		if err := contexts.Put(l.path, own, false); err != nil {
			return err
		}
	}
	if l.dir == "" {
		return nil
	}
	c.Name = l.name
	for _, file := range []struct{ name, text string }{
		{handCA, string(t.CA)}, {handToken, token + "\n"}, {handHeader, "Authorization: Bearer " + token + "\n"},
	} {
		if err := pki.WriteFile(filepath.Join(l.dir, file.name), []byte(file.text)); err != nil {
			return err
		}
	}
	return contexts.Write(filepath.Join(l.dir, handContexts), c)
}

// next returns the text about what to do with the token.
func (l tokenPlace) next(p *readmodelv1.Person) string {
	verb := "workspaces list"
	if p.GetTenantId() == "" {
		verb = "status"
	}
	if l.context != "" {
		return fmt.Sprintf("use it: gpuaas --context %s %s", l.context, verb)
	}
	return fmt.Sprintf("use it: GPUAAS_CONTEXTS=%s gpuaas %s", filepath.Join(l.dir, handContexts), verb)
}
