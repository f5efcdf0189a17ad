package output

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
)

// Recorder keeps the output of a workload's runs. The shim of the workload has the only one.
type Recorder struct {
	Dir    string   // of the files
	Limit  int64    // of a run's file, in bytes, above which it is cut; zero: none
	Masked []string // the values that are hidden in the output of the runs that are opened

	// whole is true if no rotation of the output is half done. It is false at first: an earlier shim may have left one.
	whole bool
}

// Exit is the exit status of a run.
type Exit struct {
	Run       string
	HasExited bool // Code is set
	Code      int32
}

// Open makes the output file of a new run; last is how the run before it ended. The output of the present run becomes
// that of the previous one. A failure at any step, as on a full disk, loses no output of the present run: the next call
// finds its file by the inode in output.json and goes on from there.
func (r *Recorder) Open(run string, last Exit) (*os.File, error) {
	lock, err := lockBriefly(r.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }()
	files, err := r.contents()
	if err != nil {
		return nil, err
	}
	kept, err := files.keep(r.Dir)
	if err != nil {
		return nil, fmt.Errorf("keep output of the former run: %w", err)
	}
	path := filepath.Join(r.Dir, filePresent)
	// the shim's own directory
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	next := contents{runFile: runFile{
		Run: run, StartedAt: time.Now(), Masked: r.Masked,
		File: inodeOf(path),
	}}
	if kept {
		previous := files.runFile
		if last.Run == previous.Run && last.HasExited {
			previous.ExitCode, previous.HasExited = last.Code, true
		}
		next.Previous = &previous
	}
	if err := jsonfile.Write(r.Dir, InfoFile, next); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return out, nil
}

// contents returns the content of output.json, brought up to date with the present files: it finishes a rotation that
// did not complete, and records a file whose inode is not in output.json, since such a file would not be found after a
// rename.
func (r *Recorder) contents() (contents, error) {
	path := filepath.Join(r.Dir, filePresent)
	var files contents
	found, err := jsonfile.Read(r.Dir, InfoFile, &files)
	if err != nil || !found {
		// The output is that of a shim of an earlier version, or output.json cannot be read: the values that are masked now
		// are masked in it.
		files = contents{runFile: runFile{Masked: r.Masked}}
	}
	changed := files.Rotating != nil
	if files.runFile, err = files.finished(path); err != nil {
		return contents{}, err
	}
	if file := inodeOf(path); file != 0 && files.File != file && !files.moved(r.Dir) {
		files.File, changed = file, true
	}
	if changed {
		if err := jsonfile.Write(r.Dir, InfoFile, files); err != nil {
			return contents{}, err
		}
	}
	_ = removeFile(path + formerPiece + nextPiece) // of a rotation that ended early; the next one overwrites it otherwise
	return files, nil
}

// Rotate copies the end of an output that has grown too large aside and cuts it. The file is open in append mode, so
// the workload goes on at its new end; output written between the copy and the cut is lost, and counted up to the last
// read of the file's size. A failure before the cut leaves the output as it is, for the next call, which first finishes
// a rotation that an earlier one began.
func (r *Recorder) Rotate() {
	limit, path := r.Limit, filepath.Join(r.Dir, filePresent)
	if limit <= 0 || r.whole && sizeOf(path) <= limit {
		return
	}
	lock, err := lockBriefly(r.Dir)
	if err != nil {
		return
	}
	defer func() { _ = lock.Close() }()
	files, err := r.contents()
	if err != nil {
		return
	}
	r.whole = true
	size := sizeOf(path)
	if size <= limit {
		return
	}
	cut := &rotation{dir: r.Dir, path: path, files: files, from: size - limit, to: size}
	for _, step := range cut.steps() {
		if step() != nil {
			r.whole = false
			_ = removeFile(path + formerPiece + nextPiece)
			return
		}
	}
}
