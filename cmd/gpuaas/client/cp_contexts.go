package client

import (
	"cmp"
	"context"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/spf13/cobra"
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

func configCommand(p *Program) *cobra.Command {
	show := &cobra.Command{
		Use: "view", Short: "Show the contexts without their secrets", Example: "  gpuaas config view -o json", Args: args(),
		RunE: p.local(func(_ context.Context, pr *printer, _ []string) error {
			path, err := contexts.DefaultPath()
			if err != nil {
				return Usage(err)
			}
			file, err := contexts.Load(path)
			if err != nil {
				return Usage(err)
			}
			items := make([]shownContext, 0, len(file.Contexts))
			for _, c := range file.Contexts {
				items = append(items, shownContext{
					Current: c.Name == file.Current, Name: c.Name, Server: c.Server,
					TrustDomain: cmp.Or(c.TrustDomain, contexts.DefaultTrustDomain),
					CA:          cmp.Or(c.CAFile, onlyIf(c.CAPEM != "", "in the context")),
					Token:       cmp.Or(c.TokenFile, onlyIf(c.Token != "", "[hidden]")),
				})
			}
			switch {
			case pr.format == formatName:
				for _, c := range items {
					if err := pr.line(clean(c.Name)); err != nil {
						return err
					}
				}
				return nil
			case pr.structured():
				return pr.document(members(with("items", items), with("next_page_token", ""), with("current", file.Current),
					with("path", path)))
			}
			return table(pr, contextColumns, items)
		}),
	}
	use := &cobra.Command{
		Use: "use-context NAME", Short: "Choose the mesh that commands talk to", Example: "  gpuaas config use-context dev",
		Args:              args("NAME"),
		ValidArgsFunction: onlyFirst(p.completeContexts),
		RunE: p.local(func(_ context.Context, pr *printer, args []string) error {
			path, err := contexts.DefaultPath()
			if err != nil {
				return Usage(err)
			}
			file, err := contexts.Load(path)
			if err != nil {
				return Usage(err)
			}
			if _, err := file.Get(args[0]); err != nil {
				return noContext(args[0])
			}
			if err := contexts.Use(path, args[0]); err != nil {
				return err
			}
			note(pr.err, "commands go to the context %q now", args[0])
			return nil
		}),
	}
	return group("config", "Contexts: which mesh to talk to, and as whom", nil, show, use)
}

var contextColumns = []column[shownContext]{
	{title: "CURRENT", of: func(_ *printer, c shownContext) string { return onlyIf(c.Current, "*") }},
	{title: "NAME", of: func(_ *printer, c shownContext) string { return c.Name }},
	{title: "SERVER", drop: 1, of: func(_ *printer, c shownContext) string { return c.Server }},
	{title: "TRUST DOMAIN", drop: 2, of: func(_ *printer, c shownContext) string { return c.TrustDomain }},
	{title: "AUTHORITY", wide: true, of: func(_ *printer, c shownContext) string { return c.CA }},
	{title: "TOKEN", wide: true, of: func(_ *printer, c shownContext) string { return c.Token }},
}
