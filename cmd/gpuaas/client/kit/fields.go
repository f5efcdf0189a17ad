package kit

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// flagOf has the flags of fields whose flag has another name than the field. The keys are the last one or two names of
// the field's path.
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

	"api_url":                "api",
	"recovery_url":           "recovery",
	"terminal_url":           "terminal",
	"ca_bundle_pem":          "ca-bundle",
	"recovery_ca_bundle_pem": "recovery-ca-bundle",
	"root_fingerprint":       "root",
	"kind":                   "type",
}

// argumentOf has the arguments of fields whose argument has another name than the field.
var argumentOf = map[string]string{
	"workspace": "WS", "workspace_id": "WS", "node_id": "NODE", "token_id": "TOKEN", "task_id": "TASK",
	"incident_id": "INCIDENT", "allocation": "ALLOC", "allocation_id": "ALLOC",
}

var (
	// wrongField matches the start of the mesh's message about a field that it refuses: the field's path, before the text
	// about what is wrong.
	wrongField = regexp.MustCompile(`^([a-z_]+(?:\[[^\]]*\])?(?:\.[a-z_]+(?:\[[^\]]*\])?)*): `)
	index      = regexp.MustCompile(`\[[^\]]*\]`)
)

// aboutFields are the reasons of refusals whose conditions may begin with the path of a field.
var aboutFields = []commonv1.Reason{
	commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_CONFLICT,
	commonv1.Reason_REASON_PROFILE_UNVERIFIED, commonv1.Reason_REASON_PROFILE_UNKNOWN,
}

// inFlags replaces, in a refusal that is about fields of the request, the paths of fields with the flags and the
// arguments of cmd that fill them.
func inFlags(cmd *cobra.Command, err error) error {
	e, refused := fault.As(err)
	if !refused || !slices.Contains(aboutFields, e.Reason) {
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

// flagName returns the flag or the argument for the field at a path, or nothing if cmd has none. The fields of a spec
// that was given as a file keep their paths.
func flagName(cmd *cobra.Command, path string) string {
	parts := strings.Split(index.ReplaceAllString(path, ""), ".")
	last := parts[len(parts)-1]
	tries := []string{last}
	if len(parts) > 1 {
		tries = []string{parts[len(parts)-2] + "." + last, last}
	}
	spec := cmd.Flags().Lookup("spec")
	for _, try := range tries {
		flag := cmd.Flags().Lookup(cmp.Or(flagOf[try], strings.ReplaceAll(try, "_", "-")))
		if flag == nil || flag.Name == "spec" || (spec != nil && spec.Changed && parts[0] == "spec" && !flag.Changed) {
			continue
		}
		return "--" + flag.Name
	}
	argument := cmp.Or(argumentOf[last], strings.ToUpper(last))
	if len(parts) == 1 && slices.ContainsFunc(strings.Fields(cmd.Use), func(word string) bool {
		return strings.Trim(word, "[]") == argument
	}) {
		return argument
	}
	return ""
}
