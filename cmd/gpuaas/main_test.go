package main

import (
	"context"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"gpuaas": func() { os.Exit(execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) },
	})
}

func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
		},
	})
}

// exits runs a command line and demands its exit code: `exits 2 gpuaas nonsense`. Its output is available to stdout and
// stderr as after exec.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM [ARG...]")
	}
	const script = `"$@"; echo "exit code $?"; true`
	ts.Check(ts.Exec("sh", append([]string{"-c", script, "sh"}, args[1:]...)...))
	out := ts.ReadFile("stdout")
	ts.Logf("%s", out)
	if want := "exit code " + args[0] + "\n"; len(out) < len(want) || out[len(out)-len(want):] != want {
		ts.Fatalf("want exit code %s, output %q", args[0], out)
	}
}
