// Package diag owns the agent's diagnostic record: the failures on this host, recorded before each retry, for the time
// when the control plane cannot be reached.
//
// It enforces its bounds on what it reads back as well: a user with access to the host may have forged the file, and
// its content is evidence, not truth. It never holds secrets: details lose tokens, query strings, credentials in URLs
// and key material before they are stored. It never decides what a diagnostic means.
//
// Guarantees: when Record returns nil the record is on disk; one that it could not write is kept in memory, sent to the
// control plane and written with the next record; the file has mode 0600, at most MaxRecords records and MaxBytes
// bytes, none older than MaxAge; the same code and detail in a row, or in one outage, is one record with a count, and
// so is the sign of life beside others; a file that cannot be read is set aside, and never keeps the agent from
// starting, and leftovers of an unfinished write are removed.
//
// The attempts that fail from the first one until a session is admitted share a correlation id, which a restart of the
// agent keeps. What the control plane was told is noted in the record, and not told again after a reconnect.
//
// The file is read by earlier and later builds, which ignore each other's fields.
package diag

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// The bounds of the record.
const (
	MaxRecords = 256
	MaxBytes   = 256 << 10
	MaxAge     = 7 * 24 * time.Hour
	MaxDetail  = 512
	MaxInHello = 64 // at most in one frame
)

// Config sets where the record is.
type Config struct {
	Path string
	Now  func() time.Time // the host's clock; nil means time.Now
	// Room is the reserve whose blocks are given up for the record where the disk has no room; nil: there is no reserve.
	Room *room.Reserve
	// Mirror is called with each entry that is recorded, after it was written; nil: it is not mirrored.
	Mirror func(Entry)
}

// Log is an open diagnostic record. It is safe for concurrent use by one process.
type Log struct {
	path    string
	now     func() time.Time
	room    *room.Reserve
	mirror  func(Entry)
	changed chan struct{} // contains a token after a record or an end
	aside   error         // why the existing file was set aside; nil: it was not

	mu        sync.Mutex
	entries   []Entry
	connected bool   // a session is admitted
	outage    string // correlation id of the attempts that fail now; empty: none has failed since a session was admitted
}

// Open opens the record and reads its entries. A record that cannot be read is renamed to `<path>.bad` and a new one
// begins.
func Open(cfg Config) (*Log, error) {
	l := &Log{path: cfg.Path, now: cfg.Now, room: cfg.Room, mirror: cfg.Mirror, changed: make(chan struct{}, 1)}
	if l.now == nil {
		l.now = time.Now
	}
	if cfg.Path == "" {
		return nil, errors.New("open diagnostic record: no path")
	}
	leftovers, err := filepath.Glob(filepath.Join(filepath.Dir(cfg.Path), building))
	if err != nil {
		return nil, fmt.Errorf("look for unfinished diagnostic records: %w", err)
	}
	for _, path := range leftovers {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove unfinished diagnostic record: %w", err)
		}
	}
	l.entries, l.aside = Read(cfg.Path, l.now())
	if l.aside != nil {
		if err := os.Rename(cfg.Path, cfg.Path+".bad"); err != nil {
			return nil, fmt.Errorf("set unreadable diagnostic record aside: %w", err)
		}
	}
	l.outage = outageOf(l.entries)
	return l, nil
}

// SetAside reports why the record that Open found was set aside; nil if it was not.
func (l *Log) SetAside() error { return l.aside }

// building is the pattern of the names under which a record is written before it is renamed.
const building = ".diagnostics-*"

// Read returns the entries of a record, oldest first, without taking anything in it on trust: no symbolic link, no more
// than MaxBytes, every text cleaned, old ones left out. No file is no entries.
func Read(path string, now time.Time) ([]Entry, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open diagnostic record: %w", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open diagnostic record: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > MaxBytes {
		return nil, errors.New("read diagnostic record: not a regular file of a size that the agent writes")
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read diagnostic record: %w", err)
	}
	if len(data) == 0 {
		return nil, nil
	}
	return Parse(data, now)
}

// Parse returns the entries of the text of a record, as Read does.
func Parse(data []byte, now time.Time) ([]Entry, error) {
	var entries []Entry
	if err := json.Unmarshal(data, &entries); err != nil {
		return nil, fmt.Errorf("read diagnostic record: %w", err)
	}
	for i := range entries {
		entries[i] = entries[i].clean()
	}
	return bound(entries, now), nil
}

// bound returns the entries without those that are too old, have an unknown code or exceed MaxRecords. Details are
// clean already.
func bound(entries []Entry, now time.Time) []Entry {
	out := make([]Entry, 0, len(entries))
	for _, e := range entries {
		if _, err := names.Parse[commonv1.DiagnosticCode](e.Code); err != nil || now.Sub(e.LastSeen) > MaxAge ||
			e.LastSeen.Sub(now) > MaxAge {
			continue
		}
		e.Count = max(e.Count, 1)
		e.Reported = min(max(e.Reported, 0), e.Count)
		e.NextRetry = min(max(e.NextRetry, 0), 24*time.Hour)
		out = append(out, e)
	}
	return slices.Clip(out[max(len(out)-MaxRecords, 0):])
}

// write replaces the file, so that a crash leaves the old or the new one.
func (l *Log) write(entries []Entry) error {
	data, err := json.Marshal(entries)
	for err == nil && len(data) > MaxBytes && len(entries) > 1 {
		entries = entries[len(entries)/4+1:]
		data, err = json.Marshal(entries)
	}
	if err != nil {
		return fmt.Errorf("encode diagnostic record: %w", err)
	}
	if err := l.room.Do(func() error {
		return jsonfile.Replace(filepath.Dir(l.path), filepath.Base(l.path), building, data)
	}); err != nil {
		return fmt.Errorf("write diagnostic record: %w", err)
	}
	return nil
}

// Last returns the newest record of a code.
func (l *Log) Last(code commonv1.DiagnosticCode) (Entry, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	spelled := names.Of(code)
	for _, e := range slices.Backward(l.entries) {
		if e.Code == spelled {
			return e, true
		}
	}
	return Entry{}, false
}

// Entries returns all records, oldest first.
func (l *Log) Entries() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.entries)
}

// Since returns the records that were seen after t as they go into Hello or a report, newest last, at most limit (0:
// MaxInHello) of the newest.
func (l *Log) Since(t time.Time, limit int) []*commonv1.Diagnostic {
	if limit <= 0 || limit > MaxInHello {
		limit = MaxInHello
	}
	var out []*commonv1.Diagnostic
	for _, e := range l.Entries() {
		if e.LastSeen.After(t) {
			out = append(out, e.Proto())
		}
	}
	return out[max(len(out)-limit, 0):]
}
