// Package rpctest owns the tests that every server passes: every method has a policy, and refuses a caller that is not
// in it.
package rpctest

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TrustDomain of the tests.
const TrustDomain = "mesh.test"

// NodeID of the node that NewAuthorities makes.
const NodeID = "0192f0c1-0000-7000-8000-000000000001"

// Authorities are both authorities of a mesh, for tests.
type Authorities struct {
	Nodes    *ca.Embedded
	Services *ca.ServiceCA
	// NodeRoots and ServiceRoots verify the two kinds of peers.
	NodeRoots, ServiceRoots *pki.Bundle
}

// NewAuthorities makes both authorities in temporary directories. A test that needs them needs sockets too, so it does
// not run under -short.
func NewAuthorities(tb testing.TB) *Authorities {
	tb.Helper()
	testkit.IO(tb)
	nodes, err := ca.Open(ca.Config{Dir: tb.TempDir(), TrustDomain: TrustDomain})
	must(tb, err)
	tb.Cleanup(func() { must(tb, nodes.Close()) })
	services, err := ca.OpenServiceCA(tb.TempDir(), TrustDomain)
	must(tb, err)
	roots, err := nodes.Roots(tb.Context())
	must(tb, err)
	nodeRoots, err := pki.NewBundle(roots...)
	must(tb, err)
	serviceRoots, err := services.Bundle()
	must(tb, err)
	return &Authorities{Nodes: nodes, Services: services, NodeRoots: nodeRoots, ServiceRoots: serviceRoots}
}

// Service returns a certificate of a service, good for an hour.
func (a *Authorities) Service(tb testing.TB, name string) *pki.Store {
	tb.Helper()
	store, err := a.Services.Issue(name, time.Hour)
	must(tb, err)
	return store
}

// Node returns a certificate of a node, good for an hour.
func (a *Authorities) Node(tb testing.TB, nodeID string) *pki.Store {
	tb.Helper()
	key, err := pki.NewKey()
	must(tb, err)
	csr, err := pki.NewCSR(key, pki.NodeID(TrustDomain, nodeID))
	must(tb, err)
	issued, err := a.Nodes.Sign(tb.Context(), ca.SignRequest{
		CSR: csr, NodeID: nodeID, NodeInstanceID: "instance", Profile: "test", TTL: time.Hour,
	})
	must(tb, err)
	store, err := pki.NewStore(key, issued.Chain)
	must(tb, err)
	return store
}

// ServerTLS returns the configuration of a port of a service that admits services.
func (a *Authorities) ServerTLS(tb testing.TB, service string) pki.ServerConfig {
	tb.Helper()
	return pki.ServerConfig{
		Store: a.Service(tb, service), TrustDomain: TrustDomain,
		Clients: []pki.Trust{{Kind: pki.KindService, Bundle: a.ServiceRoots}},
	}
}

// Client returns an HTTP client for a service, which presents store (nil: no certificate) and closes with the test.
func (a *Authorities) Client(tb testing.TB, server string, store *pki.Store) *http.Client {
	tb.Helper()
	client, err := calls.HTTPClient(pki.ClientConfig{
		Store: store, Roots: a.ServiceRoots, Server: pki.ServiceID(TrustDomain, server),
	}, calls.HTTPConfig{})
	must(tb, err)
	tb.Cleanup(client.CloseIdleConnections)
	return client
}

// Run runs a server until the test ends.
func Run(tb testing.TB, server *port.Server) {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	tb.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			tb.Errorf("server: %v", err)
		}
	})
}

// EveryMethodHasPolicy walks all services registered in this binary whose package begins with prefix. The generated
// packages must be imported. It returns the number of methods, so that the caller can fail if there are none.
func EveryMethodHasPolicy(tb testing.TB, prefix string) int {
	tb.Helper()
	methods := 0
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if strings.HasPrefix(string(file.Package()), prefix) {
			set, err := rpc.Policies(file)
			if err != nil {
				tb.Errorf("%s: %v", file.Path(), err)
			}
			methods += len(set)
		}
		return true
	})
	return methods
}

// Target is a running server to be attacked.
type Target struct {
	URL         string // https://host:port
	Service     string // who the server is
	Authorities *Authorities
	// Services are the full names of the mounted services: port.Server.Services.
	Services []string
}

// RefusesEveryMethod calls every method of a running server without a certificate, with the certificate of a node, and
// with that of each service that is not in its list, and expects each call to be refused before its method runs.
// Methods that admit anonymous callers are called as well, and must not refuse for want of a certificate. It returns
// how many calls were refused.
func RefusesEveryMethod(tb testing.TB, target Target) int {
	tb.Helper()
	if len(target.Services) == 0 {
		tb.Fatal("nothing is mounted")
	}
	stores := map[string]*pki.Store{rpc.CallerAnonymous: nil, rpc.CallerNode: target.Authorities.Node(tb, NodeID)}
	for _, caller := range append(rpc.Callers(), "stranger") {
		if !slices.Contains([]string{rpc.CallerAnonymous, rpc.CallerNode, rpc.CallerPerson}, caller) {
			stores[caller] = target.Authorities.Service(tb, caller)
		}
	}
	clients := map[string]*http.Client{}
	for caller, store := range stores {
		clients[caller] = target.Authorities.Client(tb, target.Service, store)
	}
	// HTTP/2 hides the alert by which a server refuses a certificate, so the test makes the handshake itself.
	shut := map[string]bool{}
	for caller, store := range stores {
		shut[caller] = HandshakeRefused(tb, target, store)
	}
	refused := 0
	for _, name := range target.Services {
		descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		must(tb, err)
		service, ok := descriptor.(protoreflect.ServiceDescriptor)
		if !ok {
			tb.Fatalf("%s is no service", name)
		}
		policies, err := rpc.ServicePolicies(service)
		must(tb, err)
		for _, policy := range policies {
			for caller, client := range clients {
				if policy.Allows(caller) || policy.Allows(rpc.CallerAnonymous) {
					continue
				}
				err := Call(tb.Context(), client, target.URL, policy)
				if shut[caller] && err != nil && !connect.IsWireError(err) {
					refused++
					continue
				}
				if !Refused(err) {
					tb.Errorf("%s called by %s: %v", policy.Procedure, caller, err)
				}
				refused++
			}
		}
	}
	return refused
}

// Call calls a method with an empty message and returns its error; for a stream, that of its first response.
func Call(ctx context.Context, client connect.HTTPClient, url string, policy rpc.Policy) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c := connect.NewClient[emptypb.Empty, emptypb.Empty](client, url+policy.Procedure)
	switch {
	case policy.StreamsRequests():
		stream := c.CallBidiStream(ctx)
		// The refusal may come before or after the message is sent; Receive returns it in both cases.
		sendErr := stream.Send(&emptypb.Empty{})
		_, err := stream.Receive()
		if err != nil {
			sendErr = nil // the same refusal, seen from the other side
		}
		return errors.Join(err, sendErr, stream.CloseRequest(), stream.CloseResponse())
	case policy.StreamsAnswers():
		stream, err := c.CallServerStream(ctx, connect.NewRequest(&emptypb.Empty{}))
		if err != nil {
			return err
		}
		stream.Receive()
		return errors.Join(stream.Err(), stream.Close())
	default:
		_, err := c.CallUnary(ctx, connect.NewRequest(&emptypb.Empty{}))
		return err
	}
}

// HandshakeRefused reports whether a server ends the connection of a client that presents store, before any request.
func HandshakeRefused(tb testing.TB, target Target, store *pki.Store) bool {
	tb.Helper()
	cfg, err := pki.ClientTLS(pki.ClientConfig{
		Store: store, Roots: target.Authorities.ServiceRoots, Server: pki.ServiceID(TrustDomain, target.Service),
		NextProtos: []string{"http/1.1"},
	})
	must(tb, err)
	ctx, cancel := context.WithTimeout(tb.Context(), 10*time.Second)
	defer cancel()
	conn, err := (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", strings.TrimPrefix(target.URL, "https://"))
	must(tb, err)                       // in TLS 1.3 a client is done before the server has verified its certificate
	defer func() { _ = conn.Close() }() // the peer may have closed it, which is the expected result
	deadline, _ := ctx.Deadline()
	must(tb, conn.SetDeadline(deadline))
	if _, err = conn.Write([]byte("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")); err == nil {
		_, err = conn.Read(make([]byte, 1))
	}
	// crypto/tls reports the peer's alert as an operation; a connection that is gone fails the write.
	var alert *net.OpError
	return errors.As(err, &alert) && (alert.Op == "remote error" || alert.Op == "write")
}

// Refused reports whether an answer is a refusal of the caller: unauthenticated or forbidden.
func Refused(err error) bool {
	switch connect.CodeOf(err) { // every other answer is no refusal of the caller.
	case connect.CodeUnauthenticated, connect.CodePermissionDenied:
		return true
	default:
		return false
	}
}

// ReasonOfWire returns the reason in an error that came over the wire.
func ReasonOfWire(err error) commonv1.Reason {
	var failed *connect.Error
	if !errors.As(err, &failed) {
		return commonv1.Reason_REASON_UNSPECIFIED
	}
	for _, detail := range failed.Details() {
		value, err := detail.Value()
		if err != nil {
			continue
		}
		if denial, ok := value.(*commonv1.Denial); ok {
			return denial.GetReason()
		}
	}
	return commonv1.Reason_REASON_UNSPECIFIED
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
