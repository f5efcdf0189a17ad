package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// logOf writes a launch log of so many instances that have ended, and returns the log.
func logOf(t *testing.T, instances int) *launchLog {
	t.Helper()
	dir := t.TempDir()
	var out bytes.Buffer
	for n := range instances {
		ws := ids.New()
		for i, op := range []op{opIntent, opLaunched, opEnding, opEnded} {
			line, err := json.Marshal(entry{
				Op: op, At: time.Now(), WorkspaceID: ws, Epoch: 1, InstanceID: ids.New(),
				Seq: int64(4*n + i + 1),
			})
			if err != nil {
				t.Fatal(err)
			}
			out.Write(append(line, '\n'))
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "launches.jsonl"), out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return newLaunchLog(dir)
}

// instances returns how many instances a log has.
func (j *launchLog) instances(t *testing.T) int {
	t.Helper()
	n := 0
	if err := j.with(testkit.Context(t), func(l *content, _ func(entry) error) error {
		n = len(l.instances)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// append appends the launch of an instance to the log.
func (j *launchLog) append(t *testing.T) {
	t.Helper()
	if err := j.with(testkit.Context(t), func(_ *content, write func(entry) error) error {
		return write(entry{Op: opLaunched, WorkspaceID: ids.New(), Epoch: 1})
	}); err != nil {
		t.Fatal(err)
	}
}

// TestALogThatStandsIsNotReadAgain: an unchanged log is not read again, because Keep opens it each second and it has
// everything that was launched.
func TestALogThatStandsIsNotReadAgain(t *testing.T) {
	const instances = 1000
	j := logOf(t, instances)
	if n := j.instances(t); n != instances {
		t.Fatalf("%d instances were read, not %d", n, instances)
	}
	ctx := context.Background()
	check := func() {
		if err := j.with(ctx, func(*content, func(entry) error) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	if got := testing.AllocsPerRun(5, check); got > 200 {
		t.Errorf("a look at a log of %d instances takes %.0f allocations", instances, got)
	}
}

// TestWhatOthersWriteIntoTheLogIsSeen: lines that another replica appends or compacts, and a file that a person puts in
// the log's place, are read.
func TestWhatOthersWriteIntoTheLogIsSeen(t *testing.T) {
	j := logOf(t, 10)
	other := newLaunchLog(filepath.Dir(j.path))
	check := func(after string, want int) {
		t.Helper()
		for name, j := range map[string]*launchLog{"this": j, "another": other} {
			if n := j.instances(t); n != want {
				t.Errorf("after %s %s replica sees %d instances, not %d", after, name, n, want)
			}
		}
	}
	check("the first look", 10)
	other.append(t)
	j.append(t)
	other.append(t)
	check("lines of both", 13)

	raw, err := os.ReadFile(j.path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(raw, []byte("\n"))
	if err := other.replace(bytes.Join(lines[8:], nil)); err != nil {
		t.Fatal(err)
	}
	check("a compaction", 11)
	j.append(t)
	check("a line after it", 12)

	// In place, and longer than it was: the inode is the same.
	if err := os.WriteFile(j.path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	check("a backup was put in its place", 13)

	// Half a line was never acknowledged.
	f, err := os.OpenFile(j.path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"op":"laun`); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	check("a torn line", 13)
	other.append(t)
	check("a line in its place", 14)

	damaged := bytes.Replace(raw, []byte(`"op"`), []byte(`"op`), 1)
	if err := os.WriteFile(j.path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // and it stays refused
		if err := j.with(testkit.Context(t), func(*content, func(entry) error) error { return nil }); !errors.Is(err,
			errTorn) {
			t.Errorf("a log that is damaged in its middle: %v", err)
		}
	}
}
