package output

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
)

// nextPiece is appended to the name of a piece that is not yet in its place.
const nextPiece = ".next"

// cutting is a rotation under way: the piece with this inode holds a part of the file, which is then cut.
type cutting struct {
	Piece uint64 `json:"piece"`
	From  int64  `json:"from"` // in the file
	To    int64  `json:"to"`
}

// rotation cuts an output file.
type rotation struct {
	dir, path string
	files     contents
	from, to  int64 // the part of the file that is kept
	cutAt     int64 // the size of the file when it was cut
}

// steps returns the steps of a rotation, in order. After a crash behind any of them, finished can repair output.json
// from the files.
func (r *rotation) steps() []func() error {
	return []func() error{r.copyPiece, r.announce, r.placePiece, r.cut, r.record}
}

func (r *rotation) copyPiece() error {
	return copyEnd(r.path, r.path+formerPiece+nextPiece, r.from, r.to-r.from)
}

func (r *rotation) announce() error {
	files := r.files
	files.Rotating = &cutting{Piece: inodeOf(r.path + formerPiece + nextPiece), From: r.from, To: r.to}
	return jsonfile.Write(r.dir, InfoFile, files)
}

func (r *rotation) placePiece() error {
	return os.Rename(r.path+formerPiece+nextPiece, r.path+formerPiece)
}

func (r *rotation) cut() error {
	r.cutAt = sizeOf(r.path) // read as late as possible: output written from here to the cut is lost and not counted
	return os.Truncate(r.path, 0)
}

func (r *rotation) record() error {
	r.files.runFile = r.files.cutBehind(r.from, max(r.cutAt, r.to+1))
	return jsonfile.Write(r.dir, InfoFile, r.files)
}

// cutBehind returns the output with its file cut at an offset in it, and a piece that begins at another. Callers leave
// at least one byte between the end of the piece and the cut, since it is never certain that no output was lost there.
func (o runFile) cutBehind(from, at int64) runFile {
	o.Rotating = nil
	o.PieceAt = o.Cut + from
	o.Cut += at
	return o
}

// finished returns the output without a rotation under way: a rotation that did not get to the cut counts as not made,
// and for one that did not get to its record the size at the cut is taken to be the size that was copied.
func (o runFile) finished(path string) (runFile, error) {
	was := o.Rotating
	if was == nil {
		return o, nil
	}
	if was.Piece == 0 || inodeOf(path+formerPiece) != was.Piece {
		o.Rotating = nil
		return o, nil
	}
	uncut, err := was.isUncut(path)
	if err != nil {
		return o, fmt.Errorf("finish the rotation of the output: %w", err)
	}
	if uncut {
		return o.cutBehind(was.From, 0), nil // the former piece is gone, and the file still has the content of the new one
	}
	return o.cutBehind(was.From, was.To+1), nil
}

// isUncut reports whether a file still has the copied part in its place, so that it was not cut since. The size alone
// is not enough: after a cut the workload may have written as much again.
func (c cutting) isUncut(path string) (bool, error) {
	if sizeOf(path) < c.To {
		return false, nil
	}
	piece, err := os.ReadFile(path + formerPiece)
	if err != nil {
		return false, err
	}
	there, err := readAt(path, c.From, int64(len(piece)))
	return bytes.Equal(piece, there), err
}

// copyEnd copies limit bytes of a file, beginning at from, into another file.
func copyEnd(path, to string, from, limit int64) error {
	in, err := os.Open(path) // the shim's own directory
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) // the shim's own directory
	if err != nil {
		return err
	}
	_, err = io.Copy(out, io.NewSectionReader(in, from, limit))
	return errors.Join(err, out.Close())
}

// sizeOf returns the size of a file; zero if there is none.
func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
