package process

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/pki"
)

// op is the event that a line of the log records.
type op string

const (
	opIntent    op = "intent"    // a launch is about to happen
	opLaunched  op = "launched"  // the instance's agent runs
	opRestarted op = "restarted" // the same instance, powered on again: no launch
	opEnding    op = "ending"
	opEnded     op = "ended" // a tombstone: no process of the instance runs
)

// entry is one line of the log.
type entry struct {
	Op          op        `json:"op"`
	At          time.Time `json:"at"`
	WorkspaceID string    `json:"workspace_id"`
	Epoch       int64     `json:"epoch"`
	InstanceID  string    `json:"instance_id,omitempty"`
	PID         int       `json:"pid,omitempty"`
	StartTicks  uint64    `json:"start_ticks,omitempty"` // with the pid, identifies a process uniquely
	GPUs        int32     `json:"gpus,omitempty"`
	Strays      int       `json:"strays,omitempty"` // processes that were found running after the end, and were ended
	// Fenced is the attestation by which the instance counts as ended though it may still run.
	Fenced string `json:"fenced,omitempty"`
	// Seq is the number of the line; zero: it follows the number of the line before.
	Seq int64 `json:"seq,omitempty"`
}

// instance is the state of one (workspace, epoch) according to the log.
type instance struct {
	entry

	launchedAt time.Time
	endedAt    time.Time
	straysAt   time.Time // when processes were last found after the end
	first      int64     // the number of its first line
	ending     int64     // the number of the line with which its end began
}

func (b *instance) live() bool { return b != nil && b.Op != opEnded }

type instanceKey struct {
	workspaceID string
	epoch       int64
}

// keyOf parses the id of an instance, and returns false if it is not one.
func keyOf(id string) (instanceKey, bool) {
	at := strings.LastIndexByte(id, '-')
	if at < 0 {
		return instanceKey{}, false
	}
	epoch, err := strconv.ParseInt(id[at+1:], 10, 64)
	k := instanceKey{id[:at], epoch}
	return k, err == nil && instanceID(k.workspaceID, k.epoch) == id
}

// content is what the log has: the state of each instance, and the highest epoch seen of each workspace.
type content struct {
	instances map[instanceKey]*instance // all that the log names; visited by each
	alive     map[instanceKey]*instance // those of them that have not ended; visited by live
	woken     map[instanceKey]*instance // those that have ended, and in which processes were found since
	highest   map[string]int64
	seq       int64 // the number of the last line
	visited   int   // instances that each and live have visited
}

func newContent() *content {
	return &content{
		instances: map[instanceKey]*instance{}, alive: map[instanceKey]*instance{},
		woken: map[instanceKey]*instance{}, highest: map[string]int64{},
	}
}

// each visits every instance of the log. Callers that run often use live.
func (l *content) each() iter.Seq2[instanceKey, *instance] { return l.visit(l.instances) }

// live visits the instances that have not ended.
func (l *content) live() iter.Seq2[instanceKey, *instance] { return l.visit(l.alive) }

// noticed visits the instances that have not ended and those in which processes were found after their end.
func (l *content) noticed() iter.Seq2[instanceKey, *instance] {
	return func(yield func(instanceKey, *instance) bool) {
		for _, list := range []map[instanceKey]*instance{l.alive, l.woken} {
			for k, b := range l.visit(list) {
				if !yield(k, b) {
					return
				}
			}
		}
	}
}

func (l *content) visit(list map[instanceKey]*instance) iter.Seq2[instanceKey, *instance] {
	return func(yield func(instanceKey, *instance) bool) {
		for k, b := range list {
			l.visited++
			if !yield(k, b) {
				return
			}
		}
	}
}

func (l *content) apply(e entry) {
	e.Seq = cmp.Or(e.Seq, l.seq+1)
	l.seq = max(l.seq, e.Seq)
	k := instanceKey{e.WorkspaceID, e.Epoch}
	b := l.instances[k]
	if b == nil {
		b = &instance{first: e.Seq}
		l.instances[k] = b
	}
	if (e.Op == opEnding || e.Op == opEnded) && b.ending == 0 {
		b.ending = e.Seq
	}
	e.InstanceID = cmp.Or(e.InstanceID, b.InstanceID)
	e.GPUs = cmp.Or(e.GPUs, b.GPUs)
	e.Fenced = cmp.Or(e.Fenced, b.Fenced)
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
	delete(l.alive, k)
	delete(l.woken, k)
	switch {
	case b.live():
		l.alive[k] = b
	case b.Strays > 0:
		l.woken[k] = b
	}
	l.highest[e.WorkspaceID] = max(l.highest[e.WorkspaceID], e.Epoch)
}

// launchLog is an append-only file. A replica locks it while it reads and decides, and syncs it before the decision
// takes effect. Replicas on one host share it.
type launchLog struct {
	path string
	lock *fileLock
	kept *kept // the content read last; guarded by lock
}

// kept is the content of the log as it was read, so that the next time only the lines appended since are read.
type kept struct {
	content *content
	info    os.FileInfo // of the file, after the last read or write
	whole   int64       // bytes of whole lines
	lines   int
	last    []byte // the last of them, with its number and its time
}

func newLaunchLog(dir string) *launchLog {
	return &launchLog{path: filepath.Join(dir, "launches.jsonl"), lock: newFileLock(filepath.Join(dir, "launches.lock"))}
}

// errTorn means that a whole line of the log cannot be parsed.
var errTorn = errors.New("launch log is damaged")

// with runs fn with the log locked and read. It waits for the lock until ctx ends, or for lockWait if ctx has no
// deadline, and then returns fault unavailable.
func (j *launchLog) with(ctx context.Context, fn func(l *content, write func(entry) error) error) (err error) {
	release, err := j.lock.acquire(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	f, err := os.OpenFile(j.path, os.O_CREATE|os.O_RDWR|os.O_APPEND|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("open launch log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	k, err := j.read(f)
	j.kept = nil // set again below, unless something fails
	if err != nil {
		return err
	}
	// A last line without its end was never acknowledged: the crash that tore it came before the sync returned.
	if k.info.Size() > k.whole {
		if err := f.Truncate(k.whole); err != nil {
			return fmt.Errorf("cut torn line: %w", err)
		}
	}
	if k.whole == 0 {
		// The file may be new: its directory entry must be as durable as its content.
		if err := pki.SyncDir(filepath.Dir(j.path)); err != nil {
			return fmt.Errorf("sync directory of launch log: %w", err)
		}
	}
	defer func() { j.keep(f, k) }()
	return fn(k.content, func(e entry) error {
		e.At, e.Seq = time.Now().UTC(), k.content.seq+1
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode launch: %w", err)
		}
		line = append(line, '\n')
		if _, err = f.Write(line); err == nil {
			err = f.Sync()
		}
		if err != nil {
			// Cut a partial line off, so that it does not precede the next whole one.
			return errors.Join(fmt.Errorf("write launch log: %w", err), f.Truncate(k.whole))
		}
		k.add(e, line)
		return nil
	})
}

// keep keeps the content for the next time, if the file ends with it.
func (j *launchLog) keep(f *os.File, k *kept) {
	info, err := f.Stat()
	if err == nil && info.Size() == k.whole {
		k.info, j.kept = info, k
	}
}

// read returns the content of the log. If the file has grown since the last time, and the last line that was read is
// still in its place, it reads the appended lines alone. It reads a file anew that was replaced or truncated, or was
// changed at its old length. Lines are only ever appended: read does not notice the edit of an earlier line if others
// were appended since.
func (j *launchLog) read(f *os.File) (*kept, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at launch log: %w", err)
	}
	k := j.kept
	switch {
	case k == nil || !os.SameFile(k.info, info) || info.Size() < k.whole:
		k = nil
	case info.Size() > k.whole:
		// An inode may be reused, so the last line must be unchanged at its offset.
		last := make([]byte, len(k.last))
		if _, err := f.ReadAt(last, k.whole-int64(len(last))); err != nil || !bytes.Equal(last, k.last) {
			k = nil
		}
	case !info.ModTime().Equal(k.info.ModTime()):
		k = nil
	default:
		return k, nil
	}
	if k == nil {
		k = &kept{content: newContent()}
	}
	k.info = info
	return k, k.readOn(io.NewSectionReader(f, k.whole, info.Size()-k.whole))
}

// readOn reads the whole lines that follow those that were read.
func (k *kept) readOn(f io.Reader) error {
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read launch log: %w", err)
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%w: line %d: %w", errTorn, k.lines+1, err)
		}
		k.add(e, line)
	}
}

// add applies a line that is in the file.
func (k *kept) add(e entry, line []byte) {
	k.content.apply(e)
	k.whole, k.lines, k.last = k.whole+int64(len(line)), k.lines+1, line
}
