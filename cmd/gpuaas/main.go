// Command gpuaas is the control plane, its tools and its client in one binary.
//
// Data goes to stdout, everything else to stderr. Exit codes: 0 ok · 1 error · 2 usage · 3 not found · 4 not authenticated or not allowed · 5 refused
// precondition · 6 timed out waiting · 7 a drill or bench out of budget.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
