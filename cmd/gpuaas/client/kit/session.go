package kit

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/person"
)

// Session is a connection to the mesh, and the printer for its answers.
type Session struct {
	*output.Printer
	Query   readmodelv1connect.QueryServiceClient
	Command readmodelv1connect.CommandServiceClient
	server  string
	Target  Target
	Client  *person.Client
}

// Close ends the session.
func (s *Session) Close() { s.Client.Close() }

// Target is the server to connect to, and the credentials.
type Target struct {
	Server      string
	TrustDomain string
	CA          []byte
	Token       string
	Context     string // its name, empty without one
	Mesh        string // directory of the mesh on this machine that wrote the context
	Ephemeral   bool   // the mesh's directory and its contexts are removed when it ends
}

// connect determines the server and returns a session with it. It sends nothing yet.
func (p *Program) connect(pr *output.Printer) (*Session, error) {
	t, err := p.target()
	if _, known := fault.As(err); known {
		return nil, err
	}
	if err != nil {
		return nil, exit.Usage(err)
	}
	return p.Dial(pr, t)
}

// Dial returns a session with a target. It sends nothing yet.
func (p *Program) Dial(pr *output.Printer, t Target) (*Session, error) {
	host, err := hostPort(t.Server)
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("server %q: %w", t.Server, err))
	}
	roots, err := pki.DecodeCertificates(t.CA)
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("authority of %s: %w", t.Server, err))
	}
	bundle, err := pki.NewBundle(roots...)
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("authority of %s: %w", t.Server, err))
	}
	client, err := person.Dial(person.Config{
		Server: host, TrustDomain: t.TrustDomain, Roots: bundle, Token: t.Token, Timeout: p.timeout,
		Interceptors: []connect.Interceptor{
			onlyText{}, connect.UnaryInterceptorFunc(tooLate),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("prepare connection: %w", err)
	}
	return &Session{
		Printer: pr, Query: client.Query, Command: client.Command, server: t.Server, Target: t,
		Client: client,
	}, nil
}

// target merges flags, environment and context: flags take precedence over the environment, and the environment over
// the file.
func (p *Program) target() (Target, error) {
	server, tokenFile, caFile := cmp.Or(p.server, os.Getenv(envServer)), cmp.Or(p.tokenFile, os.Getenv(envTokenFile)),
		cmp.Or(p.caFile, os.Getenv(envCAFile))
	name := cmp.Or(p.context, os.Getenv(envContext))
	c, err := loadContext(name)
	if err != nil {
		// A command line with server, authority and token needs no context, but a context that is named must exist.
		if name != "" || server == "" || caFile == "" || tokenFile == "" {
			return Target{}, err
		}
		c = contexts.Context{}
	}
	if caFile != "" && tokenFile == "" && (c.CAPEM != "" || c.CAFile != "") {
		return Target{}, fmt.Errorf("--ca-file trusts another authority than context %q: its token is not sent there; "+
			"name --token-file too", c.Name)
	}
	t := Target{
		Server:      cmp.Or(server, c.Server),
		TrustDomain: cmp.Or(p.trustDomain, cmp.Or(c.TrustDomain, contexts.DefaultTrustDomain)), Token: c.Token,
		Context: c.Name,
	}
	if t.Server == c.Server {
		t.Mesh, t.Ephemeral = c.Mesh, c.Ephemeral
	}
	switch {
	case caFile != "":
		t.CA, err = pki.ReadFile(caFile)
	case c.CAPEM != "":
		t.CA = []byte(c.CAPEM)
	case c.CAFile != "":
		t.CA, err = pki.ReadFile(c.CAFile)
	default:
		err = errors.New("no authority to verify the server by: name one with --ca-file")
	}
	if err != nil {
		return Target{}, err
	}
	if file := cmp.Or(tokenFile, c.TokenFile); file != "" && (tokenFile != "" || c.Token == "") {
		if t.Token, err = readToken(file); err != nil {
			return Target{}, err
		}
	}
	if t.Token == "" {
		return Target{}, errors.New("no token to show the server: name the file it stands in with --token-file")
	}
	return t, nil
}

func loadContext(name string) (contexts.Context, error) {
	_, file, err := contexts.Read()
	if err != nil {
		return contexts.Context{}, err
	}
	c, err := file.Get(name)
	if errors.Is(err, contexts.ErrUnknown) && name == "" {
		return contexts.Context{}, errors.New("no server: start one with `gpuaas dev`, choose a context with `gpuaas " +
			"config use-context NAME`, or name --server, --ca-file and --token-file")
	}
	if errors.Is(err, contexts.ErrUnknown) {
		return contexts.Context{}, NoContext(name)
	}
	return c, err
}

// NoContext returns the error for the name of a context that does not exist.
func NoContext(name string) error {
	return fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("there is no context %q", name),
		fault.Remedy("list them with `gpuaas config view`"))
}

// readToken reads a token from a file, which no other user may be able to read.
func readToken(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("read token: %w", err)
	}
	if info.Mode().IsRegular() && info.Mode().Perm()&fs.FileMode(0o077) != 0 {
		return "", fmt.Errorf("read token: %s has mode %#o: %w", path, info.Mode().Perm(), contexts.ErrExposed)
	}
	data, err := os.ReadFile(path) // the caller's own file
	if err != nil {
		return "", fmt.Errorf("read token: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if token == "" {
		return "", fmt.Errorf("read token: %s is empty", path)
	}
	return token, nil
}

// hostPort returns host:port for host:port or https://host[:port].
func hostPort(server string) (string, error) {
	if !strings.Contains(server, "://") {
		server = "https://" + server
	}
	u, err := url.Parse(server)
	switch {
	case err != nil:
		return "", errors.New("not host:port")
	case u.Scheme != "https":
		return "", fmt.Errorf("scheme %q: only https is spoken", u.Scheme)
	case u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || (u.Path != "" && u.Path != "/"):
		return "", errors.New("not host:port")
	}
	if port, err := strconv.ParseUint(cmp.Or(u.Port(), "443"), 10, 16); err != nil || port == 0 {
		return "", fmt.Errorf("port %q is none from 1 to 65535", u.Port())
	}
	if u.Port() == "" {
		return net.JoinHostPort(u.Hostname(), "443"), nil
	}
	return u.Host, nil
}
