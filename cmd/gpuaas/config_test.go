package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fullDisk is a writer that always fails.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

// TestConfigCheckSaysThatItCouldNotWrite: a command that could not print the problems fails for that cause.
func TestConfigCheckSaysThatItCouldNotWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lifecycle.yaml")
	if err := os.WriteFile(file, []byte("service: lifecycle\nnothing_of_it: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	code := execute(t.Context(), []string{"config", "check", file}, nil, fullDisk{}, &errs)
	if code != 1 || !strings.Contains(errs.String(), "no space left on device") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
}
