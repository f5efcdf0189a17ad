package nodes

import (
	"cmp"
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

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// BundleView is how it is printed that a bundle was issued; it has neither the archive nor the token.
var BundleView = output.View[*readmodelv1.IssueBundleResponse]{
	Name: (*readmodelv1.IssueBundleResponse).GetNodeId,
	Columns: []output.Column[*readmodelv1.IssueBundleResponse]{
		{Title: "NODE", ID: true, Path: "node_name|node_id"},
		{Title: "TOKEN", ID: true, Drop: 1, Path: "token_id"},
		{Title: "EXPIRES", Path: "expires_at"},
		{Title: "PROFILE", Path: "profile"},
		{Title: "DIGEST", Path: "digest"},
	},
}

func bundleCommand(p *kit.Program) *cobra.Command {
	var (
		reason, out, key string
		validFor         time.Duration
	)
	cmd := &cobra.Command{
		Use:   "bundle NODE --reason TEXT [--out FILE|DIR]",
		Short: "Issue a bundle that brings a node that exists back: endpoints, trust and a fresh token",
		Long: "Issue a bundle for a machine or an instance that is a node already: one signed archive with the endpoints\n" +
			"and the trust of its profile and a token for this node alone, which is good once. Nothing changes for the node\n" +
			"until its host uses the token. Earlier bundles of the node that were not used are revoked.\n" +
			"On the host, stop the agent, run `gpuaas-node-agent enroll --bundle FILE --digest DIGEST`, and start it again:\n" +
			"it takes the bundle as a whole or not at all, and keeps what it replaces. A host that still has its join state\n" +
			"goes on as the same node instance. A node that is on hold, quarantined, fenced or retired is refused.\n" +
			"The archive holds the token: keep it as secret as a key. Needs the role operator.",
		Example: "  gpuaas nodes bundle node-1 --reason 'its disk was lost' --out node-1" + bundle.Extension,
		Args:    kit.Args("NODE"), ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
	}
	cmd.RunE = p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
		if cmd.Flags().Changed("valid-for") && validFor <= 0 {
			return exit.Usage(errors.New("--valid-for: between 1s and 24h"))
		}
		if out == "-" {
			return exit.Usage(errors.New("--out -: an archive is written to a file, which is checked first; a file named - is " +
				"./-"))
		}
		id, err := s.ID(ctx, kit.KindNode, args[0])
		if err != nil {
			return err
		}
		out := archivePath(out, filepath.Base(filepath.Clean(args[0]))+bundle.Extension)
		// The file is claimed before the token exists, because a token that cannot be written is lost.
		if err := claimFile(out); err != nil {
			return err
		}
		req := &readmodelv1.IssueBundleRequest{NodeId: id, Reason: reason, IdempotencyKey: key}
		if validFor > 0 {
			req.ValidFor = durationpb.New(validFor)
		}
		answer, err := s.Client.Bundles.IssueBundle(ctx, req)
		if err == nil {
			err = writeArchive(out, answer)
		}
		if err != nil {
			return errors.Join(err, os.Remove(out)) // it is empty
		}
		shown, _ := proto.Clone(answer).(*readmodelv1.IssueBundleResponse)
		shown.Archive = nil
		if err := output.One(s.Printer, BundleView, shown, output.With("out", out)); err != nil {
			return err
		}
		human.Note(s.Err, "the bundle is in %s; copy it to the host, stop the agent there, and run:\n"+
			"  gpuaas-node-agent enroll --bundle %s --digest %s", out, filepath.Base(out), answer.GetDigest())
		return nil
	})
	flags := cmd.Flags()
	flags.StringVar(&out, "out", "", "file to write the archive to, which must not exist, or a directory that does "+
		"(default: NODE"+bundle.Extension+")")
	flags.DurationVar(&validFor, "valid-for", 0, "how long the token is good, at most 24h (default 1h)")
	flags.StringVar(&key, "idempotency-key", "", "the same key answers the same token with a new secret")
	kit.ReasonFlag(cmd, &reason, true)
	return cmd
}

// archivePath returns the file that --out names: one of this name in a directory that exists, or in the present one.
func archivePath(out, name string) string {
	if info, err := os.Stat(out); err == nil && info.IsDir() {
		return filepath.Join(out, name)
	}
	return cmp.Or(out, name)
}

// claimFile makes an empty file for an archive, which only its owner can read.
func claimFile(path string) error {
	const mode = 0o600
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if errors.Is(err, fs.ErrExist) {
		return exit.Usage(fmt.Errorf("--out: %s is there already, and a bundle is never overwritten, since its token may "+
			"be in use: name another file, or remove this one", path))
	}
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return exit.Usage(fmt.Errorf("--out: %w", err))
	}
	return nil
}

// writeArchive replaces the empty file by an archive that is whole and has the digest that came with it.
func writeArchive(path string, answer *readmodelv1.IssueBundleResponse) error {
	read, err := bundle.Read(answer.GetArchive())
	if err == nil {
		err = read.CheckDigest(answer.GetDigest())
	}
	if err != nil {
		text := err.Error()
		if f, ok := fault.As(err); ok {
			text = f.Public
		}
		return fmt.Errorf("write bundle: the control plane's answer: %s", text)
	}
	return pki.WriteFile(path, answer.GetArchive())
}
