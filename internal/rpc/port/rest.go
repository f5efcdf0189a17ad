package port

import (
	"context"
	"io"
	"net/http"
	"time"
)

// An answer over HTTP/2 that ends before the request does makes net/http reset the stream, and some clients (curl) then
// drop the part of the answer that they have received. The rest of a body is therefore read before the answer ends: few
// bytes, for a short time, for few requests at once. If the rest is longer, later or one too many, the stream is reset.

const (
	// restTime is how long the rest of a body may take to arrive.
	restTime = time.Second
	// restOfStranger and restOfAdmitted are how long the rest may be, in bytes: of an unknown caller, and of a known one.
	restOfStranger = 256 << 10
	restOfAdmitted = 4 << 20
)

// rest bounds the rest of the body of a request that has been answered.
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

// readingRest reads the rest of the body of a request over HTTP/2 that a handler has not read, before the answer ends.
// A method that takes a stream ends its answer at once: its caller may send for any time.
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
		// The deadline is that of the stream alone, which ends with this handler.
		if err := http.NewResponseController(w).SetReadDeadline(time.Now().Add(restTime)); err != nil {
			return
		}
		_, _ = io.CopyN(io.Discard, body, left.limit) // a caller that has gone needs no answer
	})
}
