package testkit

import "os"

// EnvLong names the variable that makes tests repeat their checks as often as `make test-long` requires.
const EnvLong = "GPUAAS_TEST_LONG"

// Repeat returns how often, or for how long, a test repeats its checks: short in a run for each change, long in `make
// test-long`. Both check the same.
func Repeat[T any](short, long T) T {
	if os.Getenv(EnvLong) == "" {
		return short
	}
	return long
}
