package readmodel_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
)

func TestConfigReportsEverythingAtOnce(t *testing.T) {
	cfg := readmodel.Default()
	cfg.PeopleListen, cfg.WatchStreams = "", 0
	err := cfg.Validate()
	for _, key := range []string{
		"people_listen", "assertion_key_file", "peers.recovery", "peers.lifecycle",
		"watch_streams",
	} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s is not reported: %v", key, err)
		}
	}
}

func TestACertificateThatPeopleWouldRefuseStopsTheStart(t *testing.T) {
	k := newKit(t)
	cfg := k.config
	cfg.PeopleHosts = []string{"mesh.example.org"}
	registry, err := obs.NewRegistry()
	k.check(err)
	_, err = readmodel.New(t.Context(), readmodel.Deps{Logger: testkit.Logger(t), Registry: registry}, cfg)
	if err == nil || !strings.Contains(err.Error(), "mesh.example.org") {
		t.Errorf("New = %v", err)
	}
}

func TestOperatorSeesTheMeshOverEveryProtocol(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	token := k.token("", "operator")
	last := k.World.Append(&lifecyclev1.Tenant{TenantId: ids.New(), Name: "gamma"}) // the service numbers it
	for name, opts := range map[string][]connect.ClientOption{
		"connect": nil, "grpc": {connect.WithGRPC()},
		"grpc_web": {connect.WithGRPCWeb()},
	} {
		q := k.query(token, opts...)
		k.Beat(false) // a node counts as connected only while its replica beats
		nodes, err := reached(t, func() (*readmodelv1.ListNodesResponse, error) {
			return q.ListNodes(ctx, &readmodelv1.ListNodesRequest{MinPos: last})
		})
		if err != nil || len(nodes.GetItems()) != 3 {
			t.Fatalf("%s: nodes %v, %v", name, nodes, err)
		}
		for _, n := range nodes.GetItems() {
			boxed := n.GetName() != "shared"
			if n.GetConnected() != boxed ||
				(boxed && (n.GetUserState() != commonv1.UserState_USER_STATE_NORMAL || n.GetLastHeartbeatAt() == nil)) {
				t.Errorf("%s: %v", name, n)
			}
		}
	}
	q := k.query(token)
	me, err := q.WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
	if err != nil || me.GetSubject() != "person@" || me.GetTenantId() != "" ||
		!slices.Equal(me.GetRoles(), []string{"operator"}) ||
		time.Until(me.GetExpiresAt().AsTime()) < 50*time.Minute || me.GetVersion() == "" {
		t.Errorf("WhoAmI = %v, %v", me, err)
	}
	tenants, err := q.ListTenants(ctx, &readmodelv1.ListTenantsRequest{PageSize: 2})
	if err != nil || len(tenants.GetItems()) != 2 || tenants.GetNextPageToken() == "" {
		t.Errorf("ListTenants = %v, %v", tenants, err)
	}
	workspace, err := q.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: "beta/" + k.B.WorkspaceName})
	if err != nil || workspace.GetWorkspace().GetWorkspaceId() != k.B.WorkspaceID ||
		!workspace.GetWorkspace().GetStalled() {
		t.Errorf("GetWorkspace = %v, %v", workspace, err)
	}
	timeline, err := q.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: k.A.WorkspaceID})
	if err != nil || len(timeline.GetItems()) != 3 || timeline.GetItems()[1].GetAdvice() == "" ||
		timeline.GetItems()[2].GetAttempt() != 0 ||
		timeline.GetItems()[1].GetHeartbeatAgeSeconds() < 50 || timeline.GetItems()[1].GetStage() != "connect" {
		t.Errorf("GetTimeline = %v, %v", timeline, err)
	}
	tasks, err := q.ListTasks(ctx, &readmodelv1.ListTasksRequest{Node: k.A.NodeName, CurrentOnly: true})
	if err != nil || len(tasks.GetItems()) != 1 || len(tasks.GetItems()[0].GetTransitions()) != 1 {
		t.Errorf("ListTasks = %v, %v", tasks, err)
	}
	claims, err := q.ListClaims(ctx, &readmodelv1.ListClaimsRequest{})
	if err != nil || len(claims.GetItems()) != 2 {
		t.Errorf("ListClaims = %v, %v", claims, err)
	}
	allocations, err := q.ListAllocations(ctx, &readmodelv1.ListAllocationsRequest{WorkspaceId: k.B.WorkspaceID})
	if err != nil || len(allocations.GetItems()) != 1 {
		t.Errorf("ListAllocations = %v, %v", allocations, err)
	}
	if explained, err := q.ExplainReason(ctx, &readmodelv1.ExplainReasonRequest{Code: "agent_down"}); err != nil ||
		len(explained.GetItems()) != 1 {
		t.Errorf("ExplainReason = %v, %v", explained, err)
	}
	if keys, err := q.GetPolicy(ctx, &readmodelv1.GetPolicyRequest{}); err != nil || len(keys.GetItems()) != 1 {
		t.Errorf("GetPolicy = %v, %v", keys, err)
	}
	var status *readmodelv1.GetStatusResponse
	// a probed service has a second to answer, in which the connection is made as well, and a beat is soon too old
	testkit.Eventually(t, testkit.Patience, func() error {
		k.Beat(false)
		status, err = q.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range status.GetComponents() {
			if !c.GetOk() {
				return fmt.Errorf("component %v", c)
			}
		}
		return nil
	})
	if status.GetNodes() != 3 || status.GetNodesConnected() != 2 || status.GetWorkspaces() != 2 ||
		status.GetLiveRuns() != 2 || status.GetPosition() == 0 {
		t.Errorf("GetStatus = %v", status)
	}
	for _, name := range []string{
		"database", "event_log", "nodeapi", "lifecycle", "lock_store", "recovery", "ca", "ingress_trust",
		"configured_profile",
	} {
		i := slices.IndexFunc(status.GetComponents(),
			func(c *readmodelv1.ComponentStatus) bool { return c.GetName() == name })
		if i < 0 || !status.GetComponents()[i].GetOk() || status.GetComponents()[i].GetObservedAt() == nil {
			t.Errorf("component %s: %v", name, status.GetComponents())
		}
	}
	if report, err := k.service.Verify(ctx); err != nil || !report.Equal() {
		t.Errorf("Verify = %+v, %v", report, err)
	}
}

// reached repeats a read while the projection has not reached its position, as clients do.
func reached[R any](t *testing.T, call func() (R, error)) (R, error) {
	t.Helper()
	var res R
	var err error
	testkit.Eventually(t, testkit.Patience, func() error {
		if res, err = call(); rpctest.ReasonOfWire(err) == commonv1.Reason_REASON_POSITION_NOT_REACHED {
			return err
		}
		return nil
	})
	return res, err
}

func TestMinPosIsWaitedForOrRefused(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	q := k.query(k.token("", "operator"))
	for range 5 {
		id := ids.New()
		pos := k.Append(&lifecyclev1.Instance{InstanceId: id, WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID})
		got, err := reached(t, func() (*readmodelv1.ListInstancesResponse, error) {
			return q.ListInstances(ctx, &readmodelv1.ListInstancesRequest{MinPos: pos, PageSize: 1})
		})
		if err != nil || len(got.GetItems()) != 1 || got.GetItems()[0].GetInstanceId() != id {
			t.Fatalf("read my write: %v, %v", got, err)
		}
	}
	for _, bad := range []string{"nonsense", ids.New()} {
		_, err := q.ListNodes(ctx, &readmodelv1.ListNodesRequest{MinPos: bad})
		if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_INVALID_ARGUMENT {
			t.Errorf("min_pos %q: %v", bad, err)
		}
	}
}

func TestCommandsGoToTheirOwnersForThePerson(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	c := k.command(k.token("", "operator", "security"))
	spec := &lifecyclev1.WorkspaceSpec{Gpus: 1}
	for name, x := range map[string]struct {
		call func() error
		want proto.Message
	}{
		"create tenant": {
			func() error { _, err := c.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{Name: "n"}); return err },
			&lifecyclev1.CreateTenantRequest{Name: "n"},
		},
		"create workspace": {
			func() error {
				_, err := c.CreateWorkspace(ctx,
					&readmodelv1.CreateWorkspaceRequest{Tenant: "alpha", Name: "w", Spec: spec, IdempotencyKey: "k", DryRun: true})
				return err
			},
			&lifecyclev1.RequestOperationRequest{
				Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Requester: "admin", IdempotencyKey: "k", DryRun: true,
				Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
					Tenant: "alpha", Name: "w",
					Spec: spec,
				}},
			},
		},
		"operate": {
			func() error {
				_, err := c.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
					Workspace: k.A.WorkspaceName, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, Reason: "r", Override: true,
				})
				return err
			},
			&lifecyclev1.RequestOperationRequest{
				Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, Requester: "admin", Reason: "r", Override: true,
				Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: k.A.WorkspaceID},
			},
		},
		"enroll": {
			func() error { _, err := c.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: "m"}); return err },
			&recoveryv1.IssueBootstrapRequest{Name: "m"},
		},
		"fence": {
			func() error {
				_, err := c.ChangeNodeIdentity(ctx,
					&readmodelv1.ChangeNodeIdentityRequest{
						Node: "shared", Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
						Reason: "r",
					})
				return err
			},
			&recoveryv1.ChangeIdentityRequest{NodeId: k.Shared, Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE, Reason: "r"},
		},
		"cordon": {
			func() error {
				_, err := c.SetCordon(ctx, &readmodelv1.SetCordonRequest{Node: k.Shared, Cordoned: true, Reason: "r"})
				return err
			},
			&lifecyclev1.SetCordonRequest{NodeId: k.Shared, Cordoned: true, Reason: "r"},
		},
		"probe": {
			func() error {
				_, err := c.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: k.A.NodeName})
				return err
			},
			&lifecyclev1.EnqueueProbeRequest{NodeId: k.A.NodeID},
		},
		"close task": {
			func() error {
				_, err := c.ChangeTask(ctx, &readmodelv1.ChangeTaskRequest{TaskId: k.B.TaskID, Verb: "close", Reason: "r"})
				return err
			},
			&lifecyclev1.ChangeTaskRequest{TaskId: k.B.TaskID, Verb: lifecyclev1.TaskVerb_TASK_VERB_CLOSE, Reason: "r"},
		},
		"policy": {
			func() error {
				_, err := c.SetPolicy(ctx, &readmodelv1.SetPolicyRequest{
					Key: "k", Value: "v", Reason: "r",
					AcknowledgeWeakening: true,
				})
				return err
			},
			&recoveryv1.SetPolicyRequest{Key: "k", Value: "v", Reason: "r", AcknowledgeWeakening: true},
		},
	} {
		k.owners.take()
		if err := x.call(); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := k.owners.take()
		if len(got) != 1 || !proto.Equal(got[0].message, x.want) || got[0].person.Subject != "person@" ||
			!got[0].person.Has("security") {
			t.Errorf("%s: the owner was asked %v, want %v", name, got, x.want)
		}
	}

	// The owner's refusal is passed on unchanged.
	k.owners.refuse(fault.New(commonv1.Reason_REASON_NOT_RESET, "reset first", fault.Unmet("reset"),
		fault.Conflicting("x")))
	_, err := c.OperateWorkspace(ctx,
		&readmodelv1.OperateWorkspaceRequest{Workspace: k.A.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_NOT_RESET ||
		connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("the owner's refusal came as %v", err)
	}
	// If the owner refuses readmodel itself, the person gets an internal error.
	k.owners.refuse(fault.New(commonv1.Reason_REASON_ASSERTION_INVALID, ""))
	_, err = c.SetPolicy(ctx, &readmodelv1.SetPolicyRequest{Key: "k", Value: "v"})
	if connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("a refused assertion came as %v", err)
	}
	k.owners.refuse(nil)

	// A workspace that was made a moment ago is found although the projection has yet to see it.
	id := ids.New()
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: id, TenantId: k.A.ID, Tenant: "alpha", Name: "brand-new",
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
	})
	tenant := k.command(k.token(k.A.ID, "tenant"))
	k.owners.take()
	if _, err := tenant.OperateWorkspace(ctx,
		&readmodelv1.OperateWorkspaceRequest{
			Workspace: "brand-new",
			Kind:      commonv1.OperationKind_OPERATION_KIND_CANCEL,
		}); err != nil {
		t.Errorf("a new workspace: %v", err)
	}
	// A tenant's person gives the tenant by name or id, and the requester is a user.
	for _, name := range []string{"alpha", k.A.ID} {
		k.owners.take()
		_, err := tenant.CreateWorkspace(ctx, &readmodelv1.CreateWorkspaceRequest{Tenant: name, Name: "w"})
		got := k.owners.take()
		if err != nil || len(got) != 1 {
			t.Fatalf("create in %s: %v, %v", name, got, err)
		}
		req, ok := got[0].message.(*lifecyclev1.RequestOperationRequest)
		if !ok || req.GetRequester() != "user" || req.GetCreate().GetTenant() != k.A.ID || got[0].person.TenantID != k.A.ID {
			t.Errorf("create in %s: asked %v by %v", name, got[0].message, got[0].person)
		}
	}
}

func TestSessionsLiveAndEndByTheDatabase(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	pool := k.DB.Pool(pg.RoleReadmodel)
	who := func(token string) commonv1.Reason {
		t.Helper()
		_, err := k.query(token).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
		return rpctest.ReasonOfWire(err)
	}
	good, other := k.token(k.A.ID, "tenant"), k.token("", "viewer")
	if got := who(good); got != commonv1.Reason_REASON_UNSPECIFIED {
		t.Fatalf("a good token: %s", got)
	}
	const refused = commonv1.Reason_REASON_UNAUTHENTICATED
	says := func(token string) string {
		t.Helper()
		_, err := k.query(token).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
		d := fault.From(fault.FromConnect(err))
		if d.Reason != refused || !strings.Contains(d.Remedy, "gpuaas people create") {
			t.Errorf("%s, what helps: %s", d.Reason, d.Remedy)
		}
		return d.Public
	}
	id := strings.Split(good, "_")[1]
	for name, token := range map[string]string{
		"none": "", "garbage": "gps_x", "another's secret": "gps_" + id + "_" + strings.SplitN(other, "_", 3)[2],
		"unknown":    "gps_" + strings.ReplaceAll(ids.New(), "-", "") + "_" + strings.SplitN(good, "_", 3)[2],
		"upper case": strings.ToUpper(good), "longer": good + "A", "another kind": "gbt_" + strings.TrimPrefix(good, "gps_"),
		"not text": "gps_\xff_",
	} {
		if got := who(strings.ToValidUTF8(token, "?")); got != refused {
			t.Errorf("%s: %s", name, got)
		}
	}
	// No part of the token's secret is stored.
	var kept bool
	k.check(pool.QueryRow(ctx, "SELECT bool_or(p::text LIKE '%' || $1 || '%') FROM readmodel.person_session p",
		strings.SplitN(good, "_", 3)[2]).Scan(&kept))
	if kept {
		t.Error("the secret is stored")
	}
	k.revoke(id)
	if got := says(good); !strings.HasPrefix(got, "your token was ended at 2") {
		t.Errorf("revoked: %s", got)
	}
	// A caller with only the id of the session learns nothing about it.
	const unknown = "the token is unknown, expired or ended"
	stolen := "gps_" + id + "_" + strings.SplitN(other, "_", 3)[2]
	if got := says(stolen); got != unknown {
		t.Errorf("the id of a revoked one with another secret: %s", got)
	}
	testkit.SetClockOffset(k.DB, 61*time.Minute)
	if got := says(other); !strings.HasPrefix(got, "your token expired at 2") {
		t.Errorf("expired: %s", got)
	}
	for _, bad := range []struct {
		subject, tenant string
		roles           []string
		ttl             time.Duration
	}{
		{"", "", []string{"viewer"}, time.Hour},
		{"p", "", []string{"tenant"}, time.Hour},
		{"p", "", []string{"root"}, time.Hour},
		{"p", "", nil, time.Hour},
		{"p", "alpha", []string{"tenant"}, time.Hour},
		{"p", "", []string{"viewer"}, 0},
		{"p", "", []string{"viewer"}, 365 * 24 * time.Hour},
	} {
		if _, err := people.IssueSession(ctx, pool, bad.subject, bad.tenant, bad.roles, bad.ttl); err == nil {
			t.Errorf("a session was issued for %+v", bad)
		}
	}
}

func TestWatchThroughThePort(t *testing.T) {
	k := newKit(t)
	token := k.token(k.A.ID, "tenant")
	for name, opts := range map[string][]connect.ClientOption{
		"connect": nil, "grpc": {connect.WithGRPC()},
		"grpc_web": {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(testkit.Context(t), 2*time.Minute)
			defer cancel()
			stream, err := k.query(token, opts...).Watch(ctx, &readmodelv1.WatchRequest{
				Topics:    []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES, readmodelv1.Topic_TOPIC_WORKSPACES},
				Workspace: k.A.WorkspaceName,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			booted := false
			for stream.Receive() {
				if stream.Msg().GetBootstrapped() != nil {
					booted = true
					k.Put(&lifecyclev1.Workspace{
						WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: "alpha", Name: k.A.WorkspaceName,
						State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
					})
				}
				if booted && stream.Msg().GetItem().GetWorkspace().GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
					return
				}
			}
			t.Errorf("the stream ended: %v", stream.Err())
		})
	}
	ctx := testkit.Context(t)
	watch := func(token string, req *readmodelv1.WatchRequest) error {
		stream, err := k.query(token).Watch(ctx, req)
		if err != nil {
			return err
		}
		defer stream.Close()
		for stream.Receive() {
			continue
		}
		return stream.Err()
	}
	for _, topic := range []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_TASKS} {
		err := watch(token, &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{topic}})
		if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
			t.Errorf("a tenant's person watches %s: %v", topic, err)
		}
	}
	workspaces := []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}
	foreign := watch(token, &readmodelv1.WatchRequest{Topics: workspaces, Workspace: k.B.WorkspaceID})
	absent := ids.New()
	random := watch(token, &readmodelv1.WatchRequest{Topics: workspaces, Workspace: absent})
	if rpctest.ReasonOfWire(foreign) != commonv1.Reason_REASON_NOT_FOUND ||
		strings.ReplaceAll(foreign.Error(), k.B.WorkspaceID, absent) != random.Error() {
		t.Errorf("another tenant's workspace: %v; an unknown one: %v", foreign, random)
	}
	if err := watch(token, &readmodelv1.WatchRequest{
		Topics:      workspaces,
		ResumeToken: "old",
	}); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED {
		t.Errorf("a bad token: %v", err)
	}
	// A revoked session ends its streams.
	stream, err := k.query(token).Watch(ctx, &readmodelv1.WatchRequest{Topics: workspaces})
	k.check(err)
	defer stream.Close()
	var revoked time.Time
	for stream.Receive() {
		if stream.Msg().GetBootstrapped() != nil {
			k.revoke(strings.Split(token, "_")[1])
			revoked = time.Now()
		}
	}
	if rpctest.ReasonOfWire(stream.Err()) != commonv1.Reason_REASON_UNAUTHENTICATED ||
		time.Since(revoked) > testkit.Patience {
		t.Errorf("ended %s after the revocation with %v", time.Since(revoked), stream.Err())
	}
}

func TestTheEdgeIsShut(t *testing.T) {
	k := newKit(t)
	client := k.http(k.token("", "operator"), true)
	send := func(method, procedure, contentType string, header map[string]string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(testkit.Context(t), method, k.url()+procedure, strings.NewReader("{}"))
		k.check(err)
		req.Header.Set("Content-Type", contentType)
		for name, value := range header {
			req.Header.Set(name, value)
		}
		resp, err := client.Do(req)
		k.check(err)
		k.check(errors.Join(resp.Body.Close()))
		return resp
	}
	whoami := readmodelv1connect.QueryServiceWhoAmIProcedure
	if got := send(http.MethodPost, whoami, "application/json", nil); got.StatusCode != http.StatusOK ||
		got.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("a script: %s %v", got.Status, got.Header)
	}
	for name, header := range map[string]map[string]string{
		"cross-site fetch": {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
		"foreign origin":   {"Origin": "https://evil.example"},
	} {
		got := send(http.MethodPost, whoami, "application/json", header)
		if got.StatusCode != http.StatusForbidden || got.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %s %v", name, got.Status, got.Header)
		}
	}
	if got := send(http.MethodOptions, whoami, "",
		map[string]string{
			"Origin":                        "https://evil.example",
			"Access-Control-Request-Method": "POST",
		}); got.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("preflight: %v", got.Header)
	}
	if got := send(http.MethodGet, whoami, "application/json", nil); got.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %s", got.Status)
	}
	for _, simple := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"} {
		if got := send(http.MethodPost, whoami, simple, nil); got.StatusCode != http.StatusUnsupportedMediaType {
			t.Errorf("%s: %s", simple, got.Status)
		}
	}
}
