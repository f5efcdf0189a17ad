package session

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gpuaas/mesh/agent/session/outbox"
)

// Scenario: a session is admitted at the moment at which the agent ends, so that its result and the end of all
// goroutines are there together. Its connection is closed, whichever of the two is seen first.
func TestASessionAdmittedAtTheEndIsClosed(t *testing.T) {
	for range 50 {
		cc, err := grpc.NewClient("passthrough:///nowhere", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		life, cancel := context.WithCancelCause(t.Context())
		r := &runner{
			c: &Client{out: outbox.New(1, 1, 0)}, opened: make(chan openResult, 1), ended: make(chan *conn, 4),
			over: make(chan struct{}),
		}
		r.opened <- openResult{conn: &conn{cc: cc, cancel: cancel}}
		r.shutdown()
		if state := cc.GetState(); state != connectivity.Shutdown || life.Err() == nil {
			t.Fatalf("the connection is %s, its context ended by %v", state, context.Cause(life))
		}
	}
}
