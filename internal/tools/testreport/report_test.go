package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const (
		passed = `{"Action":"run","Package":"m/a","Test":"TestOne"}
{"Action":"output","Package":"m/a","Test":"TestOne","Output":"quiet\n"}
{"Action":"pass","Package":"m/a","Test":"TestOne","Elapsed":0.1}
{"Action":"pass","Package":"m/a","Elapsed":0.2}
`
		failed = `{"Action":"run","Package":"m/b","Test":"TestTwo"}
{"Action":"output","Package":"m/b","Test":"TestTwo","Output":"=== RUN   TestTwo\n"}
{"Action":"output","Package":"m/b","Test":"TestTwo","Output":"    two_test.go:7: got 1, want 2\n"}
{"Action":"fail","Package":"m/b","Test":"TestTwo","Elapsed":0.1}
{"Action":"fail","Package":"m/b","Elapsed":0.2}
`
		skipped = `{"Action":"run","Package":"m/c","Test":"TestThree"}
{"Action":"output","Package":"m/c","Test":"TestThree","Output":"    three_test.go:3: no GPU\n"}
{"Action":"skip","Package":"m/c","Test":"TestThree"}
{"Action":"pass","Package":"m/c","Elapsed":0.2}
`
		broken = `{"ImportPath":"m/d","Action":"build-output","Output":"d.go:3: undefined: x\n"}
{"ImportPath":"m/d","Action":"build-fail"}
{"Action":"fail","Package":"m/d","Elapsed":0,"FailedBuild":"m/d"}
`
		died = `{"Action":"run","Package":"m/e","Test":"TestFive"}
{"Action":"output","Package":"m/e","Test":"TestFive","Output":"panic: boom\n"}
{"Action":"fail","Package":"m/e","Elapsed":0.2}
`
		unfinished = `{"Action":"run","Package":"m/f","Test":"TestSix"}
`
		empty = `{"Action":"skip","Package":"m/none","Elapsed":0}
`
	)
	tests := []struct {
		name      string
		in        string
		skipsFail bool
		want      string
		code      int
		shows     []string
		hides     []string
	}{
		{name: "all pass", in: passed + empty, want: "1 passed, 0 failed", shows: []string{"m/a"}, hides: []string{"quiet", "m/none"}},
		{name: "one fails", in: passed + failed, want: "1 passed, 1 failed", code: 1, shows: []string{"got 1, want 2", "m/b.TestTwo"}, hides: []string{"=== RUN", "quiet"}},
		{name: "a skip on a laptop", in: passed + skipped, want: "1 passed, 0 failed", shows: []string{"1 skipped"}},
		{name: "a skip on the build machine", in: passed + skipped, skipsFail: true, want: "1 passed, 1 failed", code: 1, shows: []string{"TestThree (skipped)", "no GPU"}},
		{name: "a package that does not build", in: passed + broken, want: "1 passed, 1 failed", code: 1, shows: []string{"undefined: x"}},
		{name: "a package that dies", in: passed + died, want: "1 passed, 1 failed", code: 1, shows: []string{"panic: boom", "FAIL  m/e"}},
		{name: "output that stops", in: passed + unfinished, want: "1 passed, 1 failed", code: 1, shows: []string{"TestSix (never ended)"}},
		{name: "nothing ran", in: "go: cannot find main module\n", want: "0 passed, 1 failed", code: 1, shows: []string{"cannot find main module"}},
		{name: "other lines pass through", in: "starting\n" + passed, want: "1 passed, 0 failed", shows: []string{"starting"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			summary := filepath.Join(t.TempDir(), "summary")
			code := run(strings.NewReader(tt.in), &out, summary, tt.skipsFail)
			if code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.HasSuffix(out.String(), tt.want+"\n") {
				t.Errorf("last line is not %q in:\n%s", tt.want, out.String())
			}
			for _, s := range tt.shows {
				if !strings.Contains(out.String(), s) {
					t.Errorf("%q is missing in:\n%s", s, out.String())
				}
			}
			for _, s := range tt.hides {
				if strings.Contains(out.String(), s) {
					t.Errorf("%q is not hidden in:\n%s", s, out.String())
				}
			}
			line, err := os.ReadFile(summary)
			if err != nil || string(line) != tt.want+"\n" {
				t.Errorf("summary file holds %q, %v", line, err)
			}
		})
	}
}
