package client_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// stocked has the objects of stock that are found by a part of their id or by name.
var stocked = []*readmodelv1.ResolveResponse{
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE, Id: workspaceID, Name: "acme/demo2"},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_RUN, Id: runID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_TASK, Id: taskID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE, Id: instanceID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_CLAIM, Id: claimID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_FINDING, Id: claimID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_INCIDENT, Id: claimID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION, Id: allocID},
	{Kind: readmodelv1.ObjectKind_OBJECT_KIND_TENANT, Id: tenantID, Name: "acme"},
}

// resolveStock finds what stock has, as the mesh would.
func resolveStock(req *readmodelv1.ResolveRequest) (*readmodelv1.ResolveResponse, error) {
	for _, o := range stocked {
		ref := req.GetRef()
		if slices.Contains(req.GetKinds(), o.GetKind()) &&
			(ref == o.GetName() || strings.HasSuffix(o.GetName(), "/"+ref) || ref == o.GetId() || len(ref) >= 6 &&
				strings.HasSuffix(o.GetId(), ref)) {
			return o, nil
		}
	}
	return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such thing")
}

func end(id string) string { return id[len(id)-8:] }

// TestPartsOfIDsAreTaken: wherever a command takes an id, it takes the end of one as a table shows it, and the request
// holds the whole id.
func TestPartsOfIDsAreTaken(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(f, "GetIncident", &readmodelv1.GetIncidentResponse{Incident: &recoveryv1.Incident{IncidentId: claimID}})
	always(f, "ChangeTask", &readmodelv1.ChangeTaskResponse{})
	for line, id := range map[string]string{
		"tasks get " + end(taskID):                                  taskID,
		"tasks cancel " + end(taskID) + " --reason r":               taskID,
		"allocations get " + end(allocID):                           allocID,
		"findings get " + end(claimID):                              claimID,
		"findings acknowledge " + end(claimID) + " --reason r":      claimID,
		"incidents get " + end(claimID):                             claimID,
		"workspaces timeline demo2 --run " + end(runID):             runID,
		"tasks list --workspace " + end(workspaceID):                workspaceID,
		"claims list --workspace acme/demo2":                        workspaceID,
		"instances list --workspace " + end(workspaceID):            workspaceID,
		"allocations list --workspace " + workspaceID:               workspaceID,
		"allocations retry-release " + end(allocID) + " --reason r": allocID,
		"workspaces list --tenant " + end(tenantID):                 tenantID,
		"workspaces list --tenant acme":                             tenantID,
		"allocations force-release " + end(allocID) +
			" --expected-fence 4 --fenced-proof reimaged --reason r --yes --ack-orphan " + end(claimID): claimID,
	} {
		f.mu.Lock()
		f.requests = nil
		f.mu.Unlock()
		call(t, strings.Fields(line)...)
		if !f.sent(id) {
			t.Errorf("%s: no request but Resolve holds %s: %v", line, id, f.requests)
		}
	}
}

// sent reports whether a request other than Resolve contained a text.
func (f *fake) sent(text string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, req := range f.requests {
		raw, err := json.Marshal(req)
		if _, resolve := req.(*readmodelv1.ResolveRequest); err == nil && !resolve && strings.Contains(string(raw), text) {
			return true
		}
	}
	return false
}

// TestATenantIsFoundByAPartOfItsID: a tenant is also found by its name, without another request.
func TestATenantIsFoundByAPartOfItsID(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(f, "ListTenants", &readmodelv1.ListTenantsResponse{Items: []*lifecyclev1.Tenant{
		{TenantId: runID, Name: "beta"},
		{TenantId: tenantID, Name: "acme"},
	}})
	for _, ref := range []string{"acme", tenantID, end(tenantID)} {
		if got := call(t, "tenants", "get", ref, "-o", "json").wants(t, 0); !strings.Contains(got.out, tenantID) {
			t.Errorf("%s: %s", ref, got.out)
		}
	}
	if got := call(t, "tenants", "get", "ffffffff").wants(t, 3); !strings.Contains(got.err,
		`there is no tenant "ffffffff"`) {
		t.Errorf("one that is not there: %s", got.err)
	}
}

// TestWhatIsNotThere: an object of any kind that does not exist is not found: exit code 3.
func TestWhatIsNotThere(t *testing.T) {
	f := mesh(t)
	stock(f)
	refuse(f, "ListWorkspaces", fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such tenant"))
	for _, line := range []string{
		"tasks get nosuch", "tasks cancel nosuch --reason r", "allocations get nosuch", "findings get nosuch",
		"incidents get nosuch", "incidents get 00ffee", "findings acknowledge nosuch --reason r",
		"workspaces timeline demo2 --run nosuch", "tasks list --workspace nosuch", "instances list --workspace nosuch",
		"claims list --workspace 0192f0c1-0000-7000-8000-0000000000ff",
		"workspaces list --tenant nope",
		"allocations retry-release nosuch",
	} {
		got := call(t, strings.Fields(line)...)
		if got.code != 3 || !strings.HasPrefix(got.err, "error: not_found: there is no ") {
			t.Errorf("%s: exit %d: %s", line, got.code, got.err)
		}
	}
}

// TestWhatMayNotBeSeenIsRefusedInTheSameWords: a part of an id is refused as the whole id is.
func TestWhatMayNotBeSeenIsRefusedInTheSameWords(t *testing.T) {
	f := mesh(t)
	stock(f)
	refuse(f, "Resolve", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator"))
	roles := fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow this",
		fault.Unmet("it needs the role operator; you have tenant"))
	for _, method := range []string{"GetTask", "ChangeTask", "GetAllocation", "GetFinding", "GetIncident"} {
		refuse(f, method, roles)
	}
	words := func(line string) string {
		got := call(t, strings.Fields(line)...).wants(t, 4)
		said, _, _ := strings.Cut(got.err, "  correlation id:")
		return said
	}
	for _, line := range []string{
		"tasks get ", "tasks cancel --reason r ", "allocations get ", "findings get ",
		"incidents get ",
	} {
		if whole, part := words(line+taskID), words(line+taskID[len(taskID)-8:]); whole != part ||
			!strings.Contains(part, "you have tenant") {
			t.Errorf("%s: %q, and with the whole id %q", line, part, whole)
		}
	}
}

// TestAmbiguous: a reference that stands for several objects is a mistake in the command line; the error lists each of
// them.
func TestAmbiguous(t *testing.T) {
	f := mesh(t)
	stock(f)
	refuse(f, "Resolve", fault.New(commonv1.Reason_REASON_AMBIGUOUS, `"0192f0" stands for more than one task`,
		fault.Unmet("task "+taskID+" node-1", "task "+runID+" node-2")))
	got := call(t, "tasks", "get", "0192f0").wants(t, 2)
	for _, want := range []string{
		`error: ambiguous: "0192f0" stands for more than one task`,
		"  one of: task " + taskID + " node-1\n", "  one of: task " + runID,
	} {
		if !strings.Contains(got.err, want) {
			t.Errorf("%q is missing in %s", want, got.err)
		}
	}
	var data struct {
		Error struct {
			Reason string
			Unmet  []string
		}
	}
	decode(t, call(t, "tasks", "get", "0192f0", "-o", "json").wants(t, 2).err, &data)
	if data.Error.Reason != "ambiguous" || len(data.Error.Unmet) != 2 {
		t.Errorf("%+v", data)
	}
}

// TestCreatePrintsTheTenantByName: the tenant may be given by its id or a part of it, and is printed by its name.
func TestCreatePrintsTheTenantByName(t *testing.T) {
	f := mesh(t)
	stock(f)
	answer(f, "Resolve", func(req *readmodelv1.ResolveRequest) (*readmodelv1.ResolveResponse, error) {
		return &readmodelv1.ResolveResponse{Kind: readmodelv1.ObjectKind_OBJECT_KIND_TENANT, Id: tenantID, Name: "acme"}, nil
	})
	refuse(f, "GetWorkspace", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, ""))
	for _, ref := range []string{tenantID, tenantID[len(tenantID)-8:], "acme"} {
		for _, dry := range []string{"--dry-run=false", "--dry-run"} {
			if got := call(t, "workspaces", "create", "demo2", "--tenant", ref, dry).wants(t, 0); !strings.Contains(got.out,
				"acme/demo2") {
				t.Errorf("--tenant %s %s: %s", ref, dry, got.out)
			}
		}
	}
	refuse(f, "Resolve", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, ""))
	if got := call(t, "workspaces", "create", "demo2", "--tenant", "acme").wants(t, 0); !strings.Contains(got.out,
		"acme/demo2") {
		t.Errorf("without a name: %s", got.out)
	}
}
