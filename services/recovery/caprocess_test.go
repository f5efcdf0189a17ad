package recovery_test

import (
	"path/filepath"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/pki/ca/catest"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

// Scenario: the node authority has been exported to a step-ca process, and recovery is told of the process in place of
// the directory. A machine enrols, and the issuer that was exported signs. A rotation is refused: it is the process's.
func TestAMachineEnrolsThroughAStepCAProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	embedded, err := ca.Open(ca.Config{Dir: dir, TrustDomain: rpctest.TrustDomain})
	if err != nil {
		t.Fatal(err)
	}
	signing, err := embedded.SigningFingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := embedded.Close(); err != nil {
		t.Fatal(err)
	}
	addrs, err := ports.Free(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	files, err := ca.Export(ca.ExportConfig{
		Dir: dir, Out: filepath.Join(t.TempDir(), "step"), Address: addrs[0], Names: []string{"127.0.0.1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	catest.Start(t, files.Config)
	m := start(t, func(c *recovery.Config) {
		c.CADir = ""
		c.CAProcess = recovery.CAProcess{URL: "https://" + addrs[0], RootsFile: files.Root, KeyFile: files.Provisioner}
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
	})
	console, url := m.client("readmodel")
	opts := calls.Options(calls.Config{Asserter: m.asserter})
	people := recoveryv1connect.NewIdentityServiceClient(console, url, opts...)
	bundle, err := people.IssueBootstrap(m.asPerson("operator"), &recoveryv1.IssueBootstrapRequest{Name: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	enrolment := recoveryv1connect.NewEnrollmentServiceClient(m.authorities.Client(t, "recovery", nil),
		"https://"+m.service.EnrollAddr(), calls.Options(calls.Config{})...)
	var enrolled *recoveryv1.EnrollResponse
	testkit.Eventually(t, testkit.Patience, func() error { // until the process listens
		var err error
		enrolled, err = enrolment.Enroll(m.ctx, &recoveryv1.EnrollRequest{Token: bundle.GetToken(), Csr: csr})
		return err
	})
	certs, err := pki.DecodeCertificates(enrolled.GetCertificateChainPem())
	if err != nil {
		t.Fatal(err)
	}
	if len(certs) != 2 || pki.Fingerprint(certs[1]) != signing || enrolled.GetNodeId() != bundle.GetNodeId() {
		t.Errorf("node %s has a chain of %d certificates", enrolled.GetNodeId(), len(certs))
	}
	authority := recoveryv1connect.NewAuthorityServiceClient(console, url, opts...)
	_, err = authority.RotateAuthority(m.asPerson("security"),
		&recoveryv1.RotateAuthorityRequest{Reason: "a test", IdempotencyKey: "k"})
	if f, ok := fault.As(err); !ok || f.Reason != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Errorf("a rotation of an authority that is a process of its own: %v", err)
	}
}

// The configuration names one authority, and all of what a process needs.
func TestTheAuthorityIsConfiguredOnce(t *testing.T) {
	process := recovery.CAProcess{URL: "https://ca:8443", RootsFile: "root_ca.crt", KeyFile: "provisioner.pem"}
	for name, test := range map[string]struct {
		change func(*recovery.Config)
		want   string // empty: nothing is wrong with it
	}{
		"none":       {func(*recovery.Config) {}, "ca_dir is needed, or ca_process.url"},
		"a dir":      {func(c *recovery.Config) { c.CADir = "ca" }, ""},
		"a process":  {func(c *recovery.Config) { c.CAProcess = process }, ""},
		"both":       {func(c *recovery.Config) { c.CADir, c.CAProcess = "ca", process }, "two node authorities"},
		"half":       {func(c *recovery.Config) { c.CAProcess.URL = process.URL }, "ca_process.roots_file is needed"},
		"no key":     {func(c *recovery.Config) { c.CAProcess.URL = process.URL }, "ca_process.key_file is needed"},
		"no url":     {func(c *recovery.Config) { c.CAProcess.KeyFile = "k" }, "ca_process.url is not an https URL"},
		"plain http": {func(c *recovery.Config) { c.CAProcess.URL = "http://ca" }, "ca_process.url is not an https URL"},
		"a database": {func(c *recovery.Config) {
			c.CAProcess, c.CADatabaseURLFile = process, "db"
		}, "ca_database_url_file is of the embedded authority"},
	} {
		cfg := recovery.Default()
		test.change(&cfg)
		err := cfg.Validate()
		switch {
		case test.want == "" && err != nil && (strings.Contains(err.Error(), "ca_dir") ||
			strings.Contains(err.Error(), "ca_process")):
			t.Errorf("%s: %v", name, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
