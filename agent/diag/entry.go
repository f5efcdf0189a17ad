package diag

import (
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"regexp"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// Entry is one record: what was seen, first and last when, how often in a row, and how long the agent waits before it
// tries again.
type Entry struct {
	Code      string        `json:"code"`
	Detail    string        `json:"detail"`
	FirstSeen time.Time     `json:"first_seen"`
	LastSeen  time.Time     `json:"last_seen"`
	Count     int64         `json:"count"`
	NextRetry time.Duration `json:"next_retry_nanoseconds"`
	// EndedAt is when the reported condition ended; zero if it has not, or if no caller of End reports that.
	EndedAt time.Time `json:"ended_at,omitzero"`
	// RetryCorrelationID is that of the attempts that failed in a row; empty where nothing was attempted.
	RetryCorrelationID string `json:"retry_correlation_id,omitempty"`
	DedupeKeyHash      string `json:"dedupe_key_hash,omitempty"` // see KeyHash
	Reported           int64  `json:"told,omitempty"`            // the count that was told; zero: none was
}

// local is the local port of a connection in the text of an error, which differs with each attempt.
var local = regexp.MustCompile(`:[0-9]+->`)

// KeyHash returns the same for all records of one cause: the hash of a code and a clean detail, in hex.
func KeyHash(code, detail string) string {
	sum := sha256.Sum256([]byte(code + "\x00" + local.ReplaceAllString(detail, ":->")))
	return hex.EncodeToString(sum[:16])
}

// clean returns an entry that was read without what this package would not have written.
func (e Entry) clean() Entry {
	e.Detail = Sanitise(e.Detail)
	e.DedupeKeyHash = KeyHash(e.Code, e.Detail)
	if !ids.Valid(e.RetryCorrelationID) {
		e.RetryCorrelationID = ""
	}
	return e
}

// same reports whether the entry is another state of e.
func (e Entry) same(other Entry) bool {
	return e.DedupeKeyHash == other.DedupeKeyHash && e.FirstSeen.Equal(other.FirstSeen)
}

// attempt reports whether a code is of an attempt to reach the control plane, and not of the host itself.
func attempt(code commonv1.DiagnosticCode) bool {
	switch code { // every other one is of an attempt
	case alive, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_REFUSED,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_LEDGER_SET_ASIDE,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_KEYS_REFUSED:
		return false
	default:
		return true
	}
}

// alive is the code of the sign of life.
const alive = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROCESS_ALIVE

// Attrs returns what the log of a retry has of its record. An empty entry has none.
func (e Entry) Attrs() []slog.Attr {
	if e.Count == 0 {
		return nil
	}
	return []slog.Attr{
		slog.String(obs.KeyCorrelationID, e.RetryCorrelationID), slog.String("dedupe_key_hash", e.DedupeKeyHash),
		slog.Time("first_seen", e.FirstSeen), slog.Time("last_seen", e.LastSeen), slog.Int64("count", e.Count),
	}
}

// Proto returns the entry as a message.
func (e Entry) Proto() *commonv1.Diagnostic {
	code, err := names.Parse[commonv1.DiagnosticCode](e.Code)
	if err != nil {
		code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_UNSPECIFIED
	}
	out := &commonv1.Diagnostic{
		Code: code, Detail: e.Detail, ObservedAt: timestamppb.New(e.LastSeen), Count: e.Count,
		NextRetry: durationpb.New(e.NextRetry), FirstSeenAt: timestamppb.New(e.FirstSeen),
		RetryCorrelationId: e.RetryCorrelationID, DedupeKeyHash: e.DedupeKeyHash,
	}
	if !e.EndedAt.IsZero() {
		out.EndedAt = timestamppb.New(e.EndedAt)
	}
	return out
}
