// Command testreport reads the output of `go test -json` on its standard input and prints the part that a person needs:
// the output of the failed tests, one line for each package, and a last line "N passed, N failed".
//
// It owns the verdict on skipped tests: with -skips-fail each one is a failure, because a test that did not run proves
// nothing. With -again up to two failed tests are run once more, alone; those that pass then are listed as flaky and do
// not fail the run. A failure that a second run would hide is not tried again: a data race, a sequence that a random
// seed found, a process that died, a skip. The exit code is 0 if nothing failed, 3 if everything that failed passed the
// second time, else 1.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// exitFlaky is the exit code of a run in which all that failed passed the second time: the exit code of go test, which
// saw the first, is void then.
const exitFlaky = 3

func main() {
	summary := flag.String("summary", "", "a file that gets the last line too")
	skipsFail := flag.Bool("skips-fail", false, "count each skipped test as a failure")
	command := flag.String("again", "",
		"the command, without packages, that runs a failed test once more; empty: none does")
	logs := flag.String("logs", "bin/flaky", "directory of the output of tests that failed first")
	flag.Parse()
	os.Exit(run(os.Stdin, os.Stdout, *summary, *skipsFail, again{command: strings.Fields(*command), logs: *logs}))
}

func run(in io.Reader, out io.Writer, summary string, skipsFail bool, more again) int {
	r := newReport(out, skipsFail)
	if err := r.read(in); err != nil {
		fmt.Fprintf(out, "read test output: %v\n", err)
		r.failed++
		r.died = true
	}
	r.close()
	more.run(r)
	line := r.finish()
	fmt.Fprintln(out, line)
	if summary != "" {
		if err := os.WriteFile(summary, []byte(line+"\n"), 0o600); err != nil {
			fmt.Fprintf(out, "write summary: %v\n", err)
			return 1
		}
	}
	switch {
	case r.failed > 0:
		return 1
	case len(r.flaky) > 0:
		return exitFlaky
	}
	return 0
}
