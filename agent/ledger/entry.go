package ledger

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Key names one attempt of one task.
type Key struct {
	TaskID  string
	Attempt int32
}

func (k Key) String() string { return fmt.Sprintf("%s/%d", k.TaskID, k.Attempt) }

// bytes returns the key in the file: the task's id and the attempt, so that the attempts of a task are adjacent and
// tasks are in the order in which they were made.
func (k Key) bytes() []byte { return fmt.Appendf(nil, "%s/%010d", k.TaskID, k.Attempt) }

// State is how far an attempt has come. It only grows.
type State uint8

// The states of an attempt in the ledger.
const (
	StateDelivered State = 1 // on disk, nothing begun
	StateStarted   State = 2 // its effect may have begun
	StateFinished  State = 3 // it has a result that is not yet acknowledged
	StateAcked     State = 4 // the control plane has committed the result
)

// Delivery is a verified task as it is stored.
type Delivery struct {
	Key         Key
	Type        commonv1.TaskType
	WorkspaceID string // empty for tasks about the node itself: they have no epoch
	Epoch       int64
	OpSeq       int64
	ExpiresAt   time.Time

	// Envelope, Signature and KeyID are the task as it was signed, so that it is verified again before it runs after a
	// restart.
	Envelope  []byte
	Signature []byte
	KeyID     string

	CorrelationID string
	WorkflowID    string

	// Start asks for the started mark in the same commit: the caller runs the task at once. A task that is superseded, or
	// in the ledger already, is not marked.
	Start bool
}

// Exempt reports whether a type of task is exempt from the epoch and op_seq rule: such a task changes nothing, so that
// it may run at any time.
func Exempt(t commonv1.TaskType) bool {
	switch t { // every other type has an effect
	case commonv1.TaskType_TASK_TYPE_PROBE_NOOP, commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS,
		commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT:
		return true
	default:
		return false
	}
}

// Entry is the ledger's record of one attempt.
type Entry struct {
	Delivery

	State       State
	DeliveredAt time.Time // the host's clock
	StartedAt   time.Time
	FinishedAt  time.Time
	Outcome     commonv1.TaskState // of a finished attempt
	Result      []byte             // of a finished attempt: the encoded TaskResult
}

const (
	fieldTaskID        protowire.Number = 1
	fieldAttempt       protowire.Number = 2
	fieldType          protowire.Number = 3
	fieldWorkspaceID   protowire.Number = 4
	fieldEpoch         protowire.Number = 5
	fieldOpSeq         protowire.Number = 6
	fieldExpiresAt     protowire.Number = 7
	fieldEnvelope      protowire.Number = 8
	fieldSignature     protowire.Number = 9
	fieldKeyID         protowire.Number = 10
	fieldCorrelationID protowire.Number = 11
	fieldWorkflowID    protowire.Number = 12
	fieldState         protowire.Number = 13
	fieldDeliveredAt   protowire.Number = 14
	fieldStartedAt     protowire.Number = 15
	fieldFinishedAt    protowire.Number = 16
	fieldOutcome       protowire.Number = 17
	fieldResult        protowire.Number = 18
)

// encode writes the entry as tagged fields, so that an agent of another version reads the fields that it has and skips
// the others.
func (e *Entry) encode() []byte {
	out := make([]byte, 0, 256+len(e.Envelope)+len(e.Result))
	text := func(n protowire.Number, s string) {
		if s != "" {
			out = protowire.AppendString(protowire.AppendTag(out, n, protowire.BytesType), s)
		}
	}
	raw := func(n protowire.Number, b []byte) {
		if len(b) > 0 {
			out = protowire.AppendBytes(protowire.AppendTag(out, n, protowire.BytesType), b)
		}
	}
	number := func(n protowire.Number, v int64) {
		if v != 0 {
			// two's complement, read back the same way
			out = protowire.AppendVarint(protowire.AppendTag(out, n, protowire.VarintType), uint64(v))
		}
	}
	moment := func(n protowire.Number, t time.Time) {
		if !t.IsZero() {
			number(n, t.UnixMicro())
		}
	}
	text(fieldTaskID, e.Key.TaskID)
	number(fieldAttempt, int64(e.Key.Attempt))
	number(fieldType, int64(e.Type))
	text(fieldWorkspaceID, e.WorkspaceID)
	number(fieldEpoch, e.Epoch)
	number(fieldOpSeq, e.OpSeq)
	moment(fieldExpiresAt, e.ExpiresAt)
	raw(fieldEnvelope, e.Envelope)
	raw(fieldSignature, e.Signature)
	text(fieldKeyID, e.KeyID)
	text(fieldCorrelationID, e.CorrelationID)
	text(fieldWorkflowID, e.WorkflowID)
	number(fieldState, int64(e.State))
	moment(fieldDeliveredAt, e.DeliveredAt)
	moment(fieldStartedAt, e.StartedAt)
	moment(fieldFinishedAt, e.FinishedAt)
	number(fieldOutcome, int64(e.Outcome))
	raw(fieldResult, e.Result)
	return out
}

var errEntry = errors.New("entry is not readable")

// decode copies everything out of in, which may be the file's own memory.
func decode(in []byte) (Entry, error) {
	var e Entry
	for len(in) > 0 {
		n, kind, size := protowire.ConsumeTag(in)
		if size < 0 {
			return Entry{}, errEntry
		}
		in = in[size:]
		switch kind {
		case protowire.BytesType:
			value, length := protowire.ConsumeBytes(in)
			if length < 0 {
				return Entry{}, errEntry
			}
			in = in[length:]
			e.setBytes(n, value)
		case protowire.VarintType:
			value, length := protowire.ConsumeVarint(in)
			if length < 0 {
				return Entry{}, errEntry
			}
			in = in[length:]
			e.setNumber(n, int64(value)) // written from an int64
		default:
			return Entry{}, errEntry
		}
	}
	if e.Key.TaskID == "" || e.Key.Attempt <= 0 || e.State < StateDelivered || e.State > StateAcked {
		return Entry{}, errEntry
	}
	return e, nil
}

func (e *Entry) setBytes(n protowire.Number, value []byte) {
	switch n {
	case fieldTaskID:
		e.Key.TaskID = string(value)
	case fieldWorkspaceID:
		e.WorkspaceID = string(value)
	case fieldKeyID:
		e.KeyID = string(value)
	case fieldCorrelationID:
		e.CorrelationID = string(value)
	case fieldWorkflowID:
		e.WorkflowID = string(value)
	case fieldEnvelope:
		e.Envelope = append([]byte(nil), value...)
	case fieldSignature:
		e.Signature = append([]byte(nil), value...)
	case fieldResult:
		e.Result = append([]byte(nil), value...)
	}
}

// setNumber sets the field n, whose number was written from the type that it is converted to.
func (e *Entry) setNumber(n protowire.Number, value int64) {
	switch n {
	case fieldAttempt:
		e.Key.Attempt = int32(value)
	case fieldType:
		e.Type = commonv1.TaskType(value)
	case fieldEpoch:
		e.Epoch = value
	case fieldOpSeq:
		e.OpSeq = value
	case fieldExpiresAt:
		e.ExpiresAt = time.UnixMicro(value).UTC()
	case fieldState:
		e.State = State(value)
	case fieldDeliveredAt:
		e.DeliveredAt = time.UnixMicro(value).UTC()
	case fieldStartedAt:
		e.StartedAt = time.UnixMicro(value).UTC()
	case fieldFinishedAt:
		e.FinishedAt = time.UnixMicro(value).UTC()
	case fieldOutcome:
		e.Outcome = commonv1.TaskState(value)
	}
}
