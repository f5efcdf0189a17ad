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
		"gpuaas cluster up":       {"gpuaas cluster up", "gpuaas cluster up --replicas 3 --nodes 1"},
		"gpuaas compose prepare":  {"gpuaas compose prepare --dir state --host mesh.example.org"},
		"gpuaas compose admit":    {"gpuaas compose admit --database-url-file state/readmodel.url --token-file state/person.token"},
		"gpuaas config check":     {"gpuaas config check lifecycle.yaml", "gpuaas config check --service nodeapi agents.yaml"},
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
	}
	for _, service := range []string{"nodeapi", "lifecycle", "recovery", "readmodel"} {
		out["gpuaas "+service] = []string{"gpuaas " + service + " --config " + service + ".yaml"}
	}
	for _, bench := range []string{"sagas", "join", "cancel", "resume", "all"} {
		out["gpuaas bench "+bench] = []string{"gpuaas bench " + bench, "gpuaas bench " + bench + " -o json"}
	}
	out["gpuaas bench sagas"] = append(out["gpuaas bench sagas"], "gpuaas bench sagas --finished 20000")
	out["gpuaas bench idle"] = []string{"gpuaas bench idle", "gpuaas bench idle --minutes 5 -o json"}
	out["gpuaas bench fence"] = []string{"gpuaas bench fence", "gpuaas bench fence --nodes 4 --rounds 1 -o json"}
	out["gpuaas bench fleet"] = []string{
		"gpuaas bench fleet --nodes 1000 --workspaces 10000", "gpuaas bench fleet --history-days 30",
		"gpuaas bench fleet --cache /var/tmp/fleets",
		"gpuaas bench fleet --nodes 100 --workspaces 1000 --sweeps", "gpuaas bench fleet --boxes 1000",
	}
	out["gpuaas bench list"] = []string{"gpuaas bench list", "gpuaas bench list --nodes 1000 --workspaces 10000"}
	out["gpuaas bench lives"] = []string{"gpuaas bench lives", "gpuaas bench lives --lives 100 --clients 2"}
	out["gpuaas bench schemas"] = []string{"gpuaas bench schemas", "gpuaas bench schemas --schemas 1000"}
	out["gpuaas bench soak"] = []string{"gpuaas bench soak", "gpuaas bench soak --minutes 15 --clients 2"}
	out["gpuaas bench peers"] = []string{"gpuaas bench peers", "gpuaas bench peers -o json"}
	for _, bench := range []string{"streams", "tasks"} {
		out["gpuaas bench "+bench] = []string{"gpuaas bench " + bench + " --agents 500"}
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
