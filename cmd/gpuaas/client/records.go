package client

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
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
	pr.bind(ctx)
	err = records(pr, name, columns, items)
	if err != nil && ctx.Err() != nil {
		return interrupted("interrupted")
	}
	return err
}

func records[T any](pr *printer, name func(T) string, columns []Column[T], items []T) error {
	switch pr.format {
	case formatName:
		for _, item := range items {
			if err := pr.line(clean(name(item))); err != nil {
				return err
			}
		}
		return nil
	case formatJSONL:
		for _, item := range items {
			raw, err := json.Marshal(item)
			if err != nil {
				return fmt.Errorf("print: %w", err)
			}
			if err := pr.document(raw); err != nil {
				return err
			}
		}
		return nil
	case formatJSON, formatYAML:
		if items == nil {
			items = []T{}
		}
		return pr.document(members(with("items", items), with("next_page_token", "")))
	}
	shown := make([]column[T], len(columns))
	for i, c := range columns {
		shown[i] = column[T]{
			title: c.Title, drop: c.Drop, wide: c.Wide, text: c.Text,
			of: func(_ *printer, item T) string { return c.Value(item) },
		}
	}
	return table(pr, shown, items)
}
