package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/drill"
)

// examples returns the examples of the commands that run or prepare something on this machine, by command path.
func examples() map[string][]string {
	out := map[string][]string{
		"gpuaas": {
			"gpuaas dev", "gpuaas status", "gpuaas nodes list",
			"gpuaas workspaces create demo2 --tenant acme --wait", "gpuaas workspaces timeline acme/demo2",
		},
		"gpuaas cluster up":      {"gpuaas cluster up", "gpuaas cluster up --replicas 3 --nodes 1"},
		"gpuaas compose prepare": {"gpuaas compose prepare --dir state --host mesh.example.org"},
		"gpuaas compose admit": {"gpuaas compose admit --database-url-file state/readmodel.url --token-file " +
			"state/person.token"},
		"gpuaas config check": {
			"gpuaas config check lifecycle.yaml", "gpuaas config check --service nodeapi agents.yaml",
		},
		"gpuaas authority export": {
			"gpuaas authority export --ca-dir /var/lib/gpuaas/ca --out step --address :9443 --name ca.example.org",
		},
		"gpuaas issuer list":      {"gpuaas issuer list --dir /var/lib/gpuaas/dev"},
		"gpuaas issuer next":      {"gpuaas issuer next --dir /var/lib/gpuaas/dev"},
		"gpuaas issuer renew":     {"gpuaas issuer renew --dir state"},
		"gpuaas issuer forget":    {"gpuaas issuer forget --dir state"},
		"gpuaas drill list":       {"gpuaas drill list", "gpuaas drill list -o wide"},
		"gpuaas migrate up":       {"gpuaas migrate up --config migrate.yaml"},
		"gpuaas migrate status":   {"gpuaas migrate status --config migrate.yaml"},
		"gpuaas migrate restored": {"gpuaas migrate restored --config migrate.yaml --reason 'restored the dump of 03:00'"},
		"gpuaas version":          {"gpuaas version", "gpuaas version -o json"},
		"gpuaas help":             {"gpuaas help workspaces create", "gpuaas help exit-codes"},
		"gpuaas completion bash":  {"gpuaas completion bash >/etc/bash_completion.d/gpuaas"},
		"gpuaas completion zsh":   {`gpuaas completion zsh >"${fpath[1]}/_gpuaas"`},
		"gpuaas completion fish":  {"gpuaas completion fish >~/.config/fish/completions/gpuaas.fish"},
		"gpuaas completion powershell": {
			"gpuaas completion powershell | Out-String | Invoke-Expression",
		},
		"gpuaas nodeapi":      {"gpuaas nodeapi --config nodeapi.yaml"},
		"gpuaas lifecycle":    {"gpuaas lifecycle --config lifecycle.yaml"},
		"gpuaas recovery":     {"gpuaas recovery --config recovery.yaml"},
		"gpuaas readmodel":    {"gpuaas readmodel --config readmodel.yaml"},
		"gpuaas bench join":   {"gpuaas bench join", "gpuaas bench join -o json"},
		"gpuaas bench cancel": {"gpuaas bench cancel", "gpuaas bench cancel -o json"},
		"gpuaas bench resume": {"gpuaas bench resume", "gpuaas bench resume -o json"},
		"gpuaas bench all":    {"gpuaas bench all", "gpuaas bench all -o json"},
		"gpuaas bench peers":  {"gpuaas bench peers", "gpuaas bench peers -o json"},
		"gpuaas bench sagas": {
			"gpuaas bench sagas", "gpuaas bench sagas -o json", "gpuaas bench sagas --finished 20000",
		},
		"gpuaas bench idle":       {"gpuaas bench idle", "gpuaas bench idle --minutes 5 -o json"},
		"gpuaas bench disconnect": {"gpuaas bench disconnect", "gpuaas bench disconnect --nodes 4 --rounds 5 -o json"},
		"gpuaas bench fence":      {"gpuaas bench fence", "gpuaas bench fence --nodes 4 --rounds 1 -o json"},
		"gpuaas bench fleet": {
			"gpuaas bench fleet --nodes 1000 --workspaces 10000", "gpuaas bench fleet --history-days 30",
			"gpuaas bench fleet --cache /var/tmp/fleets",
			"gpuaas bench fleet --nodes 100 --workspaces 1000 --sweeps", "gpuaas bench fleet --boxes 1000",
		},
		"gpuaas bench list":      {"gpuaas bench list", "gpuaas bench list --nodes 1000 --workspaces 10000"},
		"gpuaas bench lives":     {"gpuaas bench lives", "gpuaas bench lives --lives 100 --clients 2"},
		"gpuaas bench schemas":   {"gpuaas bench schemas", "gpuaas bench schemas --schemas 1000"},
		"gpuaas bench soak":      {"gpuaas bench soak", "gpuaas bench soak --minutes 15 --clients 2"},
		"gpuaas bench reconnect": {"gpuaas bench reconnect --agents 200 --rounds 1"},
		"gpuaas bench streams":   {"gpuaas bench streams --agents 500"},
		"gpuaas bench tasks":     {"gpuaas bench tasks --agents 500"},
	}
	if drills := drill.Drills(); len(drills) > 0 {
		out["gpuaas drill run"] = []string{"gpuaas drill run " + drills[0].Name, "gpuaas drill run --all --controls -o json"}
	}
	return out
}

// addExamples sets the examples of the commands. A command that only has subcommands gets the first example of each.
func addExamples(root *cobra.Command) {
	all := examples()
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		var firsts []string
		for _, sub := range cmd.Commands() {
			walk(sub)
			if first, _, _ := strings.Cut(sub.Example, "\n"); first != "" && sub.IsAvailableCommand() {
				firsts = append(firsts, first)
			}
		}
		switch lines, known := all[cmd.CommandPath()]; {
		case known:
			cmd.Example = "  " + strings.Join(lines, "\n  ")
		case cmd.HasSubCommands():
			cmd.Example = strings.Join(firsts, "\n")
		}
	}
	walk(root)
}
