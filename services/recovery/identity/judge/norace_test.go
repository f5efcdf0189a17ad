//go:build !race

package judge_test

const slow = false
