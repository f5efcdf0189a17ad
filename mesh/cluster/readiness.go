package cluster

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/app"
)

// readyEvery is how often a replica is asked whether it is ready, and how long it may take to answer.
const readyEvery = time.Second

// readiness is the state of a replica at its /readyz, polled every second. A replica that has not answered yet is not
// ready, nor is one that does not answer within a second.
type readiness struct {
	ops   string // host:port
	every time.Duration
	ready atomic.Bool
}

func newReadiness(ops string) *readiness { return &readiness{ops: ops, every: readyEvery} }

func (r *readiness) ok() bool { return r.ready.Load() }

// failed notes that the replica did not answer a client. Its next answer at /readyz replaces that.
func (r *readiness) failed() { r.ready.Store(false) }

// run polls until ctx ends.
func (r *readiness) run(ctx context.Context) error {
	transport := &http.Transport{MaxIdleConns: 1}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: r.every}
	for {
		r.ready.Store(askReady(ctx, client, r.ops) == nil)
		if !app.Sleep(ctx, r.every) {
			return nil
		}
	}
}

// askReady returns nil if the process whose health is served at ops is ready.
func askReady(ctx context.Context, client *http.Client, ops string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+ops+"/readyz", nil)
	if err != nil {
		return fmt.Errorf("ask %s: %w", ops, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask %s: %w", ops, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("not ready: %s", resp.Status)
	}
	return nil
}
