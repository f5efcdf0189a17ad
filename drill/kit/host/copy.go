package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// WorkloadStarts reads the mark of each workload's last start, which is drawn anew before anything of a start runs.
func WorkloadStarts(dir string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "state", "workloads", "*", "*", "state.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, file := range files {
		var s struct {
			Run string `json:"run"`
		}
		data, err := os.ReadFile(file) // of our own mesh
		if err == nil {
			err = json.Unmarshal(data, &s)
		}
		if err != nil {
			return nil, err
		}
		out[file] = s.Run
	}
	if len(out) == 0 {
		return nil, errors.New("the instance has no workload that could be started again")
	}
	return out, nil
}

// largestText is how large a file may be in which the path of a tree is rewritten.
const largestText = 1 << 20

// CopyTree copies directories and regular files with their modes. In texts the path of the tree becomes that of its
// copy. Files that vanish meanwhile are left out.
func CopyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		target := to + path[len(from):]
		switch {
		case entry.IsDir():
			//nolint:gosec // below a directory that we made
			return errors.Join(os.MkdirAll(target, 0o700), os.Chmod(target, info.Mode().Perm()|0o700))
		case !info.Mode().IsRegular():
			return nil
		}
		data, err := os.ReadFile(path) //nolint:gosec // of our own mesh, whose agent stands still
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(data) <= largestText && !bytes.ContainsRune(data, 0) {
			data = bytes.ReplaceAll(data, []byte(from), []byte(to))
		}
		return os.WriteFile(target, data, info.Mode().Perm()) //nolint:gosec // below a directory that we made
	})
}
