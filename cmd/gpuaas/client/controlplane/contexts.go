package controlplane

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
)

// shownContext is a context without its secrets.
type shownContext struct {
	Current     bool   `json:"current"`
	Name        string `json:"name"`
	Server      string `json:"server"`
	TrustDomain string `json:"trust_domain"`
	CA          string `json:"ca"`
	Token       string `json:"token"`
}

// ConfigCommand returns the commands about contexts.
func ConfigCommand(p *kit.Program) *cobra.Command {
	show := &cobra.Command{
		Use: "view", Short: "Show the contexts without their secrets", Example: "  gpuaas config view -o json",
		Args: kit.Args(),
		RunE: p.Local(func(_ context.Context, pr *output.Printer, _ []string) error {
			path, file, err := contexts.Read()
			if err != nil {
				return exit.Usage(err)
			}
			items := make([]shownContext, 0, len(file.Contexts))
			for _, c := range file.Contexts {
				items = append(items, shownContext{
					Current: c.Name == file.Current, Name: c.Name, Server: c.Server,
					TrustDomain: cmp.Or(c.TrustDomain, contexts.DefaultTrustDomain),
					CA:          cmp.Or(c.CAFile, human.OnlyIf(c.CAPEM != "", "in the context")),
					Token:       cmp.Or(c.TokenFile, human.OnlyIf(c.Token != "", "[hidden]")),
				})
			}
			switch {
			case pr.Format == output.FormatName:
				return output.Names(pr, items, func(c shownContext) string { return c.Name })
			case pr.Format == output.FormatJSONL:
				for _, item := range items {
					raw, err := json.Marshal(item)
					if err == nil {
						err = pr.Document(raw)
					}
					if err != nil {
						return fmt.Errorf("print context: %w", err)
					}
				}
				return nil
			case pr.Structured():
				return pr.Document(output.Members(output.With("items", items), output.With("next_page_token", ""),
					output.With("current", file.Current), output.With("path", path)))
			}
			return output.Table(pr, contextColumns, items)
		}),
	}
	use := &cobra.Command{
		Use: "use-context NAME", Short: "Choose the mesh that commands talk to", Example: "  gpuaas config use-context dev",
		Args:              kit.Args("NAME"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteContexts),
		RunE: p.Local(func(_ context.Context, pr *output.Printer, args []string) error {
			path, file, err := contexts.Read()
			if err != nil {
				return exit.Usage(err)
			}
			if _, err := file.Get(args[0]); err != nil {
				return kit.NoContext(args[0])
			}
			if err := contexts.Use(path, args[0]); err != nil {
				return err
			}
			human.Note(pr.Err, "commands go to the context %q now", args[0])
			return nil
		}),
	}
	return kit.Group("config", "Contexts: which mesh to talk to, and as whom", nil, show, use)
}

var contextColumns = []output.Column[shownContext]{
	{Title: "CURRENT", Of: func(_ *output.Printer, c shownContext) string { return human.OnlyIf(c.Current, "*") }},
	{Title: "NAME", Of: func(_ *output.Printer, c shownContext) string { return c.Name }},
	{Title: "SERVER", Drop: 1, Of: func(_ *output.Printer, c shownContext) string { return c.Server }},
	{Title: "TRUST DOMAIN", Drop: 2, Of: func(_ *output.Printer, c shownContext) string { return c.TrustDomain }},
	{Title: "AUTHORITY", Wide: true, Of: func(_ *output.Printer, c shownContext) string { return c.CA }},
	{Title: "TOKEN", Wide: true, Of: func(_ *output.Printer, c shownContext) string { return c.Token }},
}
