package streams

import (
	"crypto/tls"
	"maps"
	"testing"

	"google.golang.org/grpc"

	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestTheBaselineIsTunedAsOurs compares the options of connections: those of the baseline and those that nodeapi serves
// agents with by default.
func TestTheBaselineIsTunedAsOurs(t *testing.T) {
	t.Parallel()
	got, err := nodeapitest.ServerOptions(newBare(&tls.Config{MinVersion: tls.VersionTLS13}))
	if err != nil {
		t.Fatal(err)
	}
	want, err := nodeapitest.ServerOptions(grpc.NewServer(nodeapi.Default().Limits().Transport()...))
	if err != nil {
		t.Fatal(err)
	}
	delete(got, "creds")
	delete(want, "creds")
	if !maps.Equal(got, want) {
		t.Errorf("options of the baseline:\n%v\nnodeapi:\n%v", got, want)
	}
}
