package storage

import (
	"path/filepath"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// relative returns the relative path of a storage, which always has exactly two elements.
func relative(workspaceID, name string) (string, error) {
	if !validWorkspace(workspaceID) || !validName(name) {
		return "", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
			"the workspace's id or the name of the storage is malformed")
	}
	return filepath.Join(workspaceID, name), nil
}

func validWorkspace(s string) bool {
	return len(s) == 36 && !strings.ContainsFunc(s,
		func(c rune) bool { return (c < 'a' || c > 'f') && (c < '0' || c > '9') && c != '-' })
}

func validName(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' })
}
