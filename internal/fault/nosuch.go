package fault

import (
	"slices"
	"strconv"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// mostNamed bounds the characters of what a request named that its refusal repeats.
const mostNamed = 80

// Named returns what a request named as a refusal repeats it: in quotes, escaped, and cut to a bounded length.
func Named(asked string) string {
	count := 0
	for at := range asked {
		if count == mostNamed {
			return strconv.Quote(asked[:at] + "…")
		}
		count++
	}
	return strconv.Quote(asked)
}

// listedBy has, by the kind of an object, the command that lists its ids and names.
var listedBy = map[string]string{
	"node": "gpuaas nodes list", "workspace": "gpuaas workspaces list", "tenant": "gpuaas tenants list",
	"task": "gpuaas tasks list", "allocation": "gpuaas allocations list", "instance": "gpuaas instances list",
	"claim": "gpuaas claims list --all", "incident": "gpuaas incidents list --all",
	"finding": "gpuaas findings list --all", "run": "gpuaas workspaces timeline WS",
}

// NoSuch returns the refusal of a request for an object that does not exist, or that the person may not see: what kind
// of object it is, as what the request named it, and the command that lists those that there are. Its text depends on
// the request alone.
func NoSuch(what, asked string, opts ...Option) *Error {
	text := "there is no such " + what
	if asked != "" {
		text = "there is no " + what + " " + Named(asked)
	}
	if list := listedBy[what]; list != "" { // before opts, which may have a remedy of their own
		opts = slices.Insert(slices.Clone(opts), 0, Remedy("use the id or the name of one that `"+list+"` shows"))
	}
	return New(commonv1.Reason_REASON_NOT_FOUND, text, opts...)
}
