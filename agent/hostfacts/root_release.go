//go:build release

package hostfacts

// RootFromEnvironment returns no root in release builds.
func RootFromEnvironment() (string, error) { return "", nil }
