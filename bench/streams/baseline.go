package streams

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// The baseline is a bare grpc-go server with mutual TLS that answers heartbeats on a bidirectional stream and knows nothing else. It is tuned for
// memory as far as grpc's options go: no read buffer (TLS has one), a small write buffer that idle connections share, windows that do not grow, the
// same keepalive as ours.

type bare struct {
	nodev1.UnimplementedNodeServiceServer
}

// Connect answers heartbeats.
func (bare) Connect(s grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	for {
		frame, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err //nolint:wrapcheck // grpc's own
		}
		ack := &nodev1.HeartbeatAck{Sequence: frame.GetHeartbeat().GetSequence()}
		if err := s.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_HeartbeatAck{HeartbeatAck: ack}}); err != nil {
			return err //nolint:wrapcheck // grpc's own
		}
	}
}

// startBare serves until ctx ends and answers where.
func startBare(ctx context.Context, files nodeapitest.Files) (string, error) {
	store, err := pki.LoadStore(files.Cert, files.Key)
	if err != nil {
		return "", fmt.Errorf("load certificate: %w", err)
	}
	roots, err := pki.LoadBundle(files.NodeCA)
	if err != nil {
		return "", fmt.Errorf("load roots: %w", err)
	}
	conf, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: nodeapitest.TrustDomain, NextProtos: []string{"h2"}, Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: roots}},
	})
	if err != nil {
		return "", fmt.Errorf("build TLS: %w", err)
	}
	srv := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(conf)),
		grpc.ReadBufferSize(0),
		grpc.WriteBufferSize(4<<10),
		grpc.InitialWindowSize(64<<10), grpc.InitialConnWindowSize(64<<10),
		grpc.MaxConcurrentStreams(8),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 15 * time.Second, Timeout: 10 * time.Second}),
	)
	nodev1.RegisterNodeServiceServer(srv, bare{})
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("listen: %w", err)
	}
	context.AfterFunc(ctx, srv.Stop)
	go func() { _ = srv.Serve(lis) }() // ends with the process, whose only work it is
	return lis.Addr().String(), nil
}
