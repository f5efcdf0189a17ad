package canary

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// connect asks for the stream of an agent over a connection whose handshake is over. The node API refuses that of the
// canary, by its name, in the words of this mesh: no other server has that answer.
func connect(ctx context.Context, conn *connection) (recoveryv1.HandshakeOutcome, string) {
	client, err := grpc.NewClient("passthrough:///node-api",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the connection has TLS already
		grpc.WithContextDialer(conn.dial), grpc.WithNoProxy(), grpc.WithDisableServiceConfig())
	if err != nil {
		return Unproven, err.Error()
	}
	defer client.Close()
	stream, err := nodev1.NewNodeServiceClient(client).Connect(ctx)
	if err == nil {
		_, err = stream.Recv()
	}
	if err == nil {
		return Unproven, "it opened a stream for the canary, which the node API refuses"
	}
	refusal := fault.FromGRPC(err)
	if fault.Has(refusal, commonv1.Reason_REASON_PERMISSION_DENIED) {
		return Trusted, "it accepted the canary certificate"
	}
	broken := conn.broken()
	if outcome, detail := concluded(broken); outcome == Refused {
		return outcome, detail
	}
	if ctx.Err() != nil || errors.Is(broken, os.ErrDeadlineExceeded) {
		return Unproven, "it accepted the handshake, and did not answer in time as the node API does"
	}
	return Unproven, "it accepted the handshake, and does not answer as the node API: " + fault.From(refusal).Public
}

// connection is a TLS connection that was listened to before its client uses it.
type connection struct {
	net.Conn

	ahead  []byte // what was read and is not handed on yet
	dialed atomic.Bool

	mu  sync.Mutex
	err error // the first one of a read
}

// listen waits until the server has sent something, or until the given time. It returns the error with which the server
// has ended the connection.
func (c *connection) listen(until time.Time) error {
	if err := c.SetReadDeadline(until); err != nil {
		return err
	}
	first := make([]byte, 1)
	n, err := c.Conn.Read(first)
	if errors.Is(err, os.ErrDeadlineExceeded) { // it waits for the client to speak first
		return nil
	}
	c.ahead = first[:n]
	return err
}

// dial returns the connection to the gRPC client, once.
func (c *connection) dial(context.Context, string) (net.Conn, error) {
	if c.dialed.Swap(true) {
		return nil, net.ErrClosed
	}
	return c, nil
}

// Read implements net.Conn.
func (c *connection) Read(p []byte) (int, error) {
	if len(c.ahead) > 0 && len(p) > 0 {
		n := copy(p, c.ahead)
		c.ahead = c.ahead[n:]
		return n, nil
	}
	n, err := c.Conn.Read(p)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err == nil {
			c.err = err
		}
	}
	return n, err
}

// broken returns the first error of a read, nil for none.
func (c *connection) broken() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
