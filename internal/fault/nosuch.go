package fault

import (
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

// NoSuch returns the refusal of a request for an object that does not exist, or that the person may not see: what kind
// of object it is, and as what the request named it. Its text depends on the request alone.
func NoSuch(what, asked string, opts ...Option) *Error {
	text := "there is no such " + what
	if asked != "" {
		text = "there is no " + what + " " + Named(asked)
	}
	return New(commonv1.Reason_REASON_NOT_FOUND, text, opts...)
}
