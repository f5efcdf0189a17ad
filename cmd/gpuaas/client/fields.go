package client

import (
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// flagOf names the flag of a field whose flag is not called as the field is. Fields are named by the last one or two names of their path.
var flagOf = map[string]string{
	"expires_in":     "expires",
	"roles":          "role",
	"page_size":      "limit",
	"run_id":         "run",
	"workspace_id":   "workspace",
	"node_id":        "node",
	"storage_bytes":  "storage",
	"workloads.name": "workload",
	"workloads":      "command",
	"args":           "arg",
	"ports":          "port",
	"http_path":      "ready-path",
	"ack_orphans":    "ack-orphan",
}

var (
	// wrongField is what the mesh says of a field that it refuses: its path, and what is wrong with it.
	wrongField = regexp.MustCompile(`^([a-z_]+(?:\[[^\]]*\])?(?:\.[a-z_]+(?:\[[^\]]*\])?)*): `)
	index      = regexp.MustCompile(`\[[^\]]*\]`)
)

// inFlags names in the refusal of a bad request the flags and the arguments of cmd in place of the fields that they fill.
func inFlags(cmd *cobra.Command, err error) error {
	e, refused := fault.As(err)
	if !refused || e.Reason != commonv1.Reason_REASON_INVALID_ARGUMENT {
		return err
	}
	for i, text := range e.Unmet {
		if found := wrongField.FindStringSubmatch(text); found != nil {
			if name := flagName(cmd, found[1]); name != "" {
				e.Unmet[i] = name + text[len(found[1]):]
			}
		}
	}
	return err
}

// flagName returns what a person types for the field at a path, or nothing if cmd has no such thing. A spec that was given as a file keeps its fields.
func flagName(cmd *cobra.Command, path string) string {
	parts := strings.Split(index.ReplaceAllString(path, ""), ".")
	last := parts[len(parts)-1]
	tries := []string{last}
	if len(parts) > 1 {
		tries = []string{parts[len(parts)-2] + "." + last, last}
	}
	spec := cmd.Flags().Lookup("spec")
	for _, try := range tries {
		flag := cmd.Flags().Lookup(or(flagOf[try], strings.ReplaceAll(try, "_", "-")))
		if flag == nil || flag.Name == "spec" || (spec != nil && spec.Changed && parts[0] == "spec" && !flag.Changed) {
			continue
		}
		return "--" + flag.Name
	}
	if argument := strings.ToUpper(last); len(parts) == 1 && slices.Contains(strings.Fields(cmd.Use), argument) {
		return argument
	}
	return ""
}
