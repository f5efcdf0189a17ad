package task

import (
	"errors"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// What a result may carry, in bytes; see the rules of TaskResult and TaskProgress.
const (
	MaxOutput = 256 << 10
	maxError  = 4000 // of 4096 characters: room for the marker
	maxNote   = 500

	marker = "... [truncated by the agent]"
)

// resultOf returns the result of a task from what its handler returned.
func (e *Executor) resultOf(j *job, out proto.Message, err error) *nodev1.TaskResult {
	msg := &nodev1.TaskResult{
		Task: j.task.Ref(), State: commonv1.TaskState_TASK_STATE_SUCCEEDED,
		FinishedAt: timestamppb.New(time.Now()),
	}
	if !j.started.IsZero() {
		msg.StartedAt = timestamppb.New(j.started)
	}
	if err != nil {
		msg.State, msg.Reason = resultOf(err)
		msg.Error = cut(clean(describe(err), maxError), maxError)
	}
	if out != nil {
		encoded, truncated, encodeErr := encodeOutput(out)
		if encodeErr != nil {
			msg.State, msg.Reason = commonv1.TaskState_TASK_STATE_FAILED, commonv1.Reason_REASON_INTERNAL
			msg.Error = "the output cannot be encoded"
		}
		msg.Output, msg.OutputTruncated = encoded, truncated
	}
	return msg
}

func superseded(j *job) *nodev1.TaskResult {
	return &nodev1.TaskResult{
		Task: j.task.Ref(), State: commonv1.TaskState_TASK_STATE_SUPERSEDED, Reason: commonv1.Reason_REASON_TASK_SUPERSEDED,
		FinishedAt: timestamppb.New(time.Now()),
	}
}

func resultOf(err error) (commonv1.TaskState, commonv1.Reason) {
	switch {
	case errors.Is(err, ErrUnknown):
		return commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, commonv1.Reason_REASON_UNSPECIFIED
	case errors.Is(err, errCancelled):
		return commonv1.TaskState_TASK_STATE_CANCELLED, commonv1.Reason_REASON_CANCEL_REQUESTED
	case errors.Is(err, errMaxRun):
		return commonv1.TaskState_TASK_STATE_FAILED, commonv1.Reason_REASON_DEADLINE_EXCEEDED
	}
	reason := fault.ReasonOf(err)
	if reason == commonv1.Reason_REASON_TASK_SUPERSEDED {
		return commonv1.TaskState_TASK_STATE_SUPERSEDED, reason
	}
	return commonv1.TaskState_TASK_STATE_FAILED, reason
}

// describe returns the error text for the control plane: a fault's public sentence, else the error. Handlers keep
// secrets out of their errors.
func describe(err error) string {
	if f, ok := fault.As(err); ok && !errors.Is(err, ErrUnknown) {
		return f.Public
	}
	return err.Error()
}

// encodeOutput encodes a handler's output. Texts are made storable first; an output that is too large loses the ends of
// its long texts, then the ends of its lists, and stays a message that can be read.
func encodeOutput(out proto.Message) ([]byte, bool, error) {
	m := proto.Clone(out)
	limits := []int{MaxOutput, 16 << 10, 1 << 10}
	const halves = 32
	for try := range len(limits) + halves {
		if try < len(limits) {
			scrub(m.ProtoReflect(), limits[try])
		} else {
			halve(m.ProtoReflect())
		}
		if encoded, err := proto.Marshal(m); err != nil || len(encoded) <= MaxOutput {
			return encoded, try > 0, err
		}
	}
	return nil, true, nil
}

// scrub makes every text of m valid UTF-8 without NUL, and cuts texts and bytes longer than limit.
func scrub(m protoreflect.Message, limit int) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			scrubMap(v.Map(), fd, limit)
		case fd.IsList():
			list := v.List()
			for i := range list.Len() {
				if fd.Message() != nil {
					scrub(list.Get(i).Message(), limit)
				} else {
					list.Set(i, scrubScalar(fd, list.Get(i), limit))
				}
			}
		case fd.Message() != nil:
			scrub(v.Message(), limit)
		case fd.Kind() == protoreflect.StringKind || fd.Kind() == protoreflect.BytesKind:
			m.Set(fd, scrubScalar(fd, v, limit))
		}
		return true
	})
}

func scrubMap(values protoreflect.Map, fd protoreflect.FieldDescriptor, limit int) {
	type pair struct {
		key   protoreflect.MapKey
		value protoreflect.Value
	}
	var pairs []pair
	values.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		pairs = append(pairs, pair{k, v})
		return true
	})
	for _, p := range pairs {
		key := p.key
		if fd.MapKey().Kind() == protoreflect.StringKind {
			key = protoreflect.ValueOfString(cut(clean(key.String(), limit), limit)).MapKey()
		}
		value := p.value
		if fd.MapValue().Message() != nil {
			scrub(value.Message(), limit)
		} else {
			value = scrubScalar(fd.MapValue(), value, limit)
		}
		values.Clear(p.key)
		values.Set(key, value)
	}
}

func scrubScalar(fd protoreflect.FieldDescriptor, v protoreflect.Value, limit int) protoreflect.Value {
	switch fd.Kind() { // numbers need nothing
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(cut(clean(v.String(), limit), limit))
	case protoreflect.BytesKind:
		if b := v.Bytes(); len(b) > limit {
			return protoreflect.ValueOfBytes(b[:limit])
		}
	}
	return v
}

// halve drops the second half of every list of m, and of every map that is large.
func halve(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			half := v.Map().Len() / 2
			v.Map().Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
				if v.Map().Len() > half {
					v.Map().Clear(k)
				}
				return true
			})
		case fd.IsList():
			v.List().Truncate(v.List().Len() / 2)
			if fd.Message() != nil {
				for i := range v.List().Len() {
					halve(v.List().Get(i).Message())
				}
			}
		case fd.Message() != nil:
			halve(v.Message())
		}
		return true
	})
}

// clean returns s as text that a database can store: valid UTF-8 without NUL. It reads only about limit bytes, so that
// a huge text costs little.
func clean(s string, limit int) string {
	if len(s) > limit+utf8.UTFMax {
		s = s[:limit+utf8.UTFMax]
	}
	if utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// cut returns s shortened to at most limit bytes, marker included, without breaking a character.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:max(limit-len(marker), 0)], "") + marker
}
