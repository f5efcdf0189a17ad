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
		{
			name: "all pass", in: passed + empty, want: "1 passed, 0 failed", shows: []string{"m/a"},
			hides: []string{"quiet", "m/none"},
		},
		{
			name: "one fails", in: passed + failed, want: "1 passed, 1 failed", code: 1,
			shows: []string{"got 1, want 2", "m/b.TestTwo"}, hides: []string{"=== RUN", "quiet"},
		},
		{name: "a skip on a laptop", in: passed + skipped, want: "1 passed, 0 failed", shows: []string{"1 skipped"}},
		{
			name: "a skip on the build machine", in: passed + skipped, skipsFail: true, want: "1 passed, 1 failed", code: 1,
			shows: []string{"TestThree (skipped)", "no GPU"},
		},
		{
			name: "a package that does not build", in: passed + broken, want: "1 passed, 1 failed", code: 1,
			shows: []string{"undefined: x"},
		},
		{
			name: "a package that dies", in: passed + died, want: "1 passed, 1 failed", code: 1,
			shows: []string{"panic: boom", "FAIL  m/e"},
		},
		{
			name: "output that stops", in: passed + unfinished, want: "1 passed, 1 failed", code: 1,
			shows: []string{"TestSix (never ended)"},
		},
		{
			name: "nothing ran", in: "go: cannot find main module\n", want: "0 passed, 1 failed", code: 1,
			shows: []string{"cannot find main module"},
		},
		{
			name: "slow tests are listed, the slowest first", want: "3 passed, 0 failed",
			in: strings.ReplaceAll(passed, `0.1`, `12.5`) + strings.ReplaceAll(strings.ReplaceAll(passed, `0.1`, `31`),
				"TestOne", "TestTwo") +
				strings.ReplaceAll(strings.ReplaceAll(passed, `0.1`, `30`), "TestOne", "TestTwo/below"),
			shows: []string{"slowest (2 took more than 10 s):\n     31.0s  m/a.TestTwo\n     12.5s  m/a.TestOne\n"},
			hides: []string{"below"},
		},
		{name: "no slow test, no list", in: passed, want: "1 passed, 0 failed", hides: []string{"slowest"}},
		{
			name: "other lines pass through", in: "starting\n" + passed, want: "1 passed, 0 failed",
			shows: []string{"starting"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			summary := filepath.Join(t.TempDir(), "summary")
			code := run(strings.NewReader(tt.in), &out, summary, tt.skipsFail, again{})
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

// TestAgain runs failed tests once more with a command of its own in place of go test.
func TestAgain(t *testing.T) {
	failing := func(name, line string) string {
		return strings.NewReplacer("NAME", name, "LINE", line).Replace(`{"Action":"run","Package":"m/b","Test":"NAME/sub"}
{"Action":"output","Package":"m/b","Test":"NAME/sub","Output":"LINE\n"}
{"Action":"fail","Package":"m/b","Test":"NAME/sub"}
{"Action":"fail","Package":"m/b","Test":"NAME"}
`)
	}
	const ends = `{"Action":"fail","Package":"m/b"}
`
	passes := `{"Action":"pass","Package":"m/b","Test":"TestTwo"}` + "\n" + `{"Action":"pass","Package":"m/b"}` + "\n"
	tests := []struct {
		name, in, second, want string
		skipsFail              bool
		code                   int
		shows, hides           []string
	}{
		{
			name: "passes alone", in: failing("TestTwo", "got 1") + ends, second: passes, want: "2 passed, 0 failed",
			code: exitFlaky, shows: []string{"got 1", "flaky:", "m/b.TestTwo (passed alone"}, hides: []string{"failed:"},
		},
		{
			name: "fails again", in: failing("TestTwo", "got 1") + ends, second: failing("TestTwo", "got 3") + ends,
			want: "0 passed, 2 failed", code: 1, shows: []string{"got 3", "failed:"}, hides: []string{"flaky:"},
		},
		{
			name: "nothing runs the second time", in: failing("TestTwo", "got 1") + ends, second: "", want: "0 passed, 2 failed",
			code:  1,
			shows: []string{"failed again"},
		},
		{
			name: "a data race", in: failing("TestTwo", "WARNING: DATA RACE") + ends, second: passes, want: "0 passed, 2 failed",
			code:  1,
			hides: []string{"once more"},
		},
		{
			name: "a data race outside of the tests", in: failing("TestTwo", "x") +
				`{"Action":"output","Package":"m/b","Output":"testing: race detected outside of test execution\n"}` + "\n" + ends,
			second: passes, want: "0 passed, 3 failed", code: 1, shows: []string{"outside of its tests"},
			hides: []string{"once more"},
		},
		{
			name: "what a seed found", in: failing("TestTwo", "repeat with GPUAAS_MODEL_SEED=7") + ends, second: passes,
			want: "0 passed, 2 failed", code: 1, hides: []string{"once more"},
		},
		{
			name: "three", in: failing("TestTwo", "x") + failing("TestThree", "x") + failing("TestFour", "x") + ends,
			second: passes, want: "0 passed, 6 failed", code: 1, hides: []string{"once more"},
		},
		{
			name: "a package died beside it", in: failing("TestTwo", "x") + ends + `{"Action":"fail","Package":"m/e"}` + "\n",
			second: passes, want: "0 passed, 3 failed", code: 1, hides: []string{"once more"},
		},
		{
			name: "a skip on the build machine",
			in:   failing("TestTwo", "x") + ends + `{"Action":"skip","Package":"m/c","Test":"TestC"}` + "\n", second: passes,
			skipsFail: true, want: "0 passed, 3 failed", code: 1, hides: []string{"once more"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			events, asked := filepath.Join(dir, "events"), filepath.Join(dir, "asked")
			if err := os.WriteFile(events, []byte(tt.second), 0o600); err != nil {
				t.Fatal(err)
			}
			script := filepath.Join(dir, "second")
			text := "#!/bin/sh\necho \"$@\" >>" + asked + "\ncat " + events + "\n"
			if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			code := run(strings.NewReader(tt.in), &out, "", tt.skipsFail,
				again{command: []string{script, "-race"}, logs: filepath.Join(dir, "logs")})
			if code != tt.code || !strings.HasSuffix(out.String(), tt.want+"\n") {
				t.Errorf("exit code %d, want %d and the last line %q in:\n%s", code, tt.code, tt.want, out.String())
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
			if tt.code != exitFlaky {
				return
			}
			if how, err := os.ReadFile(asked); err != nil || string(how) != "-race -count=1 -run ^TestTwo$ m/b\n" {
				t.Errorf("ran %q, %v", how, err)
			}
			if kept, err := os.ReadFile(filepath.Join(dir, "logs", "m_b.TestTwo.log")); err != nil || string(kept) != "got 1\n" {
				t.Errorf("kept %q, %v", kept, err)
			}
		})
	}
}
