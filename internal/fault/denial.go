package fault

import (
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const (
	maxPeerText  = 1024 // a peer's sentences are cut here, so that a hostile one cannot fill our logs
	maxPeerUnmet = 64
	maxPeerWait  = time.Hour
)

// ToDenial returns err as the message that goes to a peer. An error that is not a fault is sent as From returns it:
// deadline_exceeded or unavailable for a context's end, else internal.
func ToDenial(err error, correlationID string) *commonv1.Denial {
	e := From(err)
	if e == nil {
		return nil
	}
	d := &commonv1.Denial{
		Reason:        e.Reason,
		Action:        e.action(),
		Message:       e.Public,
		Remedy:        e.Remedy,
		Unmet:         e.Unmet,
		ConflictingId: e.ConflictingID,
		CorrelationId: correlationID,
	}
	if d.GetCorrelationId() == "" {
		d.CorrelationId = e.CorrelationID
	}
	if e.RetryAfter > 0 {
		d.RetryAfter = durationpb.New(e.RetryAfter)
	}
	return d
}

// FromDenial returns the fault that a peer sent. Its texts are cut to a bounded length; its wait is capped at an hour.
// nil stays nil.
func FromDenial(d *commonv1.Denial) *Error {
	return fromDenial(d, nil)
}

func fromDenial(d *commonv1.Denial, cause error) *Error {
	if d == nil {
		return nil
	}
	e := &Error{
		Reason:        d.GetReason(),
		Public:        clean(d.GetMessage()),
		Remedy:        clean(d.GetRemedy()),
		Action:        d.GetAction(),
		ConflictingID: clean(d.GetConflictingId()),
		CorrelationID: clean(d.GetCorrelationId()),
		cause:         cause,
	}
	if d.GetRetryAfter() != nil {
		e.RetryAfter = min(max(d.GetRetryAfter().AsDuration(), 0), maxPeerWait)
	}
	for i, u := range d.GetUnmet() {
		if i == maxPeerUnmet {
			break
		}
		e.Unmet = append(e.Unmet, clean(u))
	}
	if e.Public == "" {
		e.Public = RowOf(e.Reason).Public
	}
	return e
}

// clean cuts a peer's text and replaces control characters.
func clean(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxPeerText {
		cut := maxPeerText
		for !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
