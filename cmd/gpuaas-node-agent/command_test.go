package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

func command(t *testing.T, args ...string) (int, string, string) {
	t.Helper()
	var out, errOut bytes.Buffer
	code := execute(t.Context(), args, &out, &errOut)
	return code, out.String(), errOut.String()
}

func TestUsageProblemsAreTwo(t *testing.T) {
	for _, args := range [][]string{
		{"run", "--no-such-flag"}, {"run", "extra"}, {"no-such-command"}, {}, {"run", "--log-format", "xml"},
	} {
		code, _, text := command(t, args...)
		if code != exitUsage || text == "" {
			t.Errorf("%v: exit %d: %s", args, code, text)
		}
	}
}

func TestConfigurationProblemsAreReportedTogether(t *testing.T) {
	code, _, text := command(t, "run", "--etc-dir", "/same", "--state-dir", "/same", "--gpus", "-1", "--ops-listen",
		"10.0.0.1:1", "--log-format", "xml")
	if code != exitUsage {
		t.Errorf("exit %d", code)
	}
	for _, part := range []string{"are the same", "GPUs", "ops address", "log.format"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in %q", part, text)
		}
	}
}

func TestBrokenEnvFileIsUsageAndQuotesNothing(t *testing.T) {
	testkit.IO(t)
	root := t.TempDir()
	etc := filepath.Join(root, "etc")
	if err := os.MkdirAll(etc, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(etc, "node-agent.env"), []byte("canary secret\nA='canary\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, text := command(t, "run", "--etc-dir", etc, "--state-dir", filepath.Join(root, "state"), "--uid-dir",
		filepath.Join(root, "uids"))
	if code != exitUsage || !strings.Contains(text, "line 1") || !strings.Contains(text, "line 2") ||
		strings.Contains(text, "canary") {
		t.Errorf("exit %d: %s", code, text)
	}
}

func TestSecondAgentIsNotAllowed(t *testing.T) {
	testkit.IO(t)
	root := t.TempDir()
	dirs := identity.Dirs{Etc: filepath.Join(root, "etc"), State: filepath.Join(root, "state")}
	s, err := identity.Open(dirs)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	code, _, text := command(t, "run", "--etc-dir", dirs.Etc, "--state-dir", dirs.State, "--uid-dir",
		filepath.Join(root, "uids"))
	if code != exitNotAllowed || !strings.Contains(text, "pid") {
		t.Errorf("exit %d: %s", code, text)
	}
}

func TestEnrollWithoutATokenIsUsage(t *testing.T) {
	testkit.IO(t)
	root := t.TempDir()
	code, _, text := command(t, "enroll", "--etc-dir", filepath.Join(root, "etc"), "--state-dir",
		filepath.Join(root, "state"), "--uid-dir", filepath.Join(root, "uids"))
	if code != exitUsage {
		t.Errorf("exit %d: %s", code, text)
	}
}

// TestRestorePrintsWhatIsBack: after a bundle was taken, --restore prints the address of the node API from before it.
func TestRestorePrintsWhatIsBack(t *testing.T) {
	testkit.IO(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	root := t.TempDir()
	dirs := identity.Dirs{Etc: filepath.Join(root, "etc"), State: filepath.Join(root, "state")}
	env := func(api, secret string) []byte {
		text, err := bundle.RenderEnv(
			bundle.Variable{Name: bundle.EnvAPIURL, Value: api},
			bundle.Variable{Name: bundle.EnvRecoveryURL, Value: "https://127.0.0.1:7002"},
			bundle.Variable{Name: bundle.EnvRecoveryBundle, Value: bundle.FileRecoveryCA},
			bundle.Variable{Name: bundle.EnvTrustDomain, Value: agenttest.TrustDomain},
			bundle.Variable{Name: bundle.EnvNodeName, Value: "n1"},
			bundle.Variable{Name: bundle.EnvToken, Value: "gnb_0123456789abcdef0123456789abcdef_" + secret})
		must(err)
		return text
	}
	must(os.MkdirAll(dirs.Etc, 0o700))
	must(os.WriteFile(filepath.Join(dirs.Etc, "node-agent.env"), env("https://127.0.0.1:7001", "former"), 0o600))
	authority, err := agenttest.NewAuthority("next", time.Now())
	must(err)
	by, err := authority.Pair(pki.ServiceID(agenttest.TrustDomain, "recovery"), time.Now().Add(-time.Hour),
		time.Now().Add(time.Hour))
	must(err)
	data, err := bundle.Write(bundle.Manifest{
		NodeID: ids.New(), NodeName: "n1", TrustDomain: agenttest.TrustDomain, TokenID: ids.New(),
	}, bundle.Files{Env: env("https://127.0.0.1:8001", "secret"), CA: authority.PEM(), RecoveryCA: authority.PEM()}, by)
	must(err)
	archive, err := bundle.Read(data)
	must(err)
	given, err := identity.BundleOf(archive)
	must(err)
	s, err := identity.Open(dirs)
	must(err)
	must(s.InstallBundle(given))
	must(s.Close())
	code, out, text := command(t, "enroll", "--restore", "--etc-dir", dirs.Etc, "--state-dir", dirs.State, "--uid-dir",
		filepath.Join(root, "uids"))
	if code != exitOK || !strings.Contains(out, "the node API is https://127.0.0.1:7001\n") {
		t.Errorf("exit %d: %q %s", code, out, text)
	}
}

func TestDiagPrintsTheRecord(t *testing.T) {
	testkit.IO(t)
	state := t.TempDir()
	log, err := diag.Open(diag.Config{Path: filepath.Join(state, agent.DiagnosticsFile)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := log.Record(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED, "unknown authority",
		0); err != nil {
		t.Fatal(err)
	}
	code, out, text := command(t, "diag", "--state-dir", state)
	var got struct {
		Items []diagnostic `json:"items"`
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != exitOK || len(got.Items) != 1 ||
		got.Items[0].Code != "server_tls_untrusted" {
		t.Errorf("exit %d, %s %s %v", code, out, text, err)
	}
}

// TestDiagRefusesADirectoryThatIsNotThere: a mistyped directory is no host without a record.
func TestDiagRefusesADirectoryThatIsNotThere(t *testing.T) {
	code, out, text := command(t, "diag", "--state-dir", filepath.Join(t.TempDir(), "none"))
	if code != exitUsage || out != "" || !strings.Contains(text, "--state-dir") {
		t.Errorf("exit %d: %s%s", code, out, text)
	}
}

// TestARefusalSaysWhatToDo: the next action of the reason stands below the error, also where the time was up first.
func TestARefusalSaysWhatToDo(t *testing.T) {
	refusal := fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "")
	for _, err := range []error{refusal, &enrol.EndedError{Cause: context.DeadlineExceeded, Last: refusal}} {
		if got := remedyOf(err); !strings.Contains(got, "gpuaas nodes bundle NODE") {
			t.Errorf("%v: hint %q", err, got)
		}
	}
	if got := remedyOf(context.DeadlineExceeded); got != "" {
		t.Errorf("hint %q", got)
	}
}

// TestFlagsNameTheirValuesInOneWord: a text in backquotes replaces the type of a flag's value in the help.
func TestFlagsNameTheirValuesInOneWord(t *testing.T) {
	p := &program{}
	for _, cmd := range p.command().Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if value, usage := pflag.UnquoteUsage(f); strings.Contains(value, " ") {
				t.Errorf("%s --%s %s: %s", cmd.Name(), f.Name, value, usage)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	if code, out, _ := command(t, "version"); code != exitOK || !strings.HasPrefix(out, "gpuaas-node-agent ") {
		t.Errorf("exit %d: %s", code, out)
	}
}
