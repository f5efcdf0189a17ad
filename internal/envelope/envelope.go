// Package envelope owns the signed form of a task: lifecycle signs it when a task is leased, and an agent verifies it
// before it runs anything.
//
// It trusts the keys of its VerifierSet and nothing in the message: the algorithm is always Ed25519, never chosen by
// the sender, and the key id only selects one of the configured keys. Of whether a task should run it decides only node
// and time window: the agent checks epochs and its ledger.
//
// Guarantees: the encoding is canonical (one byte string per task, and decoding refuses any other), versioned and
// domain-separated, so that a signature over a task can never be taken for a signature over anything else. Verify
// decodes only bytes whose signature it has verified.
package envelope

import (
	"crypto/ed25519"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// domain begins every signed byte string. The zero byte ends it, so that no domain is a prefix of another.
const domain = "gpuaas.mesh/task-envelope\x00"

// Version is the version of the encoding. An agent refuses any other, because a downgrade may be an attack; only an
// update task can change the version that it accepts.
const Version = 1

// MaxPayload bounds a task's payload in bytes.
const MaxPayload = 512 << 10

// Task is what is signed: everything on which an agent bases its decision.
type Task struct {
	TaskID      string
	Type        string // as in JSON and SQL: `workload.deploy`
	NodeID      string
	WorkspaceID string // empty for tasks about the node itself
	Epoch       int64  // of the workspace
	OpSeq       int64  // of the workspace
	NotBefore   time.Time
	ExpiresAt   time.Time // the last moment to start
	Attempt     int32
	Payload     []byte
}

// Signed is a task as it is sent to an agent.
type Signed struct {
	Bytes     []byte
	Signature []byte
	KeyID     string
}

// Sign encodes and signs a task. Times are kept to the microsecond.
func Sign(key Key, task Task) (Signed, error) {
	encoded, err := encode(task)
	if err != nil {
		return Signed{}, err
	}
	return Signed{Bytes: encoded, Signature: ed25519.Sign(key.private, message(encoded)), KeyID: key.id}, nil
}

// Verify returns the task of an envelope that a key of the set has signed. Every refusal is fault
// task_signature_invalid, whatever was wrong, so that a forger learns nothing from it.
func Verify(set *VerifierSet, encoded, signature []byte, keyID string) (Task, error) {
	public, ok := set.Key(keyID)
	if !ok {
		return Task{}, invalid("the key is not in the verifier set", nil)
	}
	if len(signature) != ed25519.SignatureSize || !ed25519.Verify(public, message(encoded), signature) {
		return Task{}, invalid("the signature does not verify", nil)
	}
	task, err := decode(encoded)
	if err != nil {
		return Task{}, invalid("the signed bytes are no task of this version", err)
	}
	return task, nil
}

// Check refuses a task that is for another node (fault task_wrong_node), or that may not start now (fault
// task_outside_window). now is server time as the agent estimates it.
func (t Task) Check(nodeID string, now time.Time) error {
	if t.NodeID != nodeID {
		return fault.New(commonv1.Reason_REASON_TASK_WRONG_NODE, "")
	}
	if now.Before(t.NotBefore) {
		return fault.New(commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW, "the task may not start yet")
	}
	if now.After(t.ExpiresAt) {
		return fault.New(commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW, "the task's time to start is over")
	}
	return nil
}

func message(encoded []byte) []byte {
	out := make([]byte, 0, len(domain)+len(encoded))
	return append(append(out, domain...), encoded...)
}

// invalid returns the refusal with the reason why as its cause, for logs; the peer gets the table's sentence.
func invalid(why string, cause error) error {
	return fault.New(commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, "", fault.Cause(&verifyError{why: why, cause: cause}))
}

type verifyError struct {
	why   string
	cause error
}

func (e *verifyError) Error() string {
	if e.cause == nil {
		return e.why
	}
	return e.why + ": " + e.cause.Error()
}

func (e *verifyError) Unwrap() error { return e.cause }
