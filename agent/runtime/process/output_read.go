package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/showable"
)

// MaxOutput bounds, in bytes, one piece of output that is read.
const MaxOutput = 64 << 10

// OutputRequest names a piece of a workload's output.
type OutputRequest struct {
	WorkspaceID string
	Epoch       int64 // zero: any
	Name        string
	Previous    bool // of the run before the present one
	From        *nodev1.OutputCursor
	Max         int
}

// Output returns a piece of what a workload has written, with the values of its environment masked. It does not wait for an operation under way.
func (r *Runtime) Output(ctx context.Context, req OutputRequest) (*nodev1.WorkloadOutput, error) {
	w, err := r.deployed(req.WorkspaceID, req.Name)
	if err != nil {
		return nil, err
	}
	at := &workload{key: w.key, dir: w.dir}
	found, err := readFile(at.dir, fileSpec, &at.spec)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, absent(req.Name)
	}
	if req.Epoch != 0 && at.spec.Epoch != req.Epoch {
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "the workload on this node is of another epoch of the workspace")
	}
	_, _ = readFile(at.dir, fileDesired, &at.want)
	lock, err := lockOutput(ctx, at.dir, unix.LOCK_SH)
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the output is being changed: ask again", fault.Cause(err))
	}
	defer func() { _ = lock.Close() }()
	var info outputInfo
	found, err = readFile(at.dir, fileOutputInfo, &info)
	if err != nil {
		return nil, err
	}
	if !found { // of a shim of an earlier version
		info.Masked = secretsOf(at.spec)
	}
	s := at.state()
	present := recorded{runOutput: info.runOutput, path: filepath.Join(at.dir, fileOutput)}
	present.over = s.Run == present.Run && s.HasExited || s.Run == "" && !at.want.Run || !found && s.HasExited
	present.ExitCode = s.ExitCode
	var previous *recorded
	if info.Previous != nil {
		previous = &recorded{runOutput: *info.Previous, path: filepath.Join(at.dir, filePrevious), over: true}
	}
	out, err := choose(req, &present, previous)
	if err != nil {
		return nil, err
	}
	out.Phase, out.Restarts = r.phase(at, s), s.Restarts
	return out, nil
}

// choose reads of the run that the request means. Whoever follows the output and was at the run before the present one is given its end first.
func choose(req OutputRequest, present, previous *recorded) (*nodev1.WorkloadOutput, error) {
	from := req.From
	if req.Previous {
		if previous == nil {
			return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("no output of a run before the present one of workload %q is kept", req.Name),
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
		if err != nil || len(out.GetData()) > 0 || out.GetDroppedBytes() > 0 {
			if err == nil && !out.GetMore() {
				out.Next, out.More = &nodev1.OutputCursor{Run: present.Run}, true
			}
			return out, err
		}
		return present.read(&nodev1.OutputCursor{Run: present.Run}, req.Max)
	}
	out, err := present.read(&nodev1.OutputCursor{Run: present.Run}, req.Max)
	if err == nil {
		out.Restarted = true
	}
	return out, err
}

// recorded is the output of one run on disk.
type recorded struct {
	runOutput
	path string
	over bool // the run has ended: nothing is added
}

// stretch is an unbroken part of a run's output, in one file or two.
type stretch struct{ from, to int64 }

// stretches returns what is on disk: the former piece and the file, joined where nothing was lost between them.
func (o *recorded) stretches() []stretch {
	file := stretch{o.Cut, o.Cut + sizeOf(o.path)}
	n := sizeOf(o.path + formerPiece)
	if n == 0 || o.Cut == 0 {
		return []stretch{file}
	}
	piece := stretch{o.PieceAt, o.PieceAt + n}
	if piece.to >= file.from {
		return []stretch{{piece.from, file.to}}
	}
	return []stretch{piece, file}
}

// read returns what follows a cursor, or the end.
func (o *recorded) read(from *nodev1.OutputCursor, most int) (*nodev1.WorkloadOutput, error) {
	if most <= 0 || most > MaxOutput {
		most = MaxOutput
	}
	all := o.stretches()
	end := all[len(all)-1].to
	asked := from.GetOffset()
	if from == nil {
		asked = max(all[len(all)-1].from, end-int64(most))
	}
	at, in := min(asked, end), all[len(all)-1]
	for _, s := range all {
		if at < s.to {
			at, in = max(at, s.from), s
			break
		}
	}
	out := &nodev1.WorkloadOutput{Run: o.Run, Offset: at, DroppedBytes: max(0, at-asked)}
	if from == nil {
		out.DroppedBytes = at
	}
	if !o.StartedAt.IsZero() {
		out.StartedAt = timestamppb.New(o.StartedAt)
	}
	mask := showable.NewMask(o.Masked)
	margin := int64(mask.Margin())
	to := min(at+int64(most), in.to)
	begin, stop := max(in.from, at-margin), min(in.to, to+margin)
	window, err := o.bytes(begin, stop)
	if err != nil {
		return nil, err
	}
	stop = begin + int64(len(window)) // a file that was cut meanwhile by somebody else is shorter
	to = min(to, stop)
	last := to == end
	if last && !o.over {
		to -= int64(mask.Held(window[:to-begin]))
	}
	to = max(at, to)
	if !last || !o.over {
		to -= int64(partial(window[at-begin : to-begin]))
	}
	// Where something is missing, or the run ended in the middle of a value, a part of it may stand alone.
	head := begin == in.from && begin > 0
	tail := stop == in.to && (in.to < end || o.over)
	out.Data = mask.Piece(window, int(at-begin), int(to-begin), head, tail)
	out.Next, out.More = &nodev1.OutputCursor{Run: o.Run, Offset: to}, to < end && (o.over || !last)
	if o.over && to == end {
		out.Ended, out.ExitCode = true, o.ExitCode
	}
	return out, nil
}

// partial returns how many bytes at the end are the beginning of a character.
func partial(data []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(data)-1); n++ {
		if utf8.RuneStart(data[len(data)-n]) {
			if utf8.FullRune(data[len(data)-n:]) {
				return 0
			}
			return n
		}
	}
	return 0
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
	f, err := os.Open(path) //nolint:gosec // the agent's own directory
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

// LastOutput returns the end of what the last run that exited has written, fit to be kept and shown: at most showable.MaxTail bytes. It is empty if none
// has exited, or nothing can be read.
func (r *Runtime) LastOutput(ctx context.Context, workspaceID, name string) string {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return ""
	}
	s := w.state()
	if !s.HasExited && s.Restarts == 0 {
		return ""
	}
	const raw = 4 * showable.MaxTail // most of it may be colours
	req := OutputRequest{WorkspaceID: workspaceID, Name: name, Previous: !s.HasExited, Max: raw}
	out, err := r.Output(ctx, req)
	if err == nil && !req.Previous && out.GetRun() != s.Run { // the next run has its file already
		req.Previous = true
		out, err = r.Output(ctx, req)
	}
	if err != nil {
		return ""
	}
	return showable.Tail(showable.Clean(out.GetData()), showable.MaxTail)
}
