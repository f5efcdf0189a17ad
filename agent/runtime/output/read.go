package output

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/runtime/filelock"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/showable"
)

// MaxPiece bounds, in bytes, one piece of output that is read.
const MaxPiece = 64 << 10

// Request names a piece of a workload's output.
type Request struct {
	Previous bool // of the run before the present one
	From     *nodev1.OutputCursor
	Max      int
}

// Source is a workload whose output is read.
type Source struct {
	Name   string       // of the workload
	Dir    string       // of the files
	Masked []string     // the values that are hidden in output of which no recorder noted any
	State  func() State // called while no other run can begin
}

// State is the state of a workload, as its shim wrote it last.
type State struct {
	Run       string
	HasExited bool // ExitCode is set
	ExitCode  int32
	Stopped   bool // the workload is not to run
}

// Reader reads output. It is safe for concurrent use.
type Reader struct{ masks maskCache }

// Read returns a piece of a workload's output, with the masked values hidden.
func (r *Reader) Read(ctx context.Context, src Source, req Request) (*nodev1.WorkloadOutput, error) {
	piece, err := r.excerpt(ctx, src, req)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the caller does not wait for the output any more",
			fault.Cause(err))
	}
	return piece.masked(), nil
}

// excerpt reads the requested piece, and the workload's state with it, under the shared lock of the files. A start
// waits for that lock, so the caller masks the piece afterwards.
func (r *Reader) excerpt(ctx context.Context, src Source, req Request) (*excerpt, error) {
	lock, err := filelock.Lock(ctx, filepath.Join(src.Dir, fileLock), unix.LOCK_SH)
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the output is being changed: ask again",
			fault.Cause(err))
	}
	defer func() { _ = lock.Close() }()
	var files contents
	found, err := jsonfile.Read(src.Dir, InfoFile, &files)
	if err != nil {
		return nil, err
	}
	if !found { // of a shim of an earlier version
		files.Masked = src.Masked
	}
	s := src.State()
	present := &recorded{runFile: files.runFile, path: filepath.Join(src.Dir, filePresent), masks: &r.masks}
	present.over = s.Run == present.Run && s.HasExited || s.Run == "" && s.Stopped || !found && s.HasExited
	present.ExitCode = s.ExitCode
	var previous *recorded
	switch {
	case files.moved(src.Dir): // a start of the next run was not completed
		present.path, present.over = filepath.Join(src.Dir, filePrevious), true
	case files.Previous != nil:
		previous = &recorded{
			runFile: *files.Previous, path: filepath.Join(src.Dir, filePrevious), over: true,
			masks: &r.masks,
		}
	}
	if present.runFile, err = present.finished(present.path); err != nil {
		return nil, err
	}
	return choose(src.Name, req, present, previous)
}

// choose reads from the run that the request means. A caller that follows the output with a cursor in the previous run
// gets the rest of that run first.
func choose(name string, req Request, present, previous *recorded) (*excerpt, error) {
	from := req.From
	if req.Previous {
		if previous == nil {
			return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND,
				fmt.Sprintf("no output of a run before the present one of workload %q is kept", name),
				fault.Remedy("ask without --previous"))
		}
		if from != nil && from.GetRun() != previous.Run {
			from = nil
		}
		return previous.read(from, req.Max)
	}
	if from == nil || from.GetRun() == present.Run {
		return present.read(from, req.Max)
	}
	if previous != nil && from.GetRun() == previous.Run {
		out, err := previous.read(from, req.Max)
		if err != nil {
			return nil, err
		}
		if out.to > out.at || out.dropped > 0 {
			out.then = present.Run
			return out, nil
		}
		return present.read(&nodev1.OutputCursor{Run: present.Run}, req.Max)
	}
	out, err := present.read(&nodev1.OutputCursor{Run: present.Run}, req.Max)
	if err == nil {
		out.restarted = true
	}
	return out, err
}

// recorded is the output of one run on disk.
type recorded struct {
	runFile
	path  string
	over  bool // the run has ended: its output does not grow
	masks *maskCache
}

// stretch is an unbroken part of a run's output, in one file.
type stretch struct{ from, to int64 }

// stretches returns the parts of the output on disk: the former piece and the file. They are never joined: the workload
// may have written between the last read of the file's size and its cut.
func (o *recorded) stretches() []stretch {
	file := stretch{o.Cut, o.Cut + sizeOf(o.path)}
	piece := stretch{o.PieceAt, o.PieceAt + sizeOf(o.path+formerPiece)}
	// a part in both was copied by a rotation that did not get to the cut
	if piece.from == piece.to || piece.to > file.from {
		return []stretch{file}
	}
	return []stretch{piece, file}
}

// excerpt is a piece of a run's output as it is on disk, with as much around it as masking it requires.
type excerpt struct {
	run       *recorded
	mask      showable.Mask
	window    []byte
	begin     int64 // of the window
	at, to    int64 // the piece
	dropped   int64 // requested bytes before the piece that are not kept
	end       int64 // of the output so far
	last      bool  // the piece reaches to the end
	cutBefore bool  // output before the window was not read, or is missing
	cutBehind bool  // output behind the window was not read, or is missing
	grows     bool  // the window reaches to the end, and more may be written
	restarted bool
	then      string // the run that follows once this one is read; empty if none is asked for
}

// read returns the output behind a cursor, or without one the end of the output, at most most bytes.
func (o *recorded) read(from *nodev1.OutputCursor, most int) (*excerpt, error) {
	if most <= 0 || most > MaxPiece {
		most = MaxPiece
	}
	all := o.stretches()
	end := all[len(all)-1].to
	asked := from.GetOffset()
	if from == nil {
		newest := all[len(all)-1]
		if newest.from == newest.to { // the file is empty since it was cut
			newest = all[0]
		}
		asked = max(newest.from, newest.to-int64(most))
	}
	at, in := min(asked, end), all[len(all)-1]
	for _, s := range all {
		if at < s.to {
			at, in = max(at, s.from), s
			break
		}
	}
	out := &excerpt{run: o, at: at, dropped: max(0, at-asked), mask: o.masks.of(o.Masked)}
	if from == nil {
		out.dropped = at
	}
	to := min(at+int64(most), in.to)
	if err := out.see(in, to); err != nil {
		return nil, err
	}
	out.last, out.end = out.to == end, end
	// Where output is missing, or the run ended in the middle of a value, the output may have a part of a value.
	out.cutBefore = out.cutBefore || out.begin == in.from && out.begin > 0
	reaches := out.begin+int64(len(out.window)) == in.to
	out.cutBehind = out.cutBehind || reaches && (in.to < end || o.over)
	out.grows = reaches && in.to == end && !o.over
	return out, nil
}

// maxAround bounds how much is read around a piece beyond the longest value: text inside of a value that is not shown,
// such as escape sequences, may be as long.
const maxAround = 64 << 10

// see reads the piece up to an offset, and as much around it as masking it requires.
func (e *excerpt) see(in stretch, to int64) error {
	margin := int64(e.mask.Margin())
	before, behind := margin+min(margin, 1)*512, margin
	for {
		begin, stop := max(in.from, e.at-before), min(in.to, to+behind)
		window, err := e.run.bytes(begin, stop)
		if err != nil {
			return err
		}
		if stop = begin + int64(len(window)); stop < to { // a file that another process has cut meanwhile is shorter
			to = max(e.at, stop)
			in.to = stop
		}
		if stop < e.at {
			e.window, e.begin, e.to = nil, e.at, e.at
			return nil
		}
		whole := begin == in.from
		known := whole
		if !whole { // No escape sequence extends beyond the end of a line: behind one it is certain what is text.
			if line := bytes.IndexByte(window[:e.at-begin], '\n'); line >= 0 {
				window, begin, known = window[line+1:], begin+int64(line)+1, true
			}
		}
		e.window, e.begin, e.to = window, begin, to
		enoughBefore, enoughBehind := e.mask.Around(window, int(e.at-begin), int(to-begin), known)
		enoughBefore, enoughBehind = enoughBefore || whole, enoughBehind || stop == in.to
		if (enoughBefore || before >= margin+maxAround) && (enoughBehind || behind >= margin+maxAround) {
			e.cutBefore, e.cutBehind = !enoughBefore, !enoughBehind
			return nil
		}
		if !enoughBefore {
			before = min(4*before, margin+maxAround)
		}
		if !enoughBehind {
			behind = min(4*behind, margin+maxAround)
		}
	}
}

// masked returns the piece as it may be shown.
func (e *excerpt) masked() *nodev1.WorkloadOutput {
	run, to, waits := e.run, e.to, false
	if e.grows {
		shown := max(e.at, e.begin+int64(len(e.window)-e.mask.Held(e.window, e.cutBefore)))
		waits = shown < to
		to = min(to, shown)
	}
	if to == e.to && to < e.end {
		if n := int64(showable.Unfinished(e.window[:to-e.begin])); to-n > e.at {
			to -= n
		}
	}
	out := &nodev1.WorkloadOutput{
		Run: run.Run, Offset: e.at, DroppedBytes: e.dropped, Restarted: e.restarted,
		Data: e.mask.Piece(e.window, int(e.at-e.begin), int(to-e.begin), e.cutBefore, e.cutBehind),
		Next: &nodev1.OutputCursor{Run: run.Run, Offset: to},
		More: to < e.end && (run.over || !e.last) && !waits,
	}
	if !run.StartedAt.IsZero() {
		out.StartedAt = timestamppb.New(run.StartedAt)
	}
	if run.over && to == e.end {
		out.Ended, out.ExitCode = true, run.ExitCode
	}
	if e.then != "" && !out.GetMore() {
		out.Next, out.More = &nodev1.OutputCursor{Run: e.then}, true
	}
	return out
}

// bytes reads a part of the run's output, from the former piece and the file.
func (o *recorded) bytes(from, to int64) ([]byte, error) {
	var out []byte
	if from < o.Cut {
		data, err := readAt(o.path+formerPiece, from-o.PieceAt, min(to, o.Cut)-from)
		if err != nil {
			return nil, err
		}
		out = data
		from = o.Cut
	}
	if to <= from {
		return out, nil
	}
	data, err := readAt(o.path, from-o.Cut, to-from)
	return append(out, data...), err
}

func readAt(path string, at, n int64) ([]byte, error) {
	f, err := os.Open(path) // the agent's own directory
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read output: %w", err)
	}
	defer func() { _ = f.Close() }()
	data := make([]byte, max(0, n))
	got, err := f.ReadAt(data, max(0, at))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read output: %w", err)
	}
	return data[:got], nil
}
