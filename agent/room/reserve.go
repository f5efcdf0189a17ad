package room

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ReserveFile is the name of the reserve in the state directory.
const ReserveFile = ".room-reserve"

const (
	reserveSize  = mebi / 2
	reservePiece = 16 << 10
)

// Reserve is a file whose blocks are given up, piece by piece, so that the agent can write its identity and its
// diagnostic record on a full disk as well. Such a write replaces an older file, so the piece can be taken back. A nil
// Reserve has no blocks.
type Reserve struct {
	path string

	mu   sync.Mutex
	held int64
}

// OpenReserve opens the reserve at path and fills it as far as there is room.
func OpenReserve(path string) (*Reserve, error) {
	r := &Reserve{path: path}
	info, err := os.Lstat(path)
	switch {
	case err == nil && !info.Mode().IsRegular():
		return nil, fmt.Errorf("open reserve: %s is not a regular file", path)
	case err == nil:
		r.held = info.Size() / reservePiece * reservePiece
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("open reserve: %w", err)
	}
	return r, r.Refill()
}

// Do calls write, and as long as write fails for want of room calls it again with one more piece of the reserve given
// up. It returns write's last error.
func (r *Reserve) Do(write func() error) error {
	err := write()
	if r == nil || !IsFull(err) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for IsFull(err) && r.held > 0 {
		if cutErr := os.Truncate(r.path, r.held-reservePiece); cutErr != nil {
			return errors.Join(err, fmt.Errorf("give up reserve: %w", cutErr))
		}
		r.held -= reservePiece
		err = write()
	}
	return errors.Join(err, r.fill())
}

// Refill takes back the pieces that were given up, as far as there is room. Want of room is no error.
func (r *Reserve) Refill() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fill()
}

func (r *Reserve) fill() error {
	if r.held >= reserveSize {
		return nil
	}
	f, err := os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE, 0o600)
	if IsFull(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("fill reserve: %w", err)
	}
	for err == nil && r.held < reserveSize {
		if err = take(f, r.held); err == nil {
			r.held += reservePiece
		}
	}
	if IsFull(err) {
		err = f.Truncate(r.held)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("fill reserve: %w", err)
	}
	return nil
}

// take allocates the blocks of one piece to the file.
func take(f *os.File, at int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, at, reservePiece)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		_, err = f.WriteAt(make([]byte, reservePiece), at)
	}
	return err
}
