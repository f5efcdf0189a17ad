package streams

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// The baseline is a bare grpc-go server with mutual TLS that acknowledges heartbeats on a bidirectional stream and does
// nothing else. Its connections have the options of nodeapi's, so that the comparison is of the parts that we add to a
// stream and not of its tuning.

type bare struct {
	nodev1.UnimplementedNodeServiceServer
}

// Connect acknowledges heartbeats.
func (bare) Connect(s grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	for {
		frame, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		ack := &nodev1.HeartbeatAck{Sequence: frame.GetHeartbeat().GetSequence()}
		if err := s.Send(
			&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_HeartbeatAck{HeartbeatAck: ack}},
		); err != nil {
			return err
		}
	}
}

func newBare(conf *tls.Config) *grpc.Server {
	srv := grpc.NewServer(append(nodeapi.Default().Limits().Transport(), grpc.Creds(credentials.NewTLS(conf)))...)
	nodev1.RegisterNodeServiceServer(srv, bare{})
	return srv
}

// startBare serves until ctx ends and returns the address.
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
		Store: store, TrustDomain: nodeapitest.TrustDomain, NextProtos: []string{"h2"},
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: roots}},
	})
	if err != nil {
		return "", fmt.Errorf("build TLS: %w", err)
	}
	srv := newBare(conf)
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("listen: %w", err)
	}
	context.AfterFunc(ctx, srv.Stop)
	go func() { _ = srv.Serve(lis) }() // ends with the process, whose only work it is
	return lis.Addr().String(), nil
}
