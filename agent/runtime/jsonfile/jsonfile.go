package jsonfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/pki"
)

// Write replaces a file so that a reader, and a crash, see the old or the new content, whole.
func Write(dir, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := Replace(dir, name, "."+name+"-*", data); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Replace gives a file new content, as Write does. Until the content is whole it is in a file beside it, of mode 0600,
// whose name follows the pattern; see os.CreateTemp.
func Replace(dir, name, pattern string, data []byte) error {
	f, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	return pki.SyncDir(dir)
}

// Read decodes a file into v. It returns false if there is no such file.
func Read(dir, name string, v any) (bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, name)) // the agent's own directory
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
	return slices.ContainsFunc(files, func(file string) bool { return strings.HasPrefix(entry, "."+file+"-") })
}
