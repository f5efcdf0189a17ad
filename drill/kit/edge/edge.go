// Package edge is a proxy before a port of a mesh that ends TLS and decides about each request, as the edge of a
// provider does: it passes the request on, refuses it as one too many, or returns a page for browsers.
//
// It decides nothing about the mesh and knows no drill. A client's certificate ends at a proxy that ends TLS: requests
// to a port that needs one, as agents' streams do, cannot be passed on but only answered, so agents are led around the
// proxy while it is to pass them on. Guarantees: every request is counted with its answer; what was not decided about
// is passed on.
package edge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// Answer is what an edge does with a request. The zero value passes it on.
type Answer struct {
	Status     int           // of the response in the control plane's place; zero: the request is passed on
	RetryAfter time.Duration // in whole seconds; zero: none is named
}

// Limited returns the answer of an edge that gets too many requests.
func Limited(retryAfter time.Duration) Answer {
	return Answer{Status: http.StatusTooManyRequests, RetryAfter: retryAfter}
}

// Page returns the answer of an edge that shows every client a page.
func Page() Answer { return Answer{Status: http.StatusOK} }

// Request is a request that an edge got.
type Request struct {
	At     time.Time
	Path   string
	Remote string // the connection's
	Answer Answer
}

// Config of an edge.
type Config struct {
	// Identity is the PEM file of the key and certificate that the edge shows: those of the service that it stands before.
	Identity string
	// Roots is the PEM file of the roots of services.
	Roots       string
	TrustDomain string
	Service     string // before which it stands
	Upstreams   []string
}

// Edge is a proxy that runs until Close.
type Edge struct {
	listener net.Listener
	server   *http.Server
	served   chan error

	mu       sync.Mutex
	answers  map[string]Answer // by the beginning of the path
	requests []Request
	next     int
	changed  chan struct{} // closed at the next request
}

// Start starts an edge at a free port of the loopback interface.
func Start(ctx context.Context, cfg Config) (*Edge, error) {
	if len(cfg.Upstreams) == 0 {
		return nil, errors.New("start edge: there is nothing behind it")
	}
	identity, err := pki.LoadStore(cfg.Identity, cfg.Identity)
	if err != nil {
		return nil, fmt.Errorf("start edge: %w", err)
	}
	roots, err := pki.LoadBundle(cfg.Roots)
	if err != nil {
		return nil, fmt.Errorf("start edge: %w", err)
	}
	front, err := pki.ServerTLS(pki.ServerConfig{
		Store: identity, TrustDomain: cfg.TrustDomain, NextProtos: []string{"h2", "http/1.1"},
	})
	if err != nil {
		return nil, fmt.Errorf("start edge: %w", err)
	}
	back, err := pki.ClientTLS(pki.ClientConfig{Roots: roots, Server: pki.ServiceID(cfg.TrustDomain, cfg.Service)})
	if err != nil {
		return nil, fmt.Errorf("start edge: %w", err)
	}
	e := &Edge{served: make(chan error, 1), answers: map[string]Answer{}, changed: make(chan struct{})}
	if e.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("start edge: %w", err)
	}
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "https", Host: cfg.Upstreams[e.roundRobin(len(cfg.Upstreams))]})
		},
		Transport:     &http.Transport{TLSClientConfig: back, ForceAttemptHTTP2: true},
		FlushInterval: -1, ErrorLog: quiet,
	}
	e.server = &http.Server{
		Handler: e.handler(proxy), ReadHeaderTimeout: 5 * time.Second, ErrorLog: quiet, TLSConfig: front,
	}
	go func() { e.served <- e.server.ServeTLS(e.listener, "", "") }()
	return e, nil
}

// roundRobin returns the numbers below n, one after the other.
func (e *Edge) roundRobin(n int) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next++
	return e.next % n
}

func (e *Edge) handler(proxy http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := e.decide(r)
		if answer.Status == 0 {
			proxy.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		if answer.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int(answer.RetryAfter/time.Second)))
		}
		w.WriteHeader(answer.Status)
		_, _ = io.WriteString(w, "<html><body>"+http.StatusText(answer.Status)+"</body></html>") // the client may have gone
	})
}

// decide returns the answer to a request, and counts it.
func (e *Edge) decide(r *http.Request) Answer {
	e.mu.Lock()
	defer e.mu.Unlock()
	longest, answer := -1, Answer{}
	for prefix, a := range e.answers {
		if len(prefix) > longest && strings.HasPrefix(r.URL.Path, prefix) {
			longest, answer = len(prefix), a
		}
	}
	e.requests = append(e.requests, Request{At: time.Now(), Path: r.URL.Path, Remote: r.RemoteAddr, Answer: answer})
	close(e.changed)
	e.changed = make(chan struct{})
	return answer
}

// Addr returns the host:port at which the edge listens.
func (e *Edge) Addr() string { return e.listener.Addr().String() }

// Set decides about the requests whose path begins with a prefix; of several prefixes the longest decides. The empty
// prefix is every path's.
func (e *Edge) Set(prefix string, a Answer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answers[prefix] = a
}

// Requests returns the requests so far, in the order in which they came.
func (e *Edge) Requests() []Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.requests)
}

// Await waits until n requests have come since the edge was started, and returns them.
func (e *Edge) Await(ctx context.Context, n int) ([]Request, error) {
	for {
		e.mu.Lock()
		got, changed := slices.Clone(e.requests), e.changed
		e.mu.Unlock()
		if len(got) >= n {
			return got, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return got, fmt.Errorf("%d of %d requests came: %w", len(got), n, context.Cause(ctx))
		}
	}
}

// Close ends the edge and all connections to it.
func (e *Edge) Close() error {
	err := e.server.Close()
	served := <-e.served
	if errors.Is(served, http.ErrServerClosed) {
		served = nil
	}
	return cmp.Or(err, served)
}
