package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// mostFlaky is how many failed tests may be run once more. With more of them the run has failed: if three tests of a
// tree fail now and then, its tests prove nothing.
const mostFlaky = 2

// final are the texts that mark a failure that a second run would only hide: a data race, a sequence that a random seed
// found, a process that died, a server that could not be stopped.
var final = []string{
	"DATA RACE", "race detected", "[rapid] failed", "GPUAAS_MODEL_SEED=", "panic:",
	"stop test postgres",
}

func isFinal(output []string) bool {
	return slices.ContainsFunc(output, func(line string) bool {
		return slices.ContainsFunc(final, func(mark string) bool { return strings.Contains(line, mark) })
	})
}

// failedTest is a top-level test that failed, with the output of it and of the tests below it.
type failedTest struct {
	testKey

	output []string
}

// again runs failed tests once more, each alone.
type again struct {
	command []string // go test -json with its flags, and what it runs under
	logs    string   // directory of the output of the first failure
}

// run gives the failed tests of a report their second run, and removes those that pass then from its failures. They are
// listed as flaky, with the file that has the output of their first run.
func (a again) run(r *report) {
	failed, ok := r.retriable()
	if !ok || len(a.command) == 0 {
		return
	}
	for _, test := range failed {
		fmt.Fprintf(r.out, "\nonce more, alone: %s.%s\n", test.pkg, test.test)
		log, err := a.keep(test)
		if err == nil {
			err = a.passes(r.out, r.skipsFail, test)
		}
		if err != nil {
			fmt.Fprintf(r.out, "failed again: %v\n", err)
			continue
		}
		r.excuse(test.testKey, fmt.Sprintf("%s.%s (passed alone; first output: %s)", test.pkg, test.test, log))
	}
}

// keep writes the output of a failure to a file and returns its path.
func (a again) keep(test failedTest) (string, error) {
	if err := os.MkdirAll(a.logs, 0o750); err != nil {
		return "", err
	}
	path := filepath.Join(a.logs, strings.ReplaceAll(test.pkg, "/", "_")+"."+test.test+".log")
	return path, os.WriteFile(path, []byte(strings.Join(test.output, "")), 0o600)
}

func (a again) passes(out io.Writer, skipsFail bool, test failedTest) error {
	args := append(slices.Clone(a.command[1:]), "-count=1", "-run", "^"+test.test+"$", test.pkg)
	//nolint:noctx // the command is the caller's, and go test has a timeout
	cmd := exec.Command(a.command[0], args...)
	var events bytes.Buffer
	cmd.Stdout, cmd.Stderr = &events, out
	status := cmd.Run()
	second := newReport(out, skipsFail)
	if err := second.read(&events); err != nil {
		return err
	}
	if line := second.finish(); second.failed > 0 || second.passed == 0 {
		return errors.New(line)
	}
	return status
}

// retriable returns the failed tests if each failure of the run may be tried once more, and there are few.
func (r *report) retriable() ([]failedTest, bool) {
	if r.died || len(r.skipped) > 0 && r.skipsFail || len(r.again) > mostFlaky {
		return nil, false
	}
	for _, test := range r.again {
		if isFinal(test.output) {
			return nil, false
		}
	}
	return r.again, true
}

// excuse counts a failed test, and the tests below it, as passed, and lists it as flaky.
func (r *report) excuse(key testKey, line string) {
	name := key.pkg + "." + key.test
	r.failures = slices.DeleteFunc(r.failures, func(failure string) bool {
		if failure != name && !strings.HasPrefix(failure, name+"/") {
			return false
		}
		r.failed--
		r.passed++
		return true
	})
	r.flaky = append(r.flaky, line)
}
