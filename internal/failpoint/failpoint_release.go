//go:build release

// Package failpoint is empty in release builds.
package failpoint

// Hit does nothing in release builds.
func Hit(string) error { return nil }
