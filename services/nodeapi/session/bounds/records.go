// Package bounds cuts what an agent reports of itself and its host to what a working agent reports, before it is kept
// or passed on: lengths, counts, times, characters.
//
// What a host reports is its claim, and one agent's report must not fail the batch that it shares with others. The
// package decides nothing about what is reported.
package bounds

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

const (
	// MostRecordText bounds the detail of a diagnostic, and mostRecordID its ids, in bytes: an agent keeps no longer ones.
	MostRecordText = 512
	mostRecordID   = 64
	// MostRecordWait bounds how long an agent may announce to wait.
	MostRecordWait = 24 * time.Hour
)

// futureAllowed is how far ahead of the present the time of an entry may be before it counts as in the future: hosts'
// clocks differ.
const futureAllowed = time.Minute

// Cut counts the entries of hosts' records that were cut, and what was cut of hosts' facts.
type Cut struct {
	Size  int // a text or an id was too long, or the wait that was announced
	Time  int // it has a time that cannot be stored, or is in the future, which recovery takes as the present
	Facts FactsCut
}

// Records bounds and cleans the diagnostics of a host, which are its claim: one line of text, ids and times that
// can be stored. A code that this build does not know is kept, for a reader that does. The list itself is bounded by
// the frame's rules. It returns how many entries it cut, by the given present time.
func Records(list []*commonv1.Diagnostic, now time.Time) Cut {
	var out Cut
	for _, d := range list {
		if len(d.GetDetail()) > MostRecordText || len(d.GetRetryCorrelationId()) > mostRecordID ||
			len(d.GetDedupeKeyHash()) > mostRecordID || d.GetNextRetry().AsDuration() > MostRecordWait {
			out.Size++
		}
		if wrong(d.GetObservedAt(), now) || wrong(d.GetFirstSeenAt(), now) || wrong(d.GetEndedAt(), now) {
			out.Time++
		}
		d.Detail = OneLine(d.GetDetail(), MostRecordText)
		d.RetryCorrelationId = OneLine(d.GetRetryCorrelationId(), mostRecordID)
		d.DedupeKeyHash = OneLine(d.GetDedupeKeyHash(), mostRecordID)
		d.Count = max(d.GetCount(), 1)
		d.ObservedAt, d.FirstSeenAt, d.EndedAt = sound(d.GetObservedAt()), sound(d.GetFirstSeenAt()), sound(d.GetEndedAt())
		if wait := d.GetNextRetry(); wait != nil {
			d.NextRetry = durationpb.New(min(max(wait.AsDuration(), 0), MostRecordWait))
		}
	}
	return out
}

// wrong reports whether a time cannot be stored or is in the future. None is not wrong.
func wrong(at *timestamppb.Timestamp, now time.Time) bool {
	return at != nil && (at.CheckValid() != nil || at.AsTime().After(now.Add(futureAllowed)))
}

// Reported cleans a frame, and bounds the diagnostics and the host's facts in it. It returns what it cut.
func Reported(frame *nodev1.ConnectRequest, now time.Time) Cut {
	// Before Frame, which removes the times that are counted here.
	out := Records(slices.Concat(frame.GetHello().GetDiagnostics(), frame.GetDiagnostic().GetDiagnostics()), now)
	Frame(frame.ProtoReflect())
	out.Facts = Facts(cmp.Or(frame.GetHello().GetHost(), frame.GetHeartbeat().GetChangedFacts()))
	return out
}

// sound returns a time that can be stored, and nil for any other.
func sound(at *timestamppb.Timestamp) *timestamppb.Timestamp {
	if at == nil || at.CheckValid() != nil {
		return nil
	}
	return at
}

// OneLine returns a text without control characters, cut to a length in bytes.
func OneLine(s string, most int) string {
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
