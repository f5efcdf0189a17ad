package kit

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
)

// Column is one column of a table of T. One that is neither optional, wide nor free text is always there, and never
// cut.
type Column[T any] struct {
	Title string
	Drop  int  // where the table is too wide the optional column with the greatest number goes first
	Wide  bool // only in `-o wide`
	Text  bool // free text: cut instead when its turn comes, which without a number is the last
	Value func(item T) string
}

// Records prints items that are no messages of the API in the requested form; as data they are encoded by
// encoding/json.
func Records[T any](p *Program, cmd *cobra.Command, name func(T) string, columns []Column[T], items []T) error {
	// The signal that ended the command's work does not end the printing of its results; another signal does.
	ctx, stop := signal.NotifyContext(context.WithoutCancel(cmd.Context()), os.Interrupt, syscall.SIGTERM)
	defer stop()
	pr, err := p.printer(cmd)
	if err != nil {
		return err
	}
	pr.Bind(ctx)
	err = records(pr, name, columns, items)
	if err != nil && ctx.Err() != nil {
		return exit.Interrupt("interrupted")
	}
	return err
}

func records[T any](pr *output.Printer, name func(T) string, columns []Column[T], items []T) error {
	switch pr.Format {
	case output.FormatName:
		return output.Names(pr, items, name)
	case output.FormatJSONL:
		for _, item := range items {
			raw, err := json.Marshal(item)
			if err != nil {
				return fmt.Errorf("print: %w", err)
			}
			if err := pr.Document(raw); err != nil {
				return err
			}
		}
		return nil
	case output.FormatJSON, output.FormatYAML:
		if items == nil {
			items = []T{}
		}
		return pr.Document(output.Members(output.With("items", items), output.With("next_page_token", "")))
	}
	shown := make([]output.Column[T], len(columns))
	for i, c := range columns {
		shown[i] = output.Column[T]{
			Title: c.Title, Drop: c.Drop, Wide: c.Wide, Text: c.Text,
			Of: func(_ *output.Printer, item T) string { return c.Value(item) },
		}
	}
	return output.Table(pr, shown, items)
}
