package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/pki"
)

// op is what a line of the journal records.
type op string

const (
	opIntent    op = "intent"    // a launch is about to happen
	opLaunched  op = "launched"  // the box's agent runs
	opRestarted op = "restarted" // the same box, powered on again: no launch
	opEnding    op = "ending"
	opEnded     op = "ended" // a tombstone: nothing of the box runs any more
)

// entry is one line of the journal.
type entry struct {
	Op          op        `json:"op"`
	At          time.Time `json:"at"`
	WorkspaceID string    `json:"workspace_id"`
	Epoch       int64     `json:"epoch"`
	InstanceID  string    `json:"instance_id,omitempty"`
	PID         int       `json:"pid,omitempty"`
	StartTicks  uint64    `json:"start_ticks,omitempty"` // with the pid, names a process for ever
	GPUs        int32     `json:"gpus,omitempty"`
	Strays      int       `json:"strays,omitempty"` // processes that were found running after the end, and were ended
	Fenced      string    `json:"fenced,omitempty"` // the word on which the box counts as ended though it may still run
	Seq         int64     `json:"seq,omitempty"`    // the number of the line; a line that has none is numbered by its place
}

// box is where one (workspace, epoch) stands by the journal.
type box struct {
	entry

	launchedAt time.Time
	endedAt    time.Time
	straysAt   time.Time // when processes were last found after the end
	first      int64     // the number of its first line
	ending     int64     // the number of the line with which its end began
}

func (b *box) live() bool { return b != nil && b.Op != opEnded }

type boxKey struct {
	workspaceID string
	epoch       int64
}

// ledger is the journal as read: who stands where, and the highest epoch seen of each workspace.
type ledger struct {
	boxes   map[boxKey]*box
	highest map[string]int64
	seq     int64 // the number of the last line
}

func (l *ledger) apply(e entry) {
	if e.Seq == 0 {
		e.Seq = l.seq + 1
	}
	l.seq = max(l.seq, e.Seq)
	k := boxKey{e.WorkspaceID, e.Epoch}
	b := l.boxes[k]
	if b == nil {
		b = &box{first: e.Seq}
		l.boxes[k] = b
	}
	if (e.Op == opEnding || e.Op == opEnded) && b.ending == 0 {
		b.ending = e.Seq
	}
	if e.InstanceID == "" {
		e.InstanceID = b.InstanceID
	}
	if e.GPUs == 0 {
		e.GPUs = b.GPUs
	}
	if e.Fenced == "" {
		e.Fenced = b.Fenced
	}
	if e.PID == 0 {
		e.PID, e.StartTicks = b.PID, b.StartTicks
	}
	b.entry = e
	switch e.Op {
	case opLaunched:
		b.launchedAt = e.At
	case opEnded:
		if b.endedAt.IsZero() {
			b.endedAt = e.At
		}
		if e.Strays > 0 {
			b.straysAt = e.At
		}
	default:
	}
	l.highest[e.WorkspaceID] = max(l.highest[e.WorkspaceID], e.Epoch)
}

// journal is an append-only file, locked by whoever reads it to decide and synced before a decision takes effect. Replicas on one host share it.
type journal struct {
	path string
	lock *fileLock
}

func newJournal(dir string) *journal {
	return &journal{path: filepath.Join(dir, "launches.jsonl"), lock: newFileLock(filepath.Join(dir, "launches.lock"))}
}

// errTorn says that the journal has a line in its middle that is none.
var errTorn = errors.New("launch ledger is damaged")

// with runs fn with the journal locked and read. It waits for the lock as long as ctx lets it, and fault unavailable says that it did so in vain.
func (j *journal) with(ctx context.Context, fn func(l *ledger, write func(entry) error) error) (err error) {
	release, err := j.lock.acquire(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	f, err := os.OpenFile(j.path, os.O_CREATE|os.O_RDWR|os.O_APPEND|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("open launch ledger: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	l, whole, err := read(f)
	if err != nil {
		return err
	}
	// A last line without its end was never acknowledged to anybody: the crash that tore it came before the sync returned.
	if err := f.Truncate(whole); err != nil {
		return fmt.Errorf("cut torn line: %w", err)
	}
	if whole == 0 {
		// The file may be new: its name must be as durable as what is written into it.
		if err := pki.SyncDir(filepath.Dir(j.path)); err != nil {
			return fmt.Errorf("sync directory of launch ledger: %w", err)
		}
	}
	return fn(l, func(e entry) error {
		e.At, e.Seq = time.Now().UTC(), l.seq+1
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode launch: %w", err)
		}
		line = append(line, '\n')
		if _, err = f.Write(line); err == nil {
			err = f.Sync()
		}
		if err != nil {
			// A half line must not stand before the next whole one.
			return errors.Join(fmt.Errorf("write launch ledger: %w", err), f.Truncate(whole))
		}
		whole += int64(len(line))
		l.apply(e)
		return nil
	})
}

// read answers the ledger and how many bytes of the file are whole lines.
func read(f io.Reader) (*ledger, int64, error) {
	l := &ledger{boxes: map[boxKey]*box{}, highest: map[string]int64{}}
	r := bufio.NewReader(f)
	var whole int64
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return l, whole, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("read launch ledger: %w", err)
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, 0, fmt.Errorf("%w: line %d: %w", errTorn, n, err)
		}
		l.apply(e)
		whole += int64(len(line))
	}
}
