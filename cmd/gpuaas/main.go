// Command gpuaas is the control plane, its tools and its client in one binary.
//
// Data goes to stdout, everything else to stderr. exit.Codes lists the exit codes.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
