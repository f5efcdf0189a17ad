package jsonfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Write replaces a file so that a reader, and a crash, see the old or the new content, whole.
func Write(dir, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	f, err := os.CreateTemp(dir, "."+name+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func syncDir(path string) error {
	d, err := os.Open(path) //nolint:gosec // the agent's own directory
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Read decodes a file into v. It returns false if there is no such file.
func Read(dir, name string, v any) (bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, name)) //nolint:gosec // the agent's own directory
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read %s: %w", name, err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return false, fmt.Errorf("read %s: %w", name, err)
	}
	return true, nil
}

// Unfinished reports whether an entry of a directory is the leftover of an unfinished write of one of the files.
func Unfinished(entry string, files ...string) bool {
	for _, file := range files {
		if strings.HasPrefix(entry, "."+file+"-") {
			return true
		}
	}
	return false
}
