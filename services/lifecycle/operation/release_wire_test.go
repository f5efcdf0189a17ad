package operation

import (
	"crypto/ed25519"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// wire serves the allocations of a seat on a port of their own, and returns a client, as readmodel's, that asserts the
// person of each call.
func (p *cluster) wire() lifecyclev1connect.AllocationServiceClient {
	p.t.Helper()
	authorities := rpctest.NewAuthorities(p.t)
	asserter := assertion.NewSigner(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)), nil)
	keys, err := asserter.KeySet()
	if err != nil {
		p.t.Fatal(err)
	}
	server, err := port.New(p.t.Context(),
		port.Deps{Logger: testkit.Logger(p.t), Persons: assertion.NewVerifier(keys, nil)},
		port.Config{Name: "internal", Addr: "127.0.0.1:0", TLS: authorities.ServerTLS(p.t, "lifecycle")})
	if err != nil {
		p.t.Fatal(err)
	}
	path, handler := lifecyclev1connect.NewAllocationServiceHandler(NewAllocations(p.seats[0].server),
		server.HandlerOptions()...)
	if err := server.Mount(path, handler); err != nil {
		p.t.Fatal(err)
	}
	rpctest.Run(p.t, server)
	return lifecyclev1connect.NewAllocationServiceClient(authorities.Client(p.t, "lifecycle",
		authorities.Service(p.t, "readmodel")), server.URL(),
		calls.Options(calls.Config{Asserter: asserter})...)
}

// Every wrong way to force a release, over the wire, and none of them changes a row.
func TestEveryWrongArgumentIsRefusedAndChangesNothing(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	id, _, a := p.failedRelease()
	client := p.wire()
	dry := &lifecyclev1.ForceReleaseRequest{
		AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_POWERED_OFF,
		Reason: "the rack is dark", DryRun: true,
	}
	shown, err := client.ForceRelease(operator(t.Context()), dry)
	if err != nil || len(shown.GetClaims()) != 4 {
		t.Fatalf("the dry run answers %v, %v", shown, err)
	}
	var acks []string
	for _, c := range shown.GetClaims() {
		acks = append(acks, c.GetClaimId())
	}
	for _, tc := range []struct {
		name   string
		roles  []string
		change func(*lifecyclev1.ForceReleaseRequest)
		reason commonv1.Reason
		tenant string
	}{
		{
			name: "an operator who is bound to a tenant", roles: []string{"operator"}, tenant: ids.New(),
			reason: commonv1.Reason_REASON_PERMISSION_DENIED,
		},
		{name: "a viewer", roles: []string{"viewer"}, reason: commonv1.Reason_REASON_PERMISSION_DENIED},
		{name: "a tenant", roles: []string{"tenant"}, reason: commonv1.Reason_REASON_PERMISSION_DENIED},
		{name: "the security role alone", roles: []string{"security"}, reason: commonv1.Reason_REASON_PERMISSION_DENIED},
		{name: "nobody", reason: commonv1.Reason_REASON_ASSERTION_INVALID},
		{
			name: "no proof", roles: []string{"operator"}, reason: commonv1.Reason_REASON_INVALID_ARGUMENT,
			change: func(r *lifecyclev1.ForceReleaseRequest) {
				r.FencedProof = commonv1.FencedProof_FENCED_PROOF_UNSPECIFIED
			},
		},
		{
			name: "a proof that there is not", roles: []string{"operator"}, reason: commonv1.Reason_REASON_INVALID_ARGUMENT,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.FencedProof = 77 },
		},
		{
			name: "no reason", roles: []string{"operator"}, reason: commonv1.Reason_REASON_INVALID_ARGUMENT,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.Reason = "" },
		},
		{
			name: "no fence", roles: []string{"operator"}, reason: commonv1.Reason_REASON_INVALID_ARGUMENT,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.ExpectedFence = 0 },
		},
		{
			name: "an older fence", roles: []string{"operator"}, reason: commonv1.Reason_REASON_CONFLICT,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.ExpectedFence-- },
		},
		{
			name: "a claim not acknowledged", roles: []string{"operator"}, reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.AckOrphans = acks[:3] },
		},
		{
			name: "no claim at all", roles: []string{"operator"}, reason: commonv1.Reason_REASON_INVALID_ARGUMENT,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.AckOrphans = append([]string{"storage"}, acks...) },
		},
		{
			name: "another allocation", roles: []string{"operator"}, reason: commonv1.Reason_REASON_NOT_FOUND,
			change: func(r *lifecyclev1.ForceReleaseRequest) { r.AllocationId = ids.New() },
		},
	} {
		ctx := t.Context()
		if tc.roles != nil {
			ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "eve", TenantID: tc.tenant, Roles: tc.roles})
		}
		req := &lifecyclev1.ForceReleaseRequest{
			AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_POWERED_OFF,
			Reason: "the rack is dark", AckOrphans: acks,
		}
		if tc.change != nil {
			tc.change(req)
		}
		_, err := client.ForceRelease(ctx, req)
		t.Run(tc.name, func(t *testing.T) { want(t, err, tc.reason) })
	}
	_, err = client.RetryRelease(rpc.WithPerson(t.Context(), rpc.Person{Subject: "eve", Roles: []string{"viewer"}}),
		&lifecyclev1.RetryReleaseRequest{AllocationId: a.ID})
	want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	if now := p.newest(id); now.Version != a.Version || now.Fence != a.Fence || p.workspace(id).State != "stuck" {
		t.Fatalf("a refusal changed %+v to %+v", a, now)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE orphaned_at IS NOT NULL`); n != 0 {
		t.Errorf("refusals have left %d orphans", n)
	}

	// The release of an allocation in use cannot be forced, whatever the arguments.
	p.away(false)
	other := p.newest(p.create(p.tenant(), "other", byProcess))
	_, err = client.ForceRelease(operator(t.Context()), &lifecyclev1.ForceReleaseRequest{
		AllocationId: other.ID, ExpectedFence: other.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_REIMAGED,
		Reason: "by mistake",
	})
	want(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	if now := p.newest(other.WorkspaceID); now.Version != other.Version {
		t.Errorf("a refusal changed %+v to %+v", other, now)
	}
}
