//go:build race

package judge_test

// slow leaves the widest searches to builds without the race detector, which finds nothing in pure functions and takes
// ten times as long.
const slow = true
