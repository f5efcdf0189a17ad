package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/internal/testkit"
)

// leaves calls each for every command that does something itself.
func leaves(cmd *cobra.Command, each func(*cobra.Command)) {
	for _, sub := range cmd.Commands() {
		switch {
		case sub.HasSubCommands():
			leaves(sub, each)
		case sub.Runnable() && !sub.Hidden:
			each(sub)
		}
	}
}

// TestFlagsNameTheirValuesInOneWord: a text in backquotes replaces the type of a flag's value in the help, so a command
// that is quoted so would stand there.
func TestFlagsNameTheirValuesInOneWord(t *testing.T) {
	root := newRoot(kit.New())
	leaves(root, func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if value, usage := pflag.UnquoteUsage(f); strings.Contains(value, " ") {
				t.Errorf("%s --%s %s: %s", cmd.CommandPath(), f.Name, value, usage)
			}
		})
	})
}

// TestEveryCommandShowsItsUse: each command has its own examples, and they do more than print the help.
func TestEveryCommandShowsItsUse(t *testing.T) {
	root := newRoot(kit.New())
	root.InitDefaultHelpFlag()
	leaves(root, func(cmd *cobra.Command) {
		for line := range strings.SplitSeq(cmd.Example, "\n") {
			if !strings.HasPrefix(line, "  "+cmd.CommandPath()) || strings.HasSuffix(line, "--help") {
				t.Errorf("%s: example %q", cmd.CommandPath(), line)
			}
		}
	})
	var groups func(cmd *cobra.Command)
	groups = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			if !sub.HasSubCommands() || sub.Hidden {
				continue
			}
			groups(sub)
			for _, leaf := range sub.Commands() {
				if !leaf.Hidden && !strings.Contains(sub.Example, "  "+leaf.CommandPath()) {
					t.Errorf("the examples of %s have none of %s:\n%s", sub.CommandPath(), leaf.Name(), sub.Example)
				}
			}
		}
	}
	groups(root)
}

// TestExamplesParse: the flags and the arguments of each example are those of its command.
func TestExamplesParse(t *testing.T) {
	leaves(newRoot(kit.New()), func(cmd *cobra.Command) {
		for line := range strings.SplitSeq(cmd.Example, "\n") {
			line, _, _ = strings.Cut(line, " >")
			line, _, _ = strings.Cut(line, " |")
			if strings.TrimSpace(line) == "" {
				continue
			}
			root := newRoot(kit.New())
			found, rest, err := root.Find(words(strings.TrimSpace(line))[1:])
			if err != nil || found.CommandPath() != cmd.CommandPath() {
				t.Errorf("%q is of %s, %v", line, found.CommandPath(), err)
				continue
			}
			found.InitDefaultHelpFlag()
			if err := found.ParseFlags(rest); err != nil {
				t.Errorf("%q: %v", line, err)
				continue
			}
			if err := found.ValidateArgs(found.Flags().Args()); err != nil {
				t.Errorf("%q: %v", line, err)
			}
		}
	})
}

// words splits a line as a shell does, as far as the examples need it.
func words(line string) []string {
	var out []string
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			out[len(out)-1] += part
			continue
		}
		fields := strings.Fields(part)
		if i > 0 && part != "" && part[0] != ' ' && len(fields) > 0 {
			out[len(out)-1] += fields[0]
			fields = fields[1:]
		}
		out = append(out, fields...)
		if strings.HasSuffix(part, " ") {
			out = append(out, "")
		}
	}
	return withoutEmpty(out)
}

func withoutEmpty(all []string) []string {
	var out []string
	for _, word := range all {
		if word != "" {
			out = append(out, word)
		}
	}
	return out
}

// onTerminal runs a command line on a terminal that answers no query, and returns all bytes that it was sent.
func onTerminal(t *testing.T, env []string, args ...string) string {
	t.Helper()
	master, slave := testkit.Terminal(t)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Path = filepath.Join(programs(t), "gpuaas")
	cmd.Args[0] = "gpuaas"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.Env = append(append([]string{}, os.Environ()...), env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	var seen bytes.Buffer
	_, _ = seen.ReadFrom(master) // it ends with EIO when the last holder of the other side is gone
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, seen.String())
	}
	return seen.String()
}

// programs returns a directory in which this test's binary is named gpuaas, so that testscript runs it as that program.
func programs(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(self, filepath.Join(dir, "gpuaas")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestHelpAsksTheTerminalNothing: no query is sent, whatever the terminal is, and no escape sequence at all if colours
// are off.
func TestHelpAsksTheTerminalNothing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		env    []string
		styled bool
	}{
		{"xterm", []string{"TERM=xterm-256color", "NO_COLOR="}, true},
		{"vt100", []string{"TERM=vt100", "NO_COLOR="}, true},
		{"linux", []string{"TERM=linux", "NO_COLOR="}, true},
		{"truecolor", []string{"TERM=xterm-kitty", "COLORTERM=truecolor", "NO_COLOR="}, true},
		{"dumb", []string{"TERM=dumb", "NO_COLOR="}, false},
		{"no terminal type", []string{"TERM=", "NO_COLOR="}, false},
		{"NO_COLOR", []string{"TERM=xterm-256color", "NO_COLOR=1"}, false},
	} {
		for _, line := range []string{"", "workspaces decommission --help"} {
			t.Run(tt.name+" "+line, func(t *testing.T) {
				got := onTerminal(t, tt.env, strings.Fields(line)...)
				if !strings.Contains(got, "gpuaas") && !strings.Contains(got, "130") {
					t.Fatalf("printed %q", got)
				}
				if strings.Contains(got, "\x1b]") || strings.Contains(got, "\x1b[c") || strings.Contains(got, "\x1b[?") ||
					strings.Contains(got, "\x1bP") {
					t.Errorf("the terminal is asked: %q", got)
				}
				if !tt.styled && strings.Contains(got, "\x1b") {
					t.Errorf("an escape is sent: %q", got)
				}
			})
		}
	}
}

// TestHelpIsAsWideAsTheTerminal: no line of any help is wider than the terminal, or than 80 columns where there is
// none. A word that is longer than that has a line of its own.
func TestHelpIsAsWideAsTheTerminal(t *testing.T) {
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		var out bytes.Buffer
		if code := execute(t.Context(), append(strings.Fields(cmd.CommandPath())[1:], "--help"), nil, &out, &out); code != 0 {
			t.Errorf("%s: exit %d", cmd.CommandPath(), code)
		}
		for line := range strings.Lines(out.String()) {
			if got := ansi.StringWidth(strings.TrimSuffix(line, "\n")); got > 80 && len(strings.Fields(line)) > 2 {
				t.Errorf("%s: a line of %d: %s", cmd.CommandPath(), got, line)
			}
		}
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.IsAdditionalHelpTopicCommand() {
				walk(sub)
			}
		}
	}
	walk(newRoot(kit.New()))
}

// TestHelpKeepsGlobalFlagsApart: the global flags are not listed among those of one command.
func TestHelpKeepsGlobalFlagsApart(t *testing.T) {
	var out bytes.Buffer
	if code := execute(t.Context(), []string{"workspaces", "decommission", "--help"}, nil, &out, &out); code != 0 {
		t.Fatalf("exit %d: %s", code, out.String())
	}
	own, global, ok := strings.Cut(out.String(), "Global flags:")
	if !ok || !strings.Contains(own, "--yes") || !strings.Contains(own, "--reason") ||
		strings.Contains(own, "--ca-file") || !strings.Contains(global, "--ca-file") {
		t.Errorf("help:\n%s", out.String())
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("an escape goes into a pipe: %q", out.String())
	}
}

// TestExitCodesInTheHelp: the help lists every exit code with its meaning.
func TestExitCodesInTheHelp(t *testing.T) {
	var out bytes.Buffer
	if code := execute(t.Context(), []string{"help", "exit-codes"}, nil, &out, &out); code != 0 {
		t.Fatalf("exit %d: %s", code, out.String())
	}
	for _, e := range exit.Codes() {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), fmt.Sprintf(" %d %s", e.Code, e.Meaning)) {
			t.Errorf("no exit code %d in\n%s", e.Code, out.String())
		}
	}
}
