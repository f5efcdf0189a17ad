//go:build !release

package hostfacts

import (
	"fmt"
	"os"
	"path/filepath"
)

// RootFromEnvironment reads GPUAAS_FACTS_ROOT, with which a drill gives an agent the facts of another host.
func RootFromEnvironment() (string, error) {
	root := os.Getenv("GPUAAS_FACTS_ROOT")
	if root == "" {
		return "", nil
	}
	if info, err := os.Stat(root); !filepath.IsAbs(root) || err != nil || !info.IsDir() {
		return "", fmt.Errorf("GPUAAS_FACTS_ROOT: %q is not the absolute path of a directory", root)
	}
	return root, nil
}
