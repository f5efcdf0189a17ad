package rpc

import (
	"context"
	"io"
	"net/http"
	"time"
)

// An answer over HTTP/2 that ends before the request does makes net/http reset the stream, and some clients (curl) then
// drop what they have of the answer. What is left of a body is therefore read before the answer ends: few bytes, for a
// short time, in few places. Where it is longer, later or one too many, the stream is reset.

const (
	// restTime is how long the rest of a body may take to arrive.
	restTime = time.Second
	// restOfStranger and restOfAdmitted are how long the rest may be, of a caller who is unknown and of one who is known.
	restOfStranger = 256 << 10
	restOfAdmitted = 4 << 20
)

// rest is what may be left of the body of a request when it has been answered.
type rest struct {
	limit int64
}

type restKey struct{}

// allowRest sets how much of the body may be left when the request has been answered.
func allowRest(ctx context.Context, limit int64) {
	if r, ok := ctx.Value(restKey{}).(*rest); ok {
		r.limit = limit
	}
}

// readingRest reads what a handler leaves of the body of a request over HTTP/2, before its answer ends. A method that
// takes a stream ends its answer at once: its caller sends for as long as it likes.
func (s *Server) readingRest(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, _ := serviceOfPath(r.URL.Path)
		policy, mounted := s.policies[r.URL.Path]
		streams := (mounted && policy.StreamsRequests()) || (s.unchecked[name] && name != healthService)
		if r.ProtoMajor < 2 || r.Body == nil || r.Body == http.NoBody || streams {
			next.ServeHTTP(w, r)
			return
		}
		left, body := &rest{limit: restOfStranger}, r.Body
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), restKey{}, left)))
		release, ok := s.resting.take(originOf(r.RemoteAddr))
		if !ok {
			return
		}
		defer release()
		// The deadline is the stream's alone, which ends with this handler.
		if err := http.NewResponseController(w).SetReadDeadline(time.Now().Add(restTime)); err != nil {
			return
		}
		_, _ = io.CopyN(io.Discard, body, left.limit) // a caller who has gone is not told
	})
}
