package port

import (
	"context"
	"net/http"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
)

// serve routes by exact procedure: one spelling, one method. Nothing is cleaned or redirected, so that no other
// spelling of a path can pass a check that its canonical one would not.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	name, ok := serviceOfPath(r.URL.Path)
	service, known := s.services[name]
	if !ok || !known {
		http.NotFound(w, r)
		return
	}
	if r.Method != http.MethodPost {
		// Reads by GET would put requests into URLs, caches and cross-site links.
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	ctx, cancel := s.requestContext(w, r)
	defer cancel(nil)
	if s.unchecked[name] {
		s.serveUnchecked(name, service, w, r.WithContext(ctx)) //nolint:contextcheck // as below
		return
	}
	if r = s.intake(w, r.WithContext(ctx)); r != nil { //nolint:contextcheck // ctx is made from the request's.
		service.ServeHTTP(w, r)
	}
}

// requestContext puts the verified peer into the context, and gives streams the life that they may have: until the
// server drains, and until the certificate that opened them expires. A connection that is already open would outlive
// both.
func (s *Server) requestContext(w http.ResponseWriter, r *http.Request) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(r.Context())
	var left time.Duration
	if peer, err := pki.PeerFromState(r.TLS, s.cfg.TLS.TrustDomain); err == nil && len(s.cfg.TLS.Clients) > 0 {
		left = peer.NotAfter.Sub(s.now())
		if left < time.Minute {
			// The peer should reconnect with the new certificate that it must have by now.
			w.Header().Set("Connection", "close")
		}
		if left > 0 {
			ctx = rpc.WithPeer(ctx, peer)
		}
	}
	policy, ok := s.policies[r.URL.Path]
	name, _ := serviceOfPath(r.URL.Path)
	switch {
	case s.unchecked[name]:
		// Any call, unary or not, ends as a stream does, and soon.
		if left <= 0 || left > s.cfg.StrangerTimeout {
			left = s.cfg.StrangerTimeout
		}
	case !ok || (!policy.StreamsRequests() && !policy.StreamsAnswers()):
		return ctx, cancel
	}
	stopDrain := context.AfterFunc(s.drain, func() { cancel(context.Cause(s.drain)) })
	stopExpiry := func() bool { return true }
	if left > 0 {
		why := commonv1.Reason_REASON_CERTIFICATE_EXPIRED
		if s.unchecked[name] {
			why = commonv1.Reason_REASON_DEADLINE_EXCEEDED
		}
		stopExpiry = time.AfterFunc(left, func() { cancel(fault.New(why, "")) }).Stop
	}
	// A method that waits for the next message does not check its context: the deadlines end the wait too.
	controller := http.NewResponseController(w)
	ended := make(chan struct{})
	stopRead := context.AfterFunc(ctx, func() {
		defer close(ended)
		_ = controller.SetReadDeadline(time.Now()) // not supported, or over already: then there is nothing to end
	})
	return ctx, func(cause error) {
		stopDrain()
		stopExpiry()
		if !stopRead() {
			<-ended // the response must not be touched once its handler has returned
		}
		cancel(cause)
	}
}

func (s *Server) now() time.Time {
	if s.cfg.TLS.Time != nil {
		return s.cfg.TLS.Time()
	}
	return time.Now()
}
