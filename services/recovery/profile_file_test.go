package recovery

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

// rootsFile is a file of certificate authorities, and the profile that was read from it, which is checked at each call.
type rootsFile struct {
	t    *testing.T
	path string
	p    *profileFile
	logs bytes.Buffer
}

func newRootsFile(t *testing.T) *rootsFile {
	t.Helper()
	f := &rootsFile{t: t, path: filepath.Join(t.TempDir(), "roots.pem")}
	f.put(f.bundle())
	var err error
	if f.p, err = readProfile(slog.New(slog.NewTextHandler(&f.logs, nil)),
		Profile{Name: "test", CAFile: f.path}); err != nil {
		t.Fatal(err)
	}
	f.p.every = 0
	return f
}

func (f *rootsFile) put(text []byte) {
	f.t.Helper()
	if err := os.WriteFile(f.path, text, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *rootsFile) bundle() []byte {
	f.t.Helper()
	services, err := ca.OpenServiceCA(f.t.TempDir(), "mesh.test")
	if err != nil {
		f.t.Fatal(err)
	}
	b, err := services.Bundle()
	if err != nil {
		f.t.Fatal(err)
	}
	return b.PEM()
}

// TestAnUnreadableFileOfAuthoritiesKeepsTheFormer checks a file that is broken, and one that is missing.
func TestAnUnreadableFileOfAuthoritiesKeepsTheFormer(t *testing.T) {
	f := newRootsFile(t)
	former := f.p.current()
	first, one := former.GetFingerprint(), former.GetCaBundlePem()
	f.put([]byte("no certificate"))
	if now := f.p.current(); now.GetFingerprint() != first || !bytes.Equal(now.GetCaBundlePem(), one) {
		t.Error("a broken file has changed the profile")
	}
	f.p.current()
	if n := strings.Count(f.logs.String(), "cannot be read"); n != 1 {
		t.Errorf("one failure was logged %d times", n)
	}
	if err := os.Remove(f.path); err != nil {
		t.Fatal(err)
	}
	if f.p.current().GetFingerprint() != first {
		t.Error("a file that is gone has changed the profile")
	}
	if n := strings.Count(f.logs.String(), "cannot be read"); n != 2 {
		t.Errorf("two failures were logged %d times", n)
	}
	f.put(append(f.bundle(), one...))
	if f.p.current().GetFingerprint() == first {
		t.Error("the profile is as it was after its file has changed")
	}
}

// A read that failed is tried again, though the file has not changed since: a disk may fail once.
func TestAFileThatFailedIsReadAgain(t *testing.T) {
	f := newRootsFile(t)
	first := f.p.current().GetFingerprint()
	next, at := f.bundle(), time.Now().Add(time.Minute)
	touch := func() {
		t.Helper()
		if err := os.Chtimes(f.path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	f.put(bytes.Repeat([]byte("x"), len(next)))
	touch()
	if f.p.current().GetFingerprint() != first {
		t.Fatal("a broken file has changed the profile")
	}
	f.put(next)
	touch()
	if f.p.current().GetFingerprint() == first {
		t.Error("a file that could not be read once is not read again")
	}
}

// A caller that checks a file on a file system which hangs does not block other callers.
func TestAFileThatHangsKeepsOneCallerWaiting(t *testing.T) {
	f := newRootsFile(t)
	first, next := f.p.current().GetFingerprint(), f.bundle()
	if err := os.Remove(f.path); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(f.path, 0o600); err != nil { // a read waits for a writer
		t.Fatal(err)
	}
	read := make(chan string, 2)
	call := func() { read <- f.p.current().GetFingerprint() }
	go call()
	// A reader that has opened the pipe waits until a writer writes to it.
	writer, err := os.OpenFile(f.path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	go call()
	select {
	case got := <-read:
		if got != first {
			t.Error("a file that hangs has changed the profile")
		}
	case <-time.After(testkit.Patience):
		t.Error("a file that hangs keeps all callers waiting")
	}
	if _, err := writer.Write(next); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	if got := <-read; got == first {
		t.Error("the profile is as it was after its file has changed")
	}
}
