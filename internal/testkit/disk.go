package testkit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// SmallDisk mounts a file system of that size in memory for the test and returns its directory. It needs root.
func SmallDisk(t *testing.T, size int) string {
	t.Helper()
	return SmallDiskAt(t, t.TempDir(), size)
}

// SmallDiskAt does the same as SmallDisk with a directory that the caller has made, which it returns.
func SmallDiskAt(t *testing.T, dir string, size int) string {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0711", size)); err != nil {
		t.Fatalf("mount a small disk (root is needed): %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount the small disk: %v", err)
		}
	})
	return dir
}

// Fill takes all room of the file system of dir, to the last block, and returns a function that frees it again.
func Fill(t *testing.T, dir string) func() {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for _, piece := range []int{1 << 20, 4 << 10} {
		for err == nil {
			_, err = f.Write(make([]byte, piece))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("fill %s: %v", dir, err)
		}
		err = nil
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}
