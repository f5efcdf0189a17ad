package session

import (
	"crypto/tls"
	"log/slog"
	"maps"
	"testing"

	"google.golang.org/grpc"

	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestTransport checks that the port's connections have the options of Transport and no others, so that a baseline with
// these options is tuned like the port.
func TestTransport(t *testing.T) {
	t.Parallel()
	s, err := New(Deps{Logger: slog.New(slog.DiscardHandler)}, Config{TLS: &tls.Config{MinVersion: tls.VersionTLS13}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := nodeapitest.ServerOptions(s.grpc)
	if err != nil {
		t.Fatal(err)
	}
	want, err := nodeapitest.ServerOptions(grpc.NewServer(Limits{}.Transport()...))
	if err != nil {
		t.Fatal(err)
	}
	// these options decide who is let in, and what a stream goes through
	for _, other := range []string{"creds", "inTapHandle", "streamInt", "waitForHandlers"} {
		if got[other] == want[other] {
			t.Errorf("%s: %s for both: it needs no exception", other, got[other])
		}
		delete(got, other)
		delete(want, other)
	}
	if !maps.Equal(got, want) {
		t.Errorf("options of the port:\n%v\nTransport:\n%v", got, want)
	}
}
