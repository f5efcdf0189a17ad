//go:build !release

package wallclock

import (
	"fmt"
	"os"
	"sync"
	"time"
)

// variable is the name of the variable in the environment.
const variable = "GPUAAS_CLOCK_OFFSET"

// Offset returns by how much the process's clock is ahead of its host's, as GPUAAS_CLOCK_OFFSET had it at the first
// call.
var Offset = sync.OnceValues(func() (time.Duration, error) { return parse(os.Getenv(variable)) })

func parse(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", variable, err)
	}
	return d, nil
}
