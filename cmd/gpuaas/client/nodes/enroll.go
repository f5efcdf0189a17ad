package nodes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// Files of a bootstrap bundle, as the agent's `enroll --bundle` reads them.
const (
	bundleEnv        = "node-agent.env"
	bundleCA         = "ca-bundle.crt"
	bundleRecoveryCA = "recovery-ca-bundle.crt"
)

// mostGPUs is how many simulated GPUs an agent declares at most.
const mostGPUs = 64

// EnrollView is how the answer to an enrolment is printed; it has no token.
var EnrollView = output.View[*readmodelv1.EnrollNodeResponse]{
	Name: (*readmodelv1.EnrollNodeResponse).GetNodeId,
	Columns: []output.Column[*readmodelv1.EnrollNodeResponse]{
		{Title: "NODE ID", Path: "node_id"},
		{Title: "EXPIRES", Path: "expires_at"},
		{Title: "PROFILE", Path: "profile.name"},
	},
}

func enrollCommand(p *kit.Program) *cobra.Command {
	var (
		name, out, key, profile string
		validFor                time.Duration
		gpus                    int
	)
	cmd := &cobra.Command{
		Use: "enroll --name N --out DIR", Short: "Issue a bootstrap bundle for a new machine",
		Long: "Issue a bootstrap bundle for a new machine: a token that is good once, where to enrol, and what to trust.\n" +
			"The token is written to DIR only; without --out it is printed as data, and only where -o json, jsonl or yaml " +
			"asks for it.",
		Example: "  gpuaas nodes enroll --name rack1-07 --out ./bundle",
		Args:    kit.Args(),
	}
	cmd.RunE = p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
		if name == "" {
			return exit.Usage(errors.New("gpuaas nodes enroll needs --name N"))
		}
		if gpus < 0 || gpus > mostGPUs {
			return exit.Usage(fmt.Errorf("--gpus %d: it is from 0 to %d", gpus, mostGPUs))
		}
		if cmd.Flags().Changed("valid-for") && validFor <= 0 {
			return exit.Usage(errors.New("--valid-for: between 1s and 24h"))
		}
		if out == "" && !s.Structured() {
			return exit.Usage(errors.New("the bundle holds a token: name a directory with --out DIR, or take it as data " +
				"with -o json"))
		}
		if out != "" {
			// The directory is made before the token exists, because a token that cannot be written is lost.
			if err := claimDirectory(out); err != nil {
				return err
			}
		}
		req := &readmodelv1.EnrollNodeRequest{Name: name, IdempotencyKey: key, Profile: profile}
		if validFor > 0 {
			req.ValidFor = durationpb.New(validFor)
		}
		answer, err := s.Command.EnrollNode(ctx, req)
		if err != nil {
			return err
		}
		if out == "" {
			return output.One(s.Printer, EnrollView, answer, output.With("name", name))
		}
		if err := writeBundle(out, name, answer); err != nil {
			return err
		}
		shown, _ := proto.Clone(answer).(*readmodelv1.EnrollNodeResponse)
		shown.Token = ""
		if err := output.One(s.Printer, EnrollView, shown, output.With("name", name), output.With("out", out)); err != nil {
			return err
		}
		next := "gpuaas-node-agent enroll --bundle " + out
		if gpus > 0 {
			next += fmt.Sprintf(" --gpus %d", gpus)
		}
		human.Note(s.Err, "the bundle is in %s; copy it to the machine and run there:\n  %s", out, next)
		return nil
	})
	flags := cmd.Flags()
	flags.StringVar(&name, "name", "", "name of the machine (required)")
	flags.StringVar(&out, "out", "", "directory to write the bundle to; it must not hold one already")
	flags.DurationVar(&validFor, "valid-for", 0, "how long the token is good (default: the mesh's policy)")
	flags.IntVar(&gpus, "gpus", 0, "simulated GPUs that the machine's agent is to declare")
	flags.StringVar(&profile, "profile", "",
		"`name` of the node's profile (`gpuaas profiles list`); without it a new node gets the default")
	flags.StringVar(&key, "idempotency-key", "", "the same key answers the same bundle")
	return cmd
}

// claimDirectory makes the directory of a bundle. It returns an error if the directory already has a file of a bundle.
func claimDirectory(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return exit.Usage(fmt.Errorf("--out: %w", err))
	}
	for _, file := range []string{bundleEnv, bundleCA, bundleRecoveryCA} {
		switch _, err := os.Lstat(filepath.Join(dir, file)); {
		case err == nil:
			return exit.Usage(fmt.Errorf("%s is there already: a bundle is never overwritten, since its token may be in use",
				filepath.Join(dir, file)))
		case !errors.Is(err, fs.ErrNotExist):
			return exit.Usage(fmt.Errorf("--out: %w", err))
		}
	}
	return nil
}

// writeBundle writes the files with which a machine enrols. It writes the environment last, so a bundle with that file
// is complete.
func writeBundle(dir, name string, answer *readmodelv1.EnrollNodeResponse) error {
	profile := answer.GetProfile()
	env := envfile.Env{}
	for _, v := range [][2]string{
		{envfile.APIURL, profile.GetApiUrl()},
		{envfile.RecoveryURL, profile.GetRecoveryUrl()},
		{envfile.RecoveryBundle, bundleRecoveryCA},
		{envfile.TerminalURL, profile.GetTerminalUrl()},
		{envfile.NodeName, name},
		{envfile.Token, answer.GetToken()},
	} {
		if !envfile.Clean(v[1]) {
			return fmt.Errorf("write bundle: the value of %s cannot stand in the file", v[0])
		}
		env = env.With(v[0], v[1])
	}
	if err := env.Validate(); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	ca, recovery := profile.GetCaBundlePem(), profile.GetRecoveryCaBundlePem()
	if len(recovery) == 0 {
		recovery = ca
	}
	for _, file := range []struct {
		name string
		data []byte
	}{{bundleCA, ca}, {bundleRecoveryCA, recovery}, {bundleEnv, env.Render()}} {
		if err := pki.WriteFile(filepath.Join(dir, file.name), file.data); err != nil {
			return fmt.Errorf("write bundle: %w", err)
		}
	}
	return nil
}
