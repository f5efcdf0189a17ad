package agent_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

const secondToken = "gnb_0123456789abcdef0123456789abcdef_canaryBBBBBBBBBBBBBBBBBBBB"

// archive returns the bundle of a node that exists, after change has changed what it is made of, and its digest.
func (m *mesh) archive(change func(*archived)) (string, string) {
	m.t.Helper()
	a := &archived{
		manifest: bundle.Manifest{
			NodeID: m.nodeID, NodeName: "n1", TrustDomain: m.nodes.Domain, TokenID: ids.New(), IssuedAt: time.Now(),
		},
		by: m.services, api: m.api, enrol: m.enrolURL, ca: m.services.PEM(), recoveryCA: m.services.PEM(),
	}
	if change != nil {
		change(a)
	}
	env, err := bundle.RenderEnv(
		bundle.Variable{Name: bundle.EnvAPIURL, Value: a.api}, bundle.Variable{Name: bundle.EnvRecoveryURL, Value: a.enrol},
		bundle.Variable{Name: bundle.EnvRecoveryBundle, Value: bundle.FileRecoveryCA},
		bundle.Variable{Name: bundle.EnvTerminalURL, Value: a.terminal},
		bundle.Variable{Name: bundle.EnvTrustDomain, Value: a.manifest.TrustDomain},
		bundle.Variable{Name: bundle.EnvToken, Value: secondToken})
	if err != nil {
		m.t.Fatal(err)
	}
	by, err := a.by.Pair(pki.ServiceID(m.nodes.Domain, "recovery"), time.Now().Add(-time.Hour),
		time.Now().Add(time.Hour))
	if err != nil {
		m.t.Fatal(err)
	}
	data, err := bundle.Write(a.manifest, bundle.Files{Env: env, CA: a.ca, RecoveryCA: a.recoveryCA}, by)
	if err != nil {
		m.t.Fatal(err)
	}
	if a.spoil {
		data[len(data)/2] ^= 0x40
	}
	path := filepath.Join(m.t.TempDir(), "n1"+bundle.Extension)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return path, bundle.DigestOf(data)
}

// archived is what a test's archive is made of.
type archived struct {
	manifest             bundle.Manifest
	by                   *agenttest.Authority
	api, enrol, terminal string
	ca, recoveryCA       []byte
	spoil                bool // a bit of it is turned
}

// digestOf returns a digest of the files of a host's identity.
func digestOf(t *testing.T, cfg agent.Config) string {
	t.Helper()
	sum := sha256.New()
	for _, dir := range []string{cfg.EtcDir, cfg.StateDir} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			keep := strings.HasSuffix(path, ".pem") || strings.HasSuffix(path, ".crt") || strings.HasSuffix(path, ".env") ||
				strings.HasSuffix(path, "node.json") || strings.HasSuffix(path, "before-bundle.json")
			if err != nil || entry.IsDir() || !keep {
				return err
			}
			data, err := os.ReadFile(path)
			sum.Write([]byte(path))
			sum.Write(data)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func take(t *testing.T, cfg agent.Config, from agent.Bundle) error {
	t.Helper()
	a := open(t, cfg)
	err := a.Enrol(t.Context(), from)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	return err
}

func TestAnArchiveBringsTheHostBack(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	// The host strays: its endpoints are gone, and it trusts another issuer.
	other, err := agenttest.NewAuthority("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a := open(t, cfg)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	stray := "GPUAAS_API_URL=https://127.0.0.1:1\nGPUAAS_RECOVERY_API_URL=https://127.0.0.1:1\n"
	for name, content := range map[string]string{
		"node-agent.env": stray, "ca-bundle.crt": string(other.PEM()), "recovery-ca-bundle.crt": string(other.PEM()),
	} {
		if err := os.WriteFile(filepath.Join(cfg.EtcDir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path, digest := m.archive(nil)
	before := digestOf(t, cfg)
	if err := take(t, cfg, agent.Bundle{Path: path}); !fault.Has(err, commonv1.Reason_REASON_BUNDLE_INVALID) ||
		!strings.Contains(err.Error(), digest) {
		t.Fatalf("signed by a key that the host does not trust, without a digest: %v", err)
	}
	if digestOf(t, cfg) != before {
		t.Error("the refusal changed the host")
	}
	if err := take(t, cfg, agent.Bundle{Path: path, Digest: digest}); err != nil {
		t.Fatal(err)
	}
	if m.instances != 2 {
		t.Errorf("%d enrolments", m.instances)
	}
	if err := take(t, cfg, agent.Bundle{Path: path}); err != nil { // it trusts the key now, and has used the token
		t.Fatal(err)
	}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if m.instances != 2 {
		t.Errorf("%d enrolments after the same bundle again", m.instances)
	}
}

// Every archive that is refused leaves the host as it was, with a record of why, which the running agent counts.
func TestRefusedArchivesChangeNothing(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	other, err := agenttest.NewAuthority("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	before := digestOf(t, cfg)
	cases := map[string]struct {
		change func(*archived)
		digest string // `own`: its own
		text   string
	}{
		"another digest":       {nil, bundle.DigestOf(nil), "not the one that was given"},
		"another signer":       {func(a *archived) { a.by = other }, "", "not by a key that this host trusts"},
		"signed for nothing":   {func(a *archived) { a.by = other }, "own", "signature is not good"},
		"another node":         {func(a *archived) { a.manifest.NodeID = ids.New() }, "", "it is for node"},
		"spoiled":              {func(a *archived) { a.spoil = true }, "own", "refused as a whole"},
		"nothing answers":      {func(a *archived) { a.api = "https://127.0.0.1:1" }, "", "unreachable"},
		"no enrolment":         {func(a *archived) { a.enrol = "https://127.0.0.1:1" }, "", "unreachable"},
		"no terminal":          {func(a *archived) { a.terminal = "https://127.0.0.1:1" }, "", "unreachable"},
		"another server":       {func(a *archived) { a.api = a.enrol }, "", "another server"},
		"trust of others":      {func(a *archived) { a.ca = other.PEM() }, "", "untrusted"},
		"another trust domain": {func(a *archived) { a.manifest.TrustDomain = "other.test" }, "own", "signature is not good"},
	}
	for name, c := range cases {
		path, digest := m.archive(c.change)
		if c.digest != "own" {
			digest = c.digest
		}
		err := take(t, cfg, agent.Bundle{Path: path, Digest: digest})
		if err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
		if digestOf(t, cfg) != before {
			t.Fatalf("%s: the host was changed", name)
		}
	}
	entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	recorded := 0
	for _, e := range entries {
		if e.Code == "profile_refused" {
			recorded++
		}
	}
	if recorded == 0 {
		t.Errorf("no refusal is recorded: %v", entries)
	}
	if m.instances != 1 {
		t.Errorf("%d enrolments", m.instances)
	}
	if err := take(t, cfg, agent.Bundle{Path: os.DevNull}); !fault.Has(err, commonv1.Reason_REASON_BUNDLE_INVALID) {
		t.Errorf("a device: %v", err)
	}
	if err := take(t, cfg, agent.Bundle{Path: filepath.Join(cfg.EtcDir, "none")}); err == nil {
		t.Error("a file that is not there was taken")
	}
	cfg.OpsListen = "127.0.0.1:0"
	a := open(t, cfg)
	end, _ := run(t, a)
	line := fmt.Sprintf("agent_diagnostics_recorded{code=%q} %d\n", "profile_refused", len(cases)+2)
	if metrics := fetch(t, "http://"+a.OpsAddr()+"/metrics"); !strings.Contains(metrics, line) {
		t.Errorf("no %q in\n%s", line, metrics)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// A control plane that refuses the node for good has the former endpoints put back.
func TestARefusalForGoodPutsTheFormerBack(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	next := newMesh(t) // of the same node, at other endpoints
	next.nodeID = m.nodeID
	next.enrolFail = fault.New(commonv1.Reason_REASON_IDENTITY_RETIRED, "")
	path, digest := next.archive(nil)
	a := open(t, cfg)
	err := a.Enrol(t.Context(), agent.Bundle{Path: path, Digest: digest})
	if !fault.Has(err, commonv1.Reason_REASON_IDENTITY_RETIRED) {
		t.Errorf("the refusal is %v", err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(cfg.EtcDir, "node-agent.env"))
	if err != nil {
		t.Fatal(err)
	}
	env, err := envfile.Parse(data)
	if err != nil || env.Get(envfile.APIURL) != m.api || env.Get(envfile.Token) == secondToken {
		t.Errorf("the host is left with %q, %v", env.Get(envfile.APIURL), err)
	}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAHostIsTransferredToAnotherMesh checks that a host that is a node takes neither an archive nor a directory of
// another mesh, and goes on as it was. After it was wiped it enrols in the other mesh, and is not seen again in the
// first one.
func TestAHostIsTransferredToAnotherMesh(t *testing.T) {
	first, second := newMesh(t), newMeshOf(t, "second.test")
	cfg := config(t.TempDir())
	enrolled(t, first, cfg)
	archive, digest := second.archive(nil)
	directory := second.bundle(firstToken + "second")
	env := filepath.Join(directory, "node-agent.env")
	data, err := os.ReadFile(env)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(env, append(data, "GPUAAS_API_URL="+second.api+"\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	before := digestOf(t, cfg)
	for name, from := range map[string]agent.Bundle{
		"an archive": {Path: archive, Digest: digest}, "a directory": {Path: directory},
	} {
		err := take(t, cfg, from)
		text := fmt.Sprint(err)
		if refusal, ok := fault.As(err); ok {
			text += refusal.Remedy
		}
		if !strings.Contains(text, agenttest.TrustDomain) || !strings.Contains(text, identity.Transfer) {
			t.Errorf("%s: %s", name, text)
		}
		if digestOf(t, cfg) != before {
			t.Fatalf("%s: the host was changed", name)
		}
	}
	end, _ := run(t, open(t, cfg))
	first.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{cfg.EtcDir, cfg.StateDir} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	if err := take(t, cfg, agent.Bundle{Path: directory}); err != nil {
		t.Fatalf("after the wipe: %v", err)
	}
	met := len(first.hellos)
	end, _ = run(t, open(t, cfg))
	second.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if second.instances != 1 || first.instances != 1 || len(first.hellos) != met {
		t.Errorf("%d enrolments there, %d in the first mesh, which it met %d times more", second.instances, first.instances,
			len(first.hellos)-met)
	}
}

// A bundle that was used before puts nothing in place. Where the host lacks what it would have brought, that is an
// error with a way out, and not the success of the command that made the host a node.
func TestASpentBundleIsNoSuccessWhereTheHostLacksIt(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	enrolled(t, m, cfg)
	for _, lost := range [][]string{{"ca-bundle.crt"}, {"cert.pem", "key.pem"}} {
		content := map[string][]byte{}
		for _, name := range lost {
			path := filepath.Join(cfg.EtcDir, name)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			content[path] = data
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		err := take(t, cfg, agent.Bundle{Path: m.bundle(firstToken)})
		refusal, ok := fault.As(err)
		if !ok || !errors.Is(err, identity.ErrBundleSpent) || !strings.Contains(refusal.Remedy, "gpuaas nodes bundle") {
			t.Errorf("without %v: %v", lost, err)
		}
		for path, data := range content {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	enrolled(t, m, cfg)
	if m.instances != 1 {
		t.Errorf("%d enrolments", m.instances)
	}
}
