package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// DefaultProbeTimeout bounds one readiness probe; maxProbeTimeout is the longest that a spec may set.
const (
	DefaultProbeTimeout = 2 * time.Second
	maxProbeTimeout     = 30 * time.Second
)

// DefaultMinUptime is how long a workload without a probe runs before it is ready; maxMinUptime is the longest that a
// spec may set.
const (
	DefaultMinUptime = 2 * time.Second
	maxMinUptime     = 5 * time.Minute
)

// finished reports whether a workload without a probe has done its work: it exited with status 0, after a run that was
// long enough for it to be ready, whether or not its readiness was checked meanwhile.
func finished(spec spec, s state) bool {
	return s.HasExited && s.ExitCode == 0 && !spec.Ready.asks() && s.RanFor >= spec.Ready.minUptime()
}

// ready reports whether a workload that has run for uptime is ready, and why not. It probes at most once.
func (r *Runtime) ready(ctx context.Context, s spec, uptime time.Duration) (bool, string) {
	if least := s.Ready.minUptime(); uptime < least {
		return false, fmt.Sprintf("has run for %.1f s of the %s s that make it ready",
			uptime.Truncate(100*time.Millisecond).Seconds(), strconv.FormatFloat(least.Seconds(), 'f', -1, 64))
	}
	if !s.Ready.asks() {
		return true, ""
	}
	var number int32
	for i, p := range s.Ports {
		if p.Name == s.Ready.Port || (s.Ready.Port == "" && i == 0) {
			number = p.Port
		}
	}
	timeout := s.Ready.Timeout
	if timeout <= 0 {
		timeout = DefaultProbeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, min(timeout, maxProbeTimeout))
	defer cancel()
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(int(number)))
	var err error
	if s.Ready.HTTPPath != "" {
		err = probeHTTP(ctx, "http://"+address+s.Ready.HTTPPath)
	} else {
		err = probeTCP(ctx, address)
	}
	if err != nil {
		return false, fmt.Sprintf("not ready: %v", err)
	}
	return true, ""
}

func probeTCP(ctx context.Context, address string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeHTTP sends one request, follows no redirect, and reads little of the response, since a tenant's program sends
// it.
func probeHTTP(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	defer transport.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return errors.New("no answer in time")
		}
		return err
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 4096)
	_ = resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 399 {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}
