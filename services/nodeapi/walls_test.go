package nodeapi_test

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestEveryMethodRefusesWhoMayNotCallIt calls each method of both ports by each caller that is not in its list: those
// of the internal port that are mounted, and the agents' stream.
func TestEveryMethodRefusesWhoMayNotCallIt(t *testing.T) {
	if nodeapitest.TrustDomain != rpctest.TrustDomain {
		t.Fatal("the certificates of rpctest are of another trust domain")
	}
	k := newKit(t)
	authorities := rpctest.NewAuthorities(t)
	dir := t.TempDir()
	if err := authorities.Services.IssueToDir("nodeapi", dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	r := k.replica(func(cfg *nodeapi.Config) {
		cfg.TLS.CertFile = filepath.Join(dir, pki.IdentityFile)
		cfg.TLS.KeyFile = cfg.TLS.CertFile
		cfg.TLS.CAFile = string(k.secret(dir, "services.pem", string(authorities.ServiceRoots.PEM())))
		cfg.NodeCAFile = string(k.secret(dir, "nodes.pem", string(authorities.NodeRoots.PEM())))
	})
	mounted := r.Services()
	if !slices.Contains(mounted, nodev1connect.RelayServiceName) {
		t.Errorf("mounted are %q: the walk would prove little", mounted)
	}
	for _, port := range []struct {
		name, address string
		services      []string
		least         int
	}{
		{"internal", r.Addr(), mounted, 12},
		{"agents", r.AgentAddr(), []string{nodev1connect.NodeServiceName}, 6},
	} {
		refused := rpctest.RefusesEveryMethod(t, rpctest.Target{
			URL: "https://" + port.address, Service: "nodeapi", Authorities: authorities, Services: port.services,
		})
		if refused < port.least {
			t.Errorf("%s: %d calls were refused", port.name, refused)
		}
		t.Logf("%s: %d calls refused", port.name, refused)
	}
}
