package readmodel_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/testkit"
)

func (k *kit) health(service string) (healthv1.HealthCheckResponse_ServingStatus, error) {
	k.t.Helper()
	client := connect.NewClient[healthv1.HealthCheckRequest, healthv1.HealthCheckResponse](
		k.http("", true), k.url()+"/grpc.health.v1.Health/Check", connect.WithGRPC())
	resp, err := client.CallUnary(
		testkit.Context(k.t),
		connect.NewRequest(&healthv1.HealthCheckRequest{Service: service}),
	)
	if err != nil {
		return 0, err
	}
	return resp.Msg.GetStatus(), nil
}

// Health needs no token and has the same result as /readyz.
func TestHealthIsReadiness(t *testing.T) {
	k := newKit(t)
	ready := func() bool {
		t.Helper()
		req, err := http.NewRequestWithContext(
			testkit.Context(t),
			http.MethodGet,
			"http://"+k.service.OpsAddr()+"/readyz",
			nil,
		)
		k.check(err)
		resp, err := http.DefaultClient.Do(req)
		k.check(err)
		k.check(resp.Body.Close())
		return resp.StatusCode == http.StatusOK
	}
	await := func(want healthv1.HealthCheckResponse_ServingStatus, service string) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			got, err := k.health(service)
			if err == nil && got != want {
				err = errors.New(got.String())
			}
			return err
		})
	}
	await(healthv1.HealthCheckResponse_SERVING, "")
	await(healthv1.HealthCheckResponse_SERVING, readmodelv1connect.QueryServiceName)
	if !ready() {
		t.Error("/readyz says no")
	}
	// A schema that is older than the program makes it not ready.
	testkit.Eventually(t, testkit.Patience, func() error {
		_, err := k.DB.OwnerPool().Exec(
			testkit.Context(t),
			"DELETE FROM mesh.goose_db_version WHERE id = (SELECT max(id) FROM mesh.goose_db_version)",
		)
		return err
	})
	await(healthv1.HealthCheckResponse_NOT_SERVING, "")
	await(healthv1.HealthCheckResponse_NOT_SERVING, readmodelv1connect.PeopleServiceName)
	if ready() {
		t.Error("/readyz says yes")
	}
	if _, err := k.health("gpuaas.lifecycle.v1.WorkspaceService"); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("another port's service: %v", err)
	}
}

// Reflection is off unless it is configured.
func TestReflectionIsConfigured(t *testing.T) {
	k := newKit(t)
	services := func() ([]string, error) {
		stream := grpcreflect.NewClient(k.http("", true), k.url(), connect.WithGRPC()).NewStream(testkit.Context(t))
		defer stream.Close()
		names, err := stream.ListServices()
		out := make([]string, len(names))
		for i, n := range names {
			out[i] = string(n)
		}
		return out, err
	}
	if names, err := services(); err == nil {
		t.Errorf("by default: %v", names)
	}
	cfg := k.config
	cfg.Reflection = true
	k.service = k.start(cfg)
	names, err := services()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range append(k.service.Services(), "grpc.health.v1.Health") {
		if !slices.Contains(names, want) {
			t.Errorf("%s is missing in %v", want, names)
		}
	}
	// Reflection describes the mounted services and their messages, and no service that only other services may call.
	stream := grpcreflect.NewClient(k.http("", true), k.url(), connect.WithGRPC()).NewStream(testkit.Context(t))
	defer stream.Close()
	for _, want := range []string{
		"gpuaas.readmodel.v1.QueryService", "gpuaas.readmodel.v1.ListWorkspacesRequest", "gpuaas.lifecycle.v1.WorkspaceSpec",
		"gpuaas.node.v1.Workload", "gpuaas.common.v1.Denial", "google.protobuf.Timestamp", "grpc.health.v1.Health",
	} {
		if files, err := stream.FileContainingSymbol(protoreflect.FullName(want)); err != nil || len(files) == 0 {
			t.Errorf("%s is not described: %v", want, err)
		}
	}
	for _, internal := range []string{
		"gpuaas.lifecycle.v1.WorkspaceService", "gpuaas.lifecycle.v1.TaskService", "gpuaas.recovery.v1.IdentityService",
		"gpuaas.node.v1.NodeService", "gpuaas.lifecycle.v1.LeaseTasksRequest", "gpuaas.recovery.v1.OpenSessionsRequest",
		"gpuaas.node.v1.Hello",
	} {
		if _, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(internal)); err != nil {
			t.Errorf("%s: %v", internal, err)
		}
		if files, err := stream.FileContainingSymbol(protoreflect.FullName(internal)); err == nil {
			t.Errorf("%s is described, in %d files", internal, len(files))
		}
	}
	for _, file := range []string{
		"gpuaas/node/v1/node.proto", "gpuaas/node/v1/relay.proto",
		"gpuaas/recovery/v1/enrollment.proto",
	} {
		if _, err := stream.FileByFilename(file); err == nil {
			t.Errorf("%s is described", file)
		}
	}
	// A described method still refuses a call without a token.
	if got := k.post(
		k.http("", false),
		readmodelv1connect.QueryServiceWhoAmIProcedure,
		nil,
	); got.Status != http.StatusUnauthorized {
		t.Errorf("without a token: %v", got)
	}
}

// A page of a trusted site may call the API and read answers; any other gets no CORS header and is refused.
func TestOnlyTrustedSitesAreSharedWith(t *testing.T) {
	k := newKit(t)
	const console, evil = "https://console.example", "https://evil.example"
	cfg := k.config
	cfg.TrustedOrigins = []string{console}
	k.service = k.start(cfg)
	client := k.http(k.token("", "operator", "security"), true)
	send := func(method, origin, contentType string, header ...string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(
			testkit.Context(t),
			method,
			k.url()+readmodelv1connect.QueryServiceWhoAmIProcedure,
			strings.NewReader("{}"),
		)
		k.check(err)
		req.Header.Set("Origin", origin)
		req.Header.Set("Sec-Fetch-Site", "cross-site")
		if contentType != "" {
			req.Header.Set("Content-Type", contentType)
		}
		for i := 0; i+1 < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := client.Do(req)
		k.check(err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		k.check(err)
		return resp, string(text)
	}
	preflight := func(origin string) *http.Response {
		resp, _ := send(
			http.MethodOptions,
			origin,
			"",
			"Access-Control-Request-Method",
			"POST",
			"Access-Control-Request-Headers",
			"authorization,content-type",
		)
		return resp
	}
	got := preflight(console)
	allowed := strings.ToLower(got.Header.Get("Access-Control-Allow-Headers"))
	if got.StatusCode != http.StatusNoContent || got.Header.Get("Access-Control-Allow-Origin") != console ||
		got.Header.Get("Access-Control-Max-Age") == "" ||
		got.Header.Get("Access-Control-Allow-Methods") != "POST" || !strings.Contains(allowed, "authorization") ||
		!strings.Contains(allowed, "content-type") ||
		got.Header.Get("Access-Control-Allow-Credentials") != "" ||
		!slices.Contains(got.Header.Values("Vary"), "Origin") {
		t.Errorf("a trusted preflight: %s %v", got.Status, got.Header)
	}
	got, text := send(http.MethodPost, console, "application/json")
	if got.StatusCode != http.StatusOK || got.Header.Get("Access-Control-Allow-Origin") != console ||
		got.Header.Get("Access-Control-Expose-Headers") == "" {
		t.Errorf("a trusted call: %s %v %s", got.Status, got.Header, text)
	}
	for _, origin := range []string{evil, console + ".evil.example", "http://console.example", "null"} {
		if got := preflight(
			origin,
		); got.StatusCode == http.StatusNoContent ||
			got.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("preflight of %s: %s %v", origin, got.Status, got.Header)
		}
		for _, contentType := range []string{"application/json", "text/plain", "application/x-www-form-urlencoded"} {
			got, text := send(http.MethodPost, origin, contentType)
			var refusal struct {
				Code    string
				Details []struct {
					Type  string
					Debug struct{ Reason, Remedy string }
				}
			}
			if err := json.Unmarshal(
				[]byte(text),
				&refusal,
			); err != nil || got.StatusCode != http.StatusForbidden || refusal.Code != "permission_denied" ||
				len(refusal.Details) == 0 || refusal.Details[0].Type != "gpuaas.common.v1.Denial" ||
				!strings.Contains(refusal.Details[0].Debug.Remedy, "trusted_origins in the configuration of readmodel") ||
				got.Header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s sends %s: %s %v %s %v", origin, contentType, got.Status, got.Header, text, err)
			}
		}
	}
}
