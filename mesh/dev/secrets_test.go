package dev_test

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	secretfile "github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/person"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
)

// canary is an environment value that occurs nowhere else.
const canary = "ENVCANARY-91be"

// TestEnvironmentValuesReachTheProcessAlone runs a workload with a secret in its environment. The process has it; no
// table, log, file of the control plane or answer to a person has.
func TestEnvironmentValuesReachTheProcessAlone(t *testing.T) {
	testkit.IO(t)
	cfg := config(t)
	cfg.DataDir = migrated(t)
	logged := &text{}
	s := startLogging(t, cfg, slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelDebug})))
	made, err := s.Client().Command.CreateTenant(t.Context(), &readmodelv1.CreateTenantRequest{
		Name: "acme", Quota: &lifecyclev1.Quota{Workspaces: 5, Gpus: 5, StorageBytes: 1 << 40},
	})
	if err != nil {
		t.Fatal(err)
	}
	wanted := &readmodelv1.CreateWorkspaceRequest{
		Tenant: "acme", Name: "secretive", IdempotencyKey: "key-1", Spec: &lifecyclev1.WorkspaceSpec{
			Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
			Workloads: []*nodev1.Workload{{
				Name: "main", Command: []string{"/bin/sleep", "100000"},
				Env: map[string]string{"FOO": canary},
			}},
		},
	}
	ask := func(dry bool) string {
		req := proto.CloneOf(wanted)
		req.DryRun = dry
		resp, err := s.Client().Command.CreateWorkspace(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		return protojson.Format(resp)
	}
	answers := map[string]string{"dry run": ask(true), "create": ask(false)}
	ws := s.await(t, "acme/secretive", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	answers["the same create"] = ask(false)
	if !processHas(t, "FOO="+canary) {
		t.Error("the workload's process does not have the value")
	}
	for who, client := range clientsOfRoles(t, s, made.GetTenant().GetTenantId()) {
		shown := read(t, client, who != "viewer")
		for what, body := range shown {
			answers[what+" for the "+who] = body
			if !strings.Contains(body, "FOO") {
				t.Errorf("%s for the %s lacks the name: %s", what, who, body)
			}
		}
	}
	if _, err := s.Client().Command.OperateWorkspace(t.Context(), &readmodelv1.OperateWorkspaceRequest{
		Workspace: ws.GetWorkspaceId(), Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Reason: "over",
	}); err != nil {
		t.Fatal(err)
	}
	s.await(t, "acme/secretive", commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED)
	for what, body := range answers {
		if strings.Contains(body, canary) {
			t.Errorf("%s has the value: %s", what, body)
		}
	}
	url, err := secretfile.SecretFile(s.Plan().Material.URLFile(pg.RoleOwner)).Read()
	if err != nil {
		t.Fatal(err)
	}
	if found := testkit.Mentions(t, url.Reveal(), canary); len(found) > 0 {
		t.Errorf("the value stands in %v", found)
	}
	if strings.Contains(logged.String(), canary) || logged.String() == "" {
		t.Error("the value is logged, or nothing is")
	}
	for _, file := range filesWith(t, cfg.DataDir, canary) {
		// The host that runs the workload has it, for its owner alone.
		if info, err := os.Stat(file); !strings.HasPrefix(file, filepath.Join(cfg.DataDir, "placement")) || err != nil ||
			info.Mode().Perm() != 0o600 ||
			strings.HasSuffix(file, ".log") {
			t.Errorf("the value stands in %s (%v)", file, err)
		}
	}
}

// clientsOfRoles makes a person of each role, and a client for each.
func clientsOfRoles(t *testing.T, s started, tenantID string) map[string]*person.Client {
	t.Helper()
	roots, err := pki.LoadBundle(s.Plan().Material.ServiceRoots())
	if err != nil {
		t.Fatal(err)
	}
	url, err := secretfile.SecretFile(s.Plan().Material.URLFile(pg.RoleReadmodel)).Read()
	if err != nil {
		t.Fatal(err)
	}
	db, err := pg.Open(t.Context(), pg.Config{URL: url.Reveal(), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	out := map[string]*person.Client{"operator": s.Client()}
	for role, tenant := range map[string]string{"viewer": "", "tenant": tenantID} {
		token, err := people.IssueSession(t.Context(), db, role+"@example.test", tenant, []string{role}, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		client, err := person.Dial(person.Config{
			Server: s.Plan().Addresses.Console, TrustDomain: dev.TrustDomain,
			Roots: roots, Token: token,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		out[role] = client
	}
	return out
}

// read reads the workspace through every method that returns it.
func read(t *testing.T, client *person.Client, mayEscalate bool) map[string]string {
	t.Helper()
	got, err := client.Query.GetWorkspace(t.Context(), &readmodelv1.GetWorkspaceRequest{Workspace: "acme/secretive"})
	if err != nil {
		t.Fatal(err)
	}
	listed, err := client.Query.ListWorkspaces(t.Context(), &readmodelv1.ListWorkspacesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := client.Query.Watch(ctx,
		&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	var watched strings.Builder
	for stream.Receive() && stream.Msg().GetBootstrapped() == nil {
		watched.WriteString(protojson.Format(stream.Msg()))
	}
	out := map[string]string{"get": protojson.Format(got), "list": protojson.Format(listed), "watch": watched.String()}
	if mayEscalate {
		if bundle := escalate(t, client); strings.Contains(bundle, canary) {
			t.Error("the escalation bundle has the value")
		}
	}
	return out
}

// processHas reports whether a process of this machine has a variable.
func processHas(t *testing.T, variable string) bool {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		env, err := os.ReadFile(file)
		if err == nil && strings.Contains("\x00"+string(env), "\x00"+variable+"\x00") {
			return true
		}
	}
	return false
}

// filesWith lists the files under a directory that hold a text.
func filesWith(t *testing.T, dir, text string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was there a moment ago
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if bytes.Contains(content, []byte(text)) {
			out = append(out, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(fmt.Errorf("search %s: %w", dir, err))
	}
	return out
}

// escalate returns everything in the bundle of the workspace.
func escalate(t *testing.T, client *person.Client) string {
	t.Helper()
	stream, err := client.Escalate.Escalate(t.Context(), &readmodelv1.EscalateRequest{Workspace: "acme/secretive"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	var raw []byte
	for stream.Receive() {
		raw = append(raw, stream.Msg().GetChunk()...)
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	bundle, err := zip.NewReader(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, entry := range bundle.File {
		reader, err := entry.Open()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(&out, io.LimitReader(reader, 64<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if !strings.Contains(out.String(), "secretive") {
		t.Errorf("the bundle says nothing of the workspace")
	}
	return out.String()
}
