package procfs

import (
	"bytes"
	"os"
	"path/filepath"
)

// Having returns which of the values of an environment variable some process on this host was started with. Processes
// that may not be read, or end meanwhile, are left out.
func Having(name string, values map[string]bool) map[string]bool {
	out := map[string]bool{}
	files, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is good
	prefix := []byte(name + "=")
	for _, file := range files {
		environ, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for variable := range bytes.SplitSeq(environ, []byte{0}) {
			if value, ok := bytes.CutPrefix(variable, prefix); ok && values[string(value)] {
				out[string(value)] = true
			}
		}
	}
	return out
}
