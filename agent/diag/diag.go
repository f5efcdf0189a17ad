// Package diag owns the agent's diagnostic record: what went wrong on this host, written down before each retry, for the time when the control plane
// cannot be told.
//
// It believes nothing that it reads back beyond its own bounds: the file may have been forged by anyone with access to the host, and its content is
// evidence, not truth. It never holds secrets: details lose tokens, query strings, credentials in URLs and key material before they are stored. It
// never decides what a diagnostic means.
//
// Guarantees: what Record answered is on disk; the file has mode 0600, at most MaxRecords records and MaxBytes bytes, none older than MaxAge; the
// same code and detail in a row is one record with a count; a file that cannot be read is set aside, never an obstacle.
package diag

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/names"
)

// The bounds of the record.
const (
	MaxRecords = 256
	MaxBytes   = 256 << 10
	MaxAge     = 7 * 24 * time.Hour
	MaxDetail  = 512
	MaxInHello = 64 // what one frame carries
)

// Entry is one record: what was seen, first and last when, how often in a row, and how long the agent waits before it tries again.
type Entry struct {
	Code      string        `json:"code"`
	Detail    string        `json:"detail"`
	FirstSeen time.Time     `json:"first_seen"`
	LastSeen  time.Time     `json:"last_seen"`
	Count     int64         `json:"count"`
	NextRetry time.Duration `json:"next_retry_nanoseconds"`
}

// Config says where the record is.
type Config struct {
	Path string
	Now  func() time.Time // the host's clock; nil means time.Now
}

// Log is safe for concurrent use by one process.
type Log struct {
	path string
	now  func() time.Time

	mu      sync.Mutex
	entries []Entry
}

// Open reads what is there. A record that cannot be read is renamed to `<path>.bad` and a new one begins.
func Open(cfg Config) (*Log, error) {
	l := &Log{path: cfg.Path, now: cfg.Now}
	if l.now == nil {
		l.now = time.Now
	}
	if cfg.Path == "" {
		return nil, errors.New("open diagnostic record: no path")
	}
	entries, err := Read(cfg.Path, l.now())
	if err != nil {
		if err := os.Rename(cfg.Path, cfg.Path+".bad"); err != nil {
			return nil, fmt.Errorf("set unreadable diagnostic record aside: %w", err)
		}
	}
	l.entries = entries
	return l, nil
}

// Read answers the entries of a record, oldest first, without taking anything in it on trust: no symbolic link, no more than MaxBytes, every text
// cleaned, old ones left out. No file is no entries.
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
	var entries []Entry
	if err := json.Unmarshal(data, &entries); err != nil {
		return nil, fmt.Errorf("read diagnostic record: %w", err)
	}
	for i := range entries {
		entries[i].Detail = Sanitise(entries[i].Detail)
	}
	return bound(entries, now), nil
}

// bound leaves out what is old, unknown or too much. Details are clean already.
func bound(entries []Entry, now time.Time) []Entry {
	out := make([]Entry, 0, len(entries))
	for _, e := range entries {
		if _, err := names.Parse[commonv1.DiagnosticCode](e.Code); err != nil || now.Sub(e.LastSeen) > MaxAge || e.LastSeen.Sub(now) > MaxAge {
			continue
		}
		e.Count = max(e.Count, 1)
		e.NextRetry = min(max(e.NextRetry, 0), 24*time.Hour)
		out = append(out, e)
	}
	if len(out) > MaxRecords {
		out = out[len(out)-MaxRecords:]
	}
	return slices.Clip(out)
}

// Record notes a diagnostic and returns when it is on disk. Call it before the retry that nextRetry announces.
func (l *Log) Record(code commonv1.DiagnosticCode, detail string, nextRetry time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	e := Entry{Code: names.Of(code), Detail: Sanitise(detail), FirstSeen: now, LastSeen: now, Count: 1, NextRetry: nextRetry}
	next := slices.Clone(l.entries)
	if n := len(next); n > 0 && next[n-1].Code == e.Code && next[n-1].Detail == e.Detail {
		e.FirstSeen, e.Count = next[n-1].FirstSeen, next[n-1].Count+1
		next[n-1] = e
	} else {
		next = append(next, e)
	}
	next = bound(next, now)
	if err := l.write(next); err != nil {
		return err
	}
	l.entries = next
	return failpoint.Hit("agent.diag.after_fsync")
}

// write replaces the file so that a crash leaves the old or the new one.
func (l *Log) write(entries []Entry) error {
	data, err := json.Marshal(entries)
	for err == nil && len(data) > MaxBytes && len(entries) > 1 {
		entries = entries[len(entries)/4+1:]
		data, err = json.Marshal(entries)
	}
	if err != nil {
		return fmt.Errorf("encode diagnostic record: %w", err)
	}
	dir := filepath.Dir(l.path)
	f, err := os.CreateTemp(dir, ".diagnostics-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write diagnostic record: %w", err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), l.path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write diagnostic record: %w", err)
	}
	d, err := os.Open(dir) //nolint:gosec // the agent's own directory
	if err != nil {
		return fmt.Errorf("sync diagnostic record: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync diagnostic record: %w", err)
	}
	return nil
}

// Entries answers all records, oldest first.
func (l *Log) Entries() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.entries)
}

// Since answers the records that were seen after t as they go into Hello or a report, newest last, at most limit (0: MaxInHello) of the newest.
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
	if len(out) > limit {
		out = out[len(out)-limit:]
	}
	return out
}

// Proto answers the entry as it travels.
func (e Entry) Proto() *commonv1.Diagnostic {
	code, err := names.Parse[commonv1.DiagnosticCode](e.Code)
	if err != nil {
		code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_UNSPECIFIED
	}
	return &commonv1.Diagnostic{
		Code: code, Detail: e.Detail, ObservedAt: timestamppb.New(e.LastSeen), Count: e.Count, NextRetry: durationpb.New(e.NextRetry),
	}
}
