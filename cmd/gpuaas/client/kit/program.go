package kit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/mesh/person"
)

// Variables of the environment, each of which a flag overrides.
const (
	envServer    = "GPUAAS_SERVER"
	envTokenFile = "GPUAAS_TOKEN_FILE" //nolint:gosec // the name of a variable
	envCAFile    = "GPUAAS_CA_FILE"
	envContext   = "GPUAAS_CONTEXT"
)

// Program is the client's share of a command line: the flags that all commands have, and the streams they write to.
type Program struct {
	output      string
	jq          string
	timeFormat  string
	server      string
	context     string
	tokenFile   string
	caFile      string
	trustDomain string
	timeout     time.Duration

	now        func() time.Time
	helpFailed error
}

// New returns a new program.
func New() *Program { return &Program{now: time.Now} }

// Flags adds the global flags to a root.
func (p *Program) Flags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.StringVarP(&p.output, "output", "o", output.FormatTable,
		"form of the output: "+strings.Join(output.Formats, ", "))
	flags.StringVar(&p.jq, "jq", "", "filter the JSON output by a jq expression")
	flags.StringVar(&p.timeFormat, "time-format", output.TimeAuto,
		"times in tables: auto (relative on a terminal), relative or iso")
	flags.StringVar(&p.server, "server", "", "host:port of the mesh's API ($"+envServer+"; default: the context's)")
	flags.StringVar(&p.context, "context", "", "context to use ($"+envContext+"; default: the current one)")
	flags.StringVar(&p.tokenFile, "token-file", "",
		"file with the bearer token ($"+envTokenFile+"; default: the context's)")
	flags.StringVar(&p.caFile, "ca-file", "",
		"authority by which the server is verified, PEM ($"+envCAFile+"; default: the context's)")
	flags.StringVar(&p.trustDomain, "trust-domain", "", "trust domain of the server (default: the context's)")
	flags.DurationVar(&p.timeout, "request-timeout", 15*time.Second, "longest a single request may take")
	_ = root.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions(output.Formats, cobra.ShellCompDirectiveNoFileComp))
	_ = root.RegisterFlagCompletionFunc("context", p.CompleteContexts)
}

// JSON reports whether output and errors must be JSON. It is for commands of other packages.
func (p *Program) JSON() bool {
	return p.output == output.FormatJSON || p.output == output.FormatJSONL || p.jq != ""
}

// Handler is the action of a command that has a session.
type Handler func(ctx context.Context, s *Session, args []string) error

// Run returns the cobra function of a handler: it opens the session, and a signal cancels its context.
func (p *Program) Run(fn Handler) func(*cobra.Command, []string) error {
	return p.Local(func(ctx context.Context, pr *output.Printer, args []string) error {
		s, err := p.connect(pr)
		if err != nil {
			return err
		}
		defer s.Close()
		correlation := ids.New()
		if err := fn(obs.With(ctx, obs.Correlation{CorrelationID: correlation}), s, args); err != nil {
			return &exit.TracedError{Cause: s.explainFailure(err), CorrelationID: correlation}
		}
		return nil
	})
}

// patience is how long a request that reads all history may take, unless --request-timeout is given.
const patience = 10 * time.Minute

// Patient raises the request timeout of a command to patience.
func (p *Program) Patient(cmd *cobra.Command, _ []string) {
	if !cmd.Flags().Changed("request-timeout") {
		p.timeout = patience
	}
}

// Local is Run for a command that needs no connection.
func (p *Program) Local(
	fn func(ctx context.Context, pr *output.Printer, args []string) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		if err := positive(cmd); err != nil {
			return err
		}
		pr, err := p.printer(cmd)
		if err != nil {
			return err
		}
		pr.Bind(ctx)
		err = inFlags(cmd, fn(ctx, pr, args))
		if e, refused := fault.As(err); err != nil && ctx.Err() != nil && (!refused || e.CorrelationID == "") {
			if _, typed := errors.AsType[*exit.Error](err); !typed {
				return exit.Interrupt("interrupted")
			}
		}
		return err
	}
}

// positive refuses durations below zero, of which a command would wait without end or not at all.
func positive(cmd *cobra.Command) error {
	var err error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Value.Type() == "duration" && strings.HasPrefix(f.Value.String(), "-") {
			err = errors.Join(err, fmt.Errorf("--%s %s: it is 0 or longer", f.Name, f.Value))
		}
	})
	if err != nil {
		return exit.Usage(err)
	}
	return nil
}

// printer checks the flags of the output and returns a printer. The caller binds it to a context before it prints.
func (p *Program) printer(cmd *cobra.Command) (*output.Printer, error) {
	out := cmd.OutOrStdout()
	pr := &output.Printer{
		Format: p.output, Out: out, Err: cmd.ErrOrStderr(), Now: p.now, Width: 120,
		In: terminalOf(cmd), Sure: set(cmd, "yes") || dryRun(cmd),
	}
	if !slices.Contains(output.Formats, p.output) {
		return nil, exit.Usage(fmt.Errorf("--output %q is none of %s", p.output, strings.Join(output.Formats, ", ")))
	}
	if p.jq != "" {
		var err error
		if pr.Expression, err = output.NewFilter(p.jq); err != nil {
			return nil, exit.Usage(fmt.Errorf("--jq: %w", err))
		}
		switch {
		case !cmd.Flags().Changed("output"):
			pr.Format = output.FormatJSON
		case p.output != output.FormatJSON && p.output != output.FormatJSONL:
			return nil, exit.Usage(errors.New("--jq filters JSON: it goes with -o json or -o jsonl"))
		}
	}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) { // a descriptor fits an int
		pr.TTY = true
		pr.Color = output.Colors(file)
		if width, _, err := term.GetSize(int(file.Fd())); err == nil && width > 0 {
			pr.Width = width
		}
	}
	switch p.timeFormat {
	case output.TimeAuto:
		pr.Relative = pr.TTY
	case output.TimeRelative:
		pr.Relative = true
	case output.TimeISO:
	default:
		return nil, exit.Usage(fmt.Errorf("--time-format %q is none of %s, %s, %s", p.timeFormat, output.TimeAuto,
			output.TimeRelative, output.TimeISO))
	}
	return pr, nil
}

// Named reports whether the command line names a mesh. A command that can run without a mesh does not use the current
// context.
func (p *Program) Named() bool { return p.context != "" || p.server != "" }

// Person connects to the mesh that the flags, the environment and the context name. Close ends it.
func (p *Program) Person(cmd *cobra.Command) (*person.Client, error) {
	pr, err := p.printer(cmd)
	if err != nil {
		return nil, err
	}
	s, err := p.connect(pr)
	if err != nil {
		return nil, err
	}
	return s.Client, nil
}
