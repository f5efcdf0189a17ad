//go:build !release

package wallclock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// variable is the name of the variable in the environment.
const variable = "GPUAAS_CLOCK_OFFSET"

// Shift returns what tells by how much the process's clock is ahead of its host's at each call. If the variable is
// @FILE that is what the file has then, so that a drill may move the clock of a process that runs; a file that cannot
// be read leaves the clock as it was.
func Shift() func() time.Duration {
	path, moving := strings.CutPrefix(os.Getenv(variable), "@")
	fixed, _ := Offset() // the process refuses to start
	if !moving {
		return func() time.Duration { return fixed }
	}
	var last atomic.Int64
	return func() time.Duration {
		if d, err := fromFile(path); err == nil {
			last.Store(int64(d))
		}
		return time.Duration(last.Load())
	}
}

// Offset returns by how much the process's clock is ahead of its host's, as GPUAAS_CLOCK_OFFSET had it at the first
// call: a Go duration, or @FILE for a file that contains one.
var Offset = sync.OnceValues(func() (time.Duration, error) { return parse(os.Getenv(variable)) })

func parse(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	if path, ok := strings.CutPrefix(text, "@"); ok {
		return fromFile(path)
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", variable, err)
	}
	return d, nil
}

func fromFile(path string) (time.Duration, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", variable, err)
	}
	return parse(strings.TrimSpace(strings.TrimPrefix(string(data), "@")))
}
