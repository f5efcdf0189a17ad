package identity

import (
	"path/filepath"

	"github.com/gpuaas/mesh/agent/identity/envfile"
)

// RecoveryBundlePath returns the path of the pinned trust for enrolment: the file that the variable names (relative to
// etc), else the default file if it is there, else the bundle for the node API.
func (s *Store) RecoveryBundlePath() string {
	if path := s.Env().Get(envfile.RecoveryBundle); path != "" {
		if filepath.IsAbs(path) {
			return path
		}
		return filepath.Join(s.dirs.Etc, path)
	}
	if path := s.path(fileRecoveryBundle); exists(path) {
		return path
	}
	return s.path(fileBundle)
}

// BundlePath returns the path of the trust for the node API.
func (s *Store) BundlePath() string { return s.path(fileBundle) }

// BundleFile returns what BundlePath does for a store whose etc directory is given.
func BundleFile(etc string) string {
	return (&Store{dirs: Dirs{Etc: etc}}).path(fileBundle)
}
