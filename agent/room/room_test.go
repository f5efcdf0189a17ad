package room_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	kibi = 1 << 10
	mebi = 1 << 20
)

// TestRoomComesAndGoesWithHysteresis checks the marks, and that a refused write counts although the kernel's figures
// show room.
func TestRoomComesAndGoesWithHysteresis(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	have := room.Usage{SizeBytes: 24 * mebi, FreeBytes: 20 * mebi, Files: 1000, FreeFiles: 900}
	now := time.Unix(1000, 0)
	w := room.New(room.Config{
		Dirs: []string{dir}, Now: func() time.Time { return now },
		Usage: func(string) (room.Usage, error) { return have, nil },
	})
	for i, step := range []struct {
		free, files int64
		refused     error
		full        bool
	}{
		{20 * mebi, 900, nil, false},
		{mebi, 900, nil, false},
		{mebi - 1, 900, nil, true},
		{mebi + 1, 900, nil, true}, // between the marks the state stays as it was
		{2*mebi - 1, 900, nil, true},
		{2 * mebi, 900, nil, false},
		{mebi + 1, 900, nil, false},
		{20 * mebi, 63, nil, true},
		{20 * mebi, 127, nil, true},
		{20 * mebi, 128, nil, false},
		{20 * mebi, 900, fmt.Errorf("write: %w", unix.EDQUOT), true},
		{20 * mebi, 900, nil, false},
		{20 * mebi, 900, errors.New("another error"), false},
	} {
		was := w.State()
		now = now.Add(time.Second)
		have.FreeBytes, have.FreeFiles = step.free, step.files
		w.Note(step.refused)
		got, changed := w.Check()
		if got.Full != step.full || changed != (was.Full != step.full) || got.Full != (got.Detail != "") || got.Dir != dir {
			t.Errorf("step %d: %+v, changed %t, want full %t", i, got, changed, step.full)
		}
		if changed != got.Since.Equal(now) {
			t.Errorf("step %d: since %s at %s, changed %t", i, got.Since, now, changed)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the probe left %v, %v", left, err)
	}
}

// TestAnyDirectoryWithoutRoomCounts checks that the state names the directory without room.
func TestAnyDirectoryWithoutRoomCounts(t *testing.T) {
	w := room.New(room.Config{Dirs: []string{"/state", "/gone", "/etc"}, Usage: func(dir string) (room.Usage, error) {
		switch dir {
		case "/state":
			return room.Usage{SizeBytes: 100 * mebi, FreeBytes: 50 * mebi}, nil
		case "/etc":
			return room.Usage{SizeBytes: 100 * mebi, FreeBytes: 4 * kibi}, nil
		default:
			return room.Usage{}, unix.ENOENT
		}
	}})
	if got, changed := w.Check(); !got.Full || !changed || got.Dir != "/etc" {
		t.Errorf("%+v", got)
	}
}

// TestTheReserveLetsTheAgentWriteOnAFullDisk fills a file system of its own.
func TestTheReserveLetsTheAgentWriteOnAFullDisk(t *testing.T) {
	testkit.IO(t)
	dir := testkit.SmallDisk(t, 4*mebi)
	reserve, err := room.OpenReserve(filepath.Join(dir, room.ReserveFile))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Fill(t, dir)
	write := func() error { return os.WriteFile(filepath.Join(dir, "new"), make([]byte, 20*kibi), 0o600) }
	if err := write(); !room.IsFull(err) {
		t.Fatalf("the disk is not full: %v", err)
	}
	for range 100 { // a replaced file gives its blocks back
		if err := reserve.Do(func() error {
			return errors.Join(write(), os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, "name")))
		}); err != nil {
			t.Fatal(err)
		}
	}
	if again, err := room.OpenReserve(filepath.Join(dir, room.ReserveFile)); err != nil {
		t.Error(err)
	} else if err := again.Do(write); err != nil {
		t.Errorf("opened on a full disk: %v", err)
	}
	refused := errors.New("another error")
	if err := reserve.Do(func() error { return refused }); !errors.Is(err, refused) {
		t.Errorf("Do = %v", err)
	}
	more := func() error { return os.WriteFile(filepath.Join(dir, "more"), make([]byte, mebi), 0o600) }
	if err := errors.Join((*room.Reserve)(nil).Do(more), reserve.Do(more)); !room.IsFull(err) {
		t.Errorf("more than is reserved was written: %v", err)
	}
}
