package readmodel_test

import (
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestFindingsAreShownWhereTheyMatter(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	node := ids.New()
	stranded := &lifecyclev1.Finding{
		FindingId: ids.New(), Kind: commonv1.FindingKind_FINDING_KIND_NODE_OCCUPIED_WITHOUT_ALLOCATION,
		Severity: commonv1.Severity_SEVERITY_P0, SubjectType: "node", SubjectId: node, NodeId: node, Summary: "stranded",
		NextAction: "look", Cordoned: true, Count: 1,
	}
	pos := k.Append(stranded)
	operator := k.token("", "viewer")
	findings := readmodelv1connect.NewFindingServiceClient(k.http(operator, true), k.url())
	list := func() (*readmodelv1.ListFindingsResponse, error) {
		return findings.ListFindings(ctx, &readmodelv1.ListFindingsRequest{MinPos: pos})
	}
	all, err := reached(t, list)
	if err != nil || len(all.GetItems()) != 3 || all.GetItems()[0].GetFindingId() != stranded.GetFindingId() ||
		!all.GetItems()[0].GetCordoned() {
		t.Fatalf("ListFindings = %v, %v", all, err)
	}
	of, err := findings.ListFindings(ctx, &readmodelv1.ListFindingsRequest{Workspace: "alpha/" + k.A.WorkspaceName})
	if err != nil || len(of.GetItems()) != 1 || of.GetItems()[0].GetSubjectId() != k.A.WorkspaceID {
		t.Errorf("ListFindings of a workspace = %v, %v", of, err)
	}
	q := k.query(operator)
	w, err := q.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: k.A.WorkspaceID})
	if got := w.GetWorkspace().GetFindings(); err != nil || len(got) != 1 || got[0].GetSummary() != "drift of alpha" {
		t.Errorf("GetWorkspace shows %v, %v", got, err)
	}
	status, err := q.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
	if err != nil || status.GetFindingsP0() != 1 || status.GetFindingsP1() != 2 || status.GetFindingsP2() != 0 {
		t.Errorf("GetStatus counts %d, %d, %d (%v)", status.GetFindingsP0(), status.GetFindingsP1(), status.GetFindingsP2(),
			err)
	}
	// A tenant's person sees no findings, not even those of the tenant's workspace, because they concern machines and
	// manual changes by operators.
	tenant := k.query(k.token(k.A.ID, "tenant", "operator"))
	if w, err = tenant.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: k.A.WorkspaceID}); err != nil ||
		len(w.GetWorkspace().GetFindings()) != 0 {
		t.Errorf("a tenant is shown %v, %v", w.GetWorkspace().GetFindings(), err)
	}
	if status, err = tenant.GetStatus(ctx, &readmodelv1.GetStatusRequest{}); err != nil ||
		status.GetFindingsP0()+status.GetFindingsP1() != 0 {
		t.Errorf("a tenant counts %v, %v", status, err)
	}
	none, err := readmodelv1connect.NewFindingServiceClient(k.http(k.token(k.A.ID, "tenant", "operator"), true),
		k.url()).ListFindings(ctx, &readmodelv1.ListFindingsRequest{})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Errorf("a tenant lists %v, %v", none, err)
	}
	// A resolved finding is not in the default list, and is in the list of all findings.
	stranded.ResolvedAt = timestamppb.Now()
	pos = k.Append(stranded)
	if all, err = reached(t, list); err != nil || len(all.GetItems()) != 2 {
		t.Errorf("ListFindings = %v, %v", all, err)
	}
	if all, err = findings.ListFindings(ctx,
		&readmodelv1.ListFindingsRequest{IncludeResolved: true, PageSize: 2}); err != nil || len(all.GetItems()) != 2 ||
		all.GetNextPageToken() == "" {
		t.Errorf("ListFindings of all = %v, %v", all, err)
	}
	one, err := findings.GetFinding(ctx, &readmodelv1.GetFindingRequest{FindingId: stranded.GetFindingId()})
	if err != nil || one.GetFinding().GetResolvedAt() == nil || one.GetFinding().GetSummary() != "stranded" {
		t.Errorf("GetFinding = %v, %v", one, err)
	}
	for name, tc := range map[string]struct {
		token string
		id    string
		want  commonv1.Reason
	}{
		"no such finding": {operator, ids.New(), commonv1.Reason_REASON_NOT_FOUND},
		"not an id":       {operator, "1", commonv1.Reason_REASON_INVALID_ARGUMENT},
		"a tenant": {
			k.token(k.A.ID, "tenant", "operator"), stranded.GetFindingId(), commonv1.Reason_REASON_PERMISSION_DENIED,
		},
	} {
		_, err := readmodelv1connect.NewFindingServiceClient(k.http(tc.token, true), k.url()).GetFinding(ctx,
			&readmodelv1.GetFindingRequest{FindingId: tc.id})
		if rpctest.ReasonOfWire(err) != tc.want {
			t.Errorf("%s: GetFinding says %v", name, err)
		}
	}
	// An acknowledgement is an operator's attestation: the person must be bound to no tenant, and must give a reason.
	for name, tc := range map[string]struct {
		token  string
		reason string
		want   commonv1.Reason
	}{
		"a viewer":             {operator, "x", commonv1.Reason_REASON_PERMISSION_DENIED},
		"a tenant's operator":  {k.token(k.A.ID, "tenant", "operator"), "x", commonv1.Reason_REASON_PERMISSION_DENIED},
		"an operator silently": {k.token("", "operator"), "", commonv1.Reason_REASON_INVALID_ARGUMENT},
	} {
		_, err := readmodelv1connect.NewFindingServiceClient(k.http(tc.token, true), k.url()).AcknowledgeFinding(ctx,
			&readmodelv1.AcknowledgeFindingRequest{
				Request: &lifecyclev1.AcknowledgeFindingRequest{FindingId: stranded.GetFindingId(), Reason: tc.reason},
			})
		if rpctest.ReasonOfWire(err) != tc.want {
			t.Errorf("%s: AcknowledgeFinding says %v", name, err)
		}
	}
}
