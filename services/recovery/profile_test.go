package recovery_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheProfileFollowsItsFile checks that a replica sends the certificate authorities that its file has now, without a
// restart, and the former ones while the file cannot be read.
func TestTheProfileFollowsItsFile(t *testing.T) {
	m := start(t)
	replica, url := m.client("nodeapi")
	sessions := recoveryv1connect.NewSessionServiceClient(replica, url, calls.Options(calls.Config{})...)
	fingerprint := func() string {
		t.Helper()
		opened, err := sessions.OpenSessions(m.ctx, &recoveryv1.OpenSessionsRequest{Sessions: []*recoveryv1.OpenSession{{
			SessionId: ids.New(), NodeId: ids.New(), NodeInstanceId: ids.New(), Serial: "aa",
		}}})
		if err != nil {
			t.Fatal(err)
		}
		return opened.GetProfileFingerprint()
	}
	first := fingerprint()
	former, err := os.ReadFile(m.cfg.Profile.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	next, err := ca.OpenServiceCA(t.TempDir(), rpctest.TrustDomain)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := next.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
		t.Helper()
		path := write(t, filepath.Join(t.TempDir(), "next.pem"), text)
		if err := os.Rename(path, m.cfg.Profile.CAFile); err != nil {
			t.Fatal(err)
		}
	}
	until := func(check func(now string) bool) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if !check(fingerprint()) {
				return errors.New("the fingerprint is another")
			}
			return nil
		})
	}
	put("no certificate")
	put(string(former) + string(bundle.PEM()))
	until(func(now string) bool { return now != first })
	put(string(former))
	until(func(now string) bool { return now == first })
}
