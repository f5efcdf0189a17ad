package workspace

import "github.com/gpuaas/mesh/internal/fault"

// asFault returns the refusal in err, or an internal one.
func asFault(err error) *fault.Error { return fault.From(err) }
