package lifecycle

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
)

// replica runs a replica of lifecycle, whose peers do not answer, until the test ends.
func replica(t *testing.T, db *testkit.Database, authorities *rpctest.Authorities) *Service {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	certs := filepath.Join(dir, "lifecycle")
	if err := authorities.Services.IssueToDir("lifecycle", certs, time.Hour); err != nil {
		t.Fatal(err)
	}
	signing := filepath.Join(dir, "task-signing", "task-signing.pem")
	key, err := envelope.LoadOrCreateKey(signing)
	if err != nil {
		t.Fatal(err)
	}
	set, err := pki.NewKeySet(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	public := write("keys.pub", set.String()+"\n")
	cfg := Default()
	cfg.TrustDomain = rpctest.TrustDomain
	cfg.DatabaseURLFile = config.SecretFile(write("db", db.URL(pg.RoleLifecycle)))
	cfg.SequencerURLFile = config.SecretFile(write("sequencer", db.URL(pg.RoleSequencer)))
	cfg.WorkloadDatabaseURL = config.SecretFile(write("workloads", db.WorkloadURL()))
	cfg.TLS.CertFile = filepath.Join(certs, pki.IdentityFile)
	cfg.TLS.KeyFile = cfg.TLS.CertFile
	cfg.TLS.CAFile = write("services.pem", string(authorities.ServiceRoots.PEM()))
	cfg.TaskSigningKeyFile, cfg.TaskSigningPubkeysFile = signing, public
	cfg.JoinStatePubkeysFile, cfg.AssertionPubkeysFile = public, public
	cfg.SecretFile = config.SecretFile(write("secret", strings.Repeat("s", 32)))
	cfg.WorkloadSecretsKeysFile = config.SecretFile(write("seal", secretenv.NewKey()+"\n"))
	cfg.Peers.Recovery = "127.0.0.1:1"
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(t.Context(), Deps{Logger: testkit.Logger(t), Registry: registry}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("lifecycle: %v", err)
		}
	})
	return s
}

// TestEveryMethodRefusesWhoMayNotCallIt calls each method that is mounted, by each caller that is not in its list.
func TestEveryMethodRefusesWhoMayNotCallIt(t *testing.T) {
	testkit.IO(t)
	authorities := rpctest.NewAuthorities(t)
	s := replica(t, testkit.DB(t), authorities)
	mounted := s.server.Services()
	if len(mounted) < 9 || !slices.Contains(mounted, "gpuaas.lifecycle.v1.TaskService") {
		t.Errorf("mounted are %q: the walk would prove little", mounted)
	}
	refused := rpctest.RefusesEveryMethod(t, rpctest.Target{
		URL: "https://" + s.Addr(), Service: "lifecycle", Authorities: authorities, Services: mounted,
	})
	if refused < 100 {
		t.Errorf("%d calls were refused", refused)
	}
	t.Logf("%d calls refused", refused)
}
