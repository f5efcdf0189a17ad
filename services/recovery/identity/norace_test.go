//go:build !race

package identity_test

const slow = false
