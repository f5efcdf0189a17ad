package testkit

import "os"

// EnvLong names the variable that makes tests repeat what they claim as often as `make test-long` asks for.
const EnvLong = "GPUAAS_TEST_LONG"

// Repeat returns how often, or for how long, a test repeats what it claims: short in a run for each change, long in `make test-long`. Both hold the same.
func Repeat[T any](short, long T) T {
	if os.Getenv(EnvLong) == "" {
		return short
	}
	return long
}
