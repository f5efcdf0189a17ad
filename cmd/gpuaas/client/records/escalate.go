package records

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// bundled is one file of a bundle, as its manifest has it.
type bundled struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// gap is one thing that a bundle lacks.
type gap struct {
	What string `json:"what"`
	Why  string `json:"why"`
	Next string `json:"next"`
}

// bundleReport describes the content of a bundle.
type bundleReport struct {
	out, workspaceID string
	size             int64
	files            []bundled
	missing          []gap
}

// EscalateCommand returns the command that writes a bundle about a workspace.
func EscalateCommand(p *kit.Program) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:     "escalate WS --out FILE.zip",
		Short:   "Write all that is known of a workspace into one file, to hand on for investigation",
		Example: "  gpuaas workspaces escalate acme/demo2 --out demo2.zip", Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			if out == "" {
				return exit.Usage(errors.New("--out is needed: the file to write"))
			}
			if out == "-" {
				return exit.Usage(errors.New("--out -: a bundle is written to a file, which is checked before it gets its name; " +
					"a file named - is ./-"))
			}
			file, err := claimFile(out)
			if err != nil {
				return err
			}
			report, err := escalate(ctx, s, args[0], out, file)
			if err != nil {
				_ = file.Close()
				return errors.Join(err, os.Remove(file.Name()))
			}
			return printBundle(s, report)
		}),
	}
	cmd.Flags().StringVar(&out, "out", "", "file to write; it must not be there yet (required)")
	return cmd
}

// claimFile creates a temporary file beside out that only its owner may read. It gets its name at the end, so a file of
// that name is always complete.
func claimFile(out string) (*os.File, error) {
	switch _, err := os.Lstat(out); {
	case err == nil:
		return nil, exit.Usage(fmt.Errorf("%s is there already: a bundle is never overwritten", out))
	case !errors.Is(err, fs.ErrNotExist):
		return nil, exit.Usage(fmt.Errorf("--out: %w", err))
	}
	file, err := os.CreateTemp(filepath.Dir(out), "."+filepath.Base(out)+".*") // mode 0600
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("--out: %w", err))
	}
	return file, nil
}

// escalate receives a bundle, checks it and gives it its name.
func escalate(ctx context.Context, s *kit.Session, ref, out string, file *os.File) (bundleReport, error) {
	stream, err := s.Client.Escalate.Escalate(ctx, &readmodelv1.EscalateRequest{Workspace: ref})
	if err != nil {
		return bundleReport{}, err
	}
	defer stream.Close() // read to its end
	report := bundleReport{out: out}
	for stream.Receive() {
		n, err := file.Write(stream.Msg().GetChunk())
		if report.size += int64(n); err != nil {
			return report, fmt.Errorf("write bundle: %w", err)
		}
	}
	if err := stream.Err(); err != nil {
		return report, err
	}
	if err := report.check(file); err != nil {
		return report, err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return report, fmt.Errorf("write bundle: %w", err)
	}
	// Unlike a rename, a link fails if the name exists: another process may have created the file meanwhile.
	if err := os.Link(file.Name(), out); err != nil {
		return report, fmt.Errorf("name bundle: %w", err)
	}
	if err := os.Remove(file.Name()); err != nil {
		return report, fmt.Errorf("name bundle: %w", err)
	}
	return report, nil
}

// check compares every file with the manifest, so that a truncated bundle is an error.
func (r *bundleReport) check(file *os.File) error {
	z, err := zip.NewReader(file, r.size)
	if err != nil {
		return fmt.Errorf("the bundle is no zip, or not whole: %w", err)
	}
	var manifest struct {
		WorkspaceID string    `json:"workspace_id"`
		Files       []bundled `json:"files"`
	}
	if err := entryOf(z, "manifest.json", &manifest); err != nil {
		return err
	}
	for _, f := range manifest.Files {
		raw, err := fs.ReadFile(z, f.Name)
		if err != nil {
			return fmt.Errorf("the bundle lacks %s: %w", f.Name, err)
		}
		if sum := sha256.Sum256(raw); hex.EncodeToString(sum[:]) != f.SHA256 || int64(len(raw)) != f.Size {
			return fmt.Errorf("%s in the bundle is not what its manifest says", f.Name)
		}
	}
	var missing struct {
		Items []gap `json:"items"`
	}
	if err := entryOf(z, "missing.json", &missing); err != nil {
		return err
	}
	r.workspaceID, r.files, r.missing = manifest.WorkspaceID, manifest.Files, missing.Items
	return nil
}

func entryOf(z *zip.Reader, name string, into any) error {
	raw, err := fs.ReadFile(z, name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the bundle lacks %s: %w", name, err)
	}
	if err == nil {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		return fmt.Errorf("read %s of the bundle: %w", name, err)
	}
	return nil
}

// printBundle prints what the bundle contains and what it lacks.
func printBundle(s *kit.Session, r bundleReport) error {
	if s.Format == output.FormatName {
		return s.Line(human.Clean(r.out))
	}
	if s.Structured() {
		return s.Document(output.Members(output.With("out", r.out), output.With("workspace_id", r.workspaceID),
			output.With("size", r.size), output.With("files", r.files), output.With("missing", r.missing)))
	}
	err := output.Table(s.Printer, []output.Column[bundled]{
		{Title: "FILE", Of: func(_ *output.Printer, f bundled) string { return f.Name }},
		{Title: "SIZE", Drop: 1, Of: func(_ *output.Printer, f bundled) string { return human.Bytes(f.Size) }},
		{Title: "SHA256", Wide: true, Of: func(_ *output.Printer, f bundled) string { return f.SHA256 }},
	}, r.files)
	if err != nil {
		return err
	}
	for _, g := range r.missing {
		human.Note(s.Err, "missing: %s: %s%s", human.Clean(g.What), human.Clean(g.Why),
			human.OnlyIf(g.Next != "", " ("+human.Clean(g.Next)+")"))
	}
	human.Note(s.Err, "%s, %s", r.out, human.Bytes(r.size))
	return nil
}
