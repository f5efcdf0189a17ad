package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// event is one line of `go test -json`.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output and build-fail
	Test        string
	Elapsed     float64 // seconds
	Output      string
	FailedBuild string // on a package's fail event: it did not build
}

type testKey struct{ pkg, test string }

// report gathers events. Output is kept per test until the test ends and then dropped or printed, so that memory grows
// with the running tests, not with the finished ones.
type report struct {
	out       io.Writer
	skipsFail bool

	pending map[testKey][]string
	builds  map[string][]string
	// failedTests counts failures below each package: a package that fails
	// without one died by itself (a panic, a data race at exit, a timeout).
	failedTests map[string]int
	ran         map[string]int
	running     map[testKey]bool
	skipped     []string
	failures    []string
	passed      int
	failed      int

	below map[testKey][]string // output of failed tests, by the top-level test that has them
	again []failedTest
	died  bool // something other than a test failed: a second run of tests proves nothing
	flaky []string
	slow  []slowTest
}

// slowTest is a test that took longer than slowAfter.
type slowTest struct {
	name    string
	seconds float64
}

const (
	slowAfter = 10.0 // seconds
	mostSlow  = 25   // lines of the list
)

func newReport(out io.Writer, skipsFail bool) *report {
	return &report{
		out:         out,
		skipsFail:   skipsFail,
		pending:     map[testKey][]string{},
		builds:      map[string][]string{},
		failedTests: map[string]int{},
		ran:         map[string]int{},
		running:     map[testKey]bool{},
		below:       map[testKey][]string{},
	}
}

// read consumes events until the input ends. A line that is no event (of the
// wrapper, or of the go command itself) is passed through.
func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				r.add(e)
			} else {
				fmt.Fprint(r.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) add(e event) {
	key := testKey{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		r.builds[e.ImportPath] = append(r.builds[e.ImportPath], e.Output)
	case "run":
		r.running[key] = true
	case "output":
		r.pending[key] = append(r.pending[key], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.endPackage(e)
		} else {
			r.endTest(e, key)
		}
	}
}

func (r *report) endTest(e event, key testKey) {
	output := r.pending[key]
	delete(r.pending, key)
	delete(r.running, key)
	r.ran[e.Package]++
	name := e.Package + "." + e.Test
	if e.Elapsed >= slowAfter && !strings.Contains(e.Test, "/") {
		r.slow = append(r.slow, slowTest{name, e.Elapsed})
	}
	switch e.Action {
	case "pass":
		r.passed++
	case "skip":
		r.skipped = append(r.skipped, name)
		if r.skipsFail {
			r.fail(name+" (skipped)", e.Package, output)
		}
	case "fail":
		r.fail(name, e.Package, output)
		top, _, below := strings.Cut(e.Test, "/")
		whole := testKey{e.Package, top}
		r.below[whole] = append(r.below[whole], output...)
		if !below {
			r.again = append(r.again, failedTest{whole, r.below[whole]})
			delete(r.below, whole)
		}
	}
}

func (r *report) endPackage(e event) {
	key := testKey{e.Package, ""}
	output := r.pending[key]
	delete(r.pending, key)
	switch {
	case e.Action == "fail" && e.FailedBuild != "":
		r.died = true
		r.fail(e.Package+" (does not build)", e.Package, append(r.builds[e.FailedBuild], output...))
	case e.Action == "fail" && r.failedTests[e.Package] == 0:
		r.died = true
		// A test that ran when the process died has the reason in its output.
		for k := range r.running {
			if k.pkg == e.Package {
				output = append(output, r.pending[k]...)
				delete(r.pending, k)
				delete(r.running, k)
			}
		}
		r.fail(e.Package, e.Package, output)
	case e.Action == "fail" && isFinal(output):
		// Beside the tests that failed, something failed that belongs to none of them.
		r.died = true
		r.fail(e.Package+" (outside of its tests)", e.Package, output)
	}
	if r.ran[e.Package] == 0 && e.Action != "fail" {
		return // no test files, or none that match
	}
	verdict := "ok  "
	if r.failedTests[e.Package] > 0 {
		verdict = "FAIL"
	}
	fmt.Fprintf(r.out, "%s  %-60s %7.1fs\n", verdict, e.Package, e.Elapsed)
}

func (r *report) fail(name, pkg string, output []string) {
	r.failed++
	r.failedTests[pkg]++
	r.failures = append(r.failures, name)
	fmt.Fprintf(r.out, "\n--- FAIL %s\n", name)
	for _, line := range output {
		if noise(line) {
			continue
		}
		fmt.Fprint(r.out, "    "+line)
	}
}

// noise reports whether the go command printed the line around a test's own output.
func noise(line string) bool {
	trimmed := strings.TrimLeft(line, " ")
	return slices.ContainsFunc([]string{"=== RUN", "=== PAUSE", "=== CONT", "=== NAME"}, func(prefix string) bool {
		return strings.HasPrefix(trimmed, prefix)
	})
}

// close counts the tests that never ended as failures. A run in which nothing ended is a failure: the go command
// stopped before the first test.
func (r *report) close() {
	for key := range r.running {
		r.died = true
		if r.failedTests[key.pkg] == 0 {
			r.fail(key.pkg+"."+key.test+" (never ended)", key.pkg, r.pending[key])
		}
	}
	if r.passed == 0 && r.failed == 0 && len(r.skipped) == 0 {
		r.failures = append(r.failures, "no test ran")
		r.failed++
		r.died = true
	}
}

// finish lists the failures once more where they can be seen, and returns the last line.
func (r *report) finish() string {
	for pkg, output := range r.builds {
		if r.failed > 0 && r.failedTests[pkg] == 0 && r.passed == 0 {
			fmt.Fprintf(r.out, "\n--- build of %s\n%s", pkg, strings.Join(output, ""))
		}
	}
	if len(r.slow) > 0 {
		slices.SortStableFunc(r.slow, func(a, b slowTest) int { return cmp.Compare(b.seconds, a.seconds) })
		fmt.Fprintf(r.out, "\nslowest (%d took more than %.0f s):\n", len(r.slow), slowAfter)
		for _, t := range r.slow[:min(len(r.slow), mostSlow)] {
			fmt.Fprintf(r.out, "  %7.1fs  %s\n", t.seconds, t.name)
		}
	}
	if len(r.failures) > 0 {
		slices.Sort(r.failures)
		fmt.Fprintln(r.out, "\nfailed:")
		for _, name := range r.failures {
			fmt.Fprintln(r.out, "  "+name)
		}
	}
	if len(r.flaky) > 0 {
		fmt.Fprintln(r.out, "\nflaky:")
		for _, line := range r.flaky {
			fmt.Fprintln(r.out, "  "+line)
		}
	}
	if len(r.skipped) > 0 && !r.skipsFail {
		fmt.Fprintf(r.out, "\n%d skipped\n", len(r.skipped))
	}
	return fmt.Sprintf("%d passed, %d failed", r.passed, r.failed)
}
