package session

import (
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const (
	// mostRecordText bounds the detail of a diagnostic, and mostRecordID its ids, in bytes: an agent keeps no longer ones.
	mostRecordText = 512
	mostRecordID   = 64
	// mostRecordWait bounds how long an agent may announce to wait.
	mostRecordWait = 24 * time.Hour
)

// scrubRecords bounds and cleans the diagnostics of a host, which are its claim: one line of text, ids and times that
// can be stored. A code that this build does not know is kept, for a reader that does. The list itself is bounded by
// the frame's rules.
func scrubRecords(list []*commonv1.Diagnostic) {
	for _, d := range list {
		d.Detail = oneLine(d.GetDetail(), mostRecordText)
		d.RetryCorrelationId = oneLine(d.GetRetryCorrelationId(), mostRecordID)
		d.DedupeKeyHash = oneLine(d.GetDedupeKeyHash(), mostRecordID)
		d.Count = max(d.GetCount(), 1)
		d.ObservedAt, d.FirstSeenAt, d.EndedAt = sound(d.GetObservedAt()), sound(d.GetFirstSeenAt()), sound(d.GetEndedAt())
		if wait := d.GetNextRetry(); wait != nil {
			d.NextRetry = durationpb.New(min(max(wait.AsDuration(), 0), mostRecordWait))
		}
	}
}

// sound returns a time that can be stored, and nil for any other.
func sound(at *timestamppb.Timestamp) *timestamppb.Timestamp {
	if at == nil || at.CheckValid() != nil {
		return nil
	}
	return at
}

// oneLine returns a text without control characters, cut to a length in bytes.
func oneLine(s string, most int) string {
	s = strings.ToValidUTF8(s[:min(len(s), most)], "")
	return strings.Map(func(c rune) rune {
		switch {
		case c == '\n' || c == '\r' || c == '\t':
			return ' '
		case unicode.IsControl(c) || unicode.Is(unicode.Cf, c):
			return -1
		}
		return c
	}, s)
}
