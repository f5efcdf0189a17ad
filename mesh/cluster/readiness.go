package cluster

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/topology"
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
		r.ready.Store(topology.AskReady(ctx, client, r.ops) == nil)
		if !app.Sleep(ctx, r.every) {
			return nil
		}
	}
}
