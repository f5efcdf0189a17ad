package readmodel_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// policies returns the policies of all methods of the people's port.
func policies(t *testing.T, k *kit) []rpc.Policy {
	t.Helper()
	var files []protoreflect.FileDescriptor
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuaas.readmodel.v1", func(file protoreflect.FileDescriptor) bool {
		files = append(files, file)
		return true
	})
	set, err := rpc.Policies(files...)
	if err != nil {
		t.Fatal(err)
	}
	var out []rpc.Policy
	for _, p := range set {
		if slices.Contains(k.service.Services(), string(p.Method().Parent().FullName())) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b rpc.Policy) int { return strings.Compare(a.Procedure, b.Procedure) })
	if len(files) < 8 || len(out) < 26 {
		t.Fatalf("only %d methods: the walk would prove little", len(out))
	}
	return out
}

// No method answers without a token, with a bad one, with any certificate instead of one, or to a role that is not in
// its list.
func TestEveryMethodRefusesWhoMayNotCallIt(t *testing.T) {
	k := newKit(t)
	refused := rpctest.RefusesEveryMethod(t, rpctest.Target{
		URL: k.url(), Service: "readmodel", Authorities: k.authorities, Services: k.service.Services(),
	})
	if refused < 26 {
		t.Errorf("%d calls were refused", refused)
	}
	bad := k.http("gps_"+strings.Repeat("0", 32)+"_"+strings.Repeat("A", 43), true)
	wrong := 0
	for _, p := range policies(t, k) {
		if err := rpctest.Call(t.Context(), bad, k.url(),
			p); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_UNAUTHENTICATED {
			t.Errorf("%s with a made-up token: %v", p.Procedure, err)
		}
		for _, role := range rpc.Roles() {
			tenant := ""
			if role == "tenant" {
				tenant = k.A.ID
			}
			client := k.http(k.token(tenant, role), true)
			err := rpctest.Call(t.Context(), client, k.url(), p)
			denied := rpctest.ReasonOfWire(err) == commonv1.Reason_REASON_PERMISSION_DENIED
			if may := slices.Contains(p.Roles, role); denied == may {
				t.Errorf("%s as %s: %v", p.Procedure, role, err)
			} else if denied {
				wrong++
			}
		}
	}
	if wrong == 0 {
		t.Error("no role was refused anything")
	}
	if heard := k.owners.take(); slices.ContainsFunc(heard, func(a asked) bool { return a.person.Subject == "" }) {
		t.Error("an owner was asked without a person")
	}
}

// canaries returns texts that only one tenant may see.
func canaries(x projecttest.Tenant) []string {
	return []string{
		x.ID, `"` + x.Name + `"`, x.Name + "/", x.WorkspaceID, x.WorkspaceName, x.RunID, x.NodeID, x.NodeName, x.InstanceID,
		x.TaskID, x.ClaimID, x.AllocationID, x.SessionID, "pid-" + x.Name, "slot-" + x.Name, "half of " + x.Name,
		"person-" + x.Name,
		"drift of " + x.Name,
	}
}

// foreign returns the references to another tenant's objects; nonexistent returns references of the same forms to
// objects that do not exist.
func foreign(x projecttest.Tenant) map[string][]string {
	return map[string][]string{
		"workspace": {x.WorkspaceID, x.Name + "/" + x.WorkspaceName, x.WorkspaceName}, "workspace_id": {x.WorkspaceID},
		"node": {x.NodeID, x.NodeName}, "node_id": {x.NodeID}, "task_id": {x.TaskID}, "tenant": {x.ID, x.Name},
		"run_id": {x.RunID},
		"ref": {
			x.WorkspaceID, x.WorkspaceID[24:], x.RunID[26:], x.Name + "/" + x.WorkspaceName, x.NodeName, x.TaskID[24:],
		},
	}
}

func nonexistent() map[string][]string {
	return map[string][]string{
		"workspace": {ids.New(), "gone/ws-gone", "ws-gone"}, "workspace_id": {ids.New()},
		"node": {ids.New(), "box-gone"}, "node_id": {ids.New()}, "task_id": {ids.New()}, "tenant": {ids.New(), "gone"},
		"run_id": {ids.New()},
		"ref":    {ids.New(), ids.New()[24:], ids.New()[26:], "gone/ws-gone", "box-gone", ids.New()[24:]},
	}
}

// fill returns a valid request whose field has the value.
func fill(d protoreflect.MessageDescriptor, field, value string) proto.Message {
	valid := map[string]string{
		"workspace": "ws-alpha", "node": "box-alpha", "tenant": "alpha", "name": "new", "reason": "because",
		"key": "saga.retry_limit", "value": "3", "verb": "cancel", "ref": "ws-alpha",
	}
	m := dynamicpb.NewMessage(d)
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		text, isText := valid[string(f.Name())]
		switch {
		case string(f.Name()) == field:
			m.Set(f, protoreflect.ValueOfString(value))
		case f.Kind() == protoreflect.StringKind && isText && required(d, f):
			m.Set(f, protoreflect.ValueOfString(text))
		case f.IsList() && f.Name() == "roles":
			m.Mutable(f).List().Append(protoreflect.ValueOfString("tenant"))
		case f.Kind() == protoreflect.EnumKind && !f.IsList() && required(d, f):
			m.Set(f, protoreflect.ValueOfEnum(2))
		}
	}
	return m
}

// required fields of commands and gets; filters of lists stay empty.
func required(d protoreflect.MessageDescriptor, _ protoreflect.FieldDescriptor) bool {
	return !strings.HasPrefix(string(d.Name()), "List")
}

// A person of one tenant, with every role there is, names the other tenant's objects in every field of every method
// that can name one: each answer is, byte for byte, the answer for an object that does not exist, and contains nothing
// of the other tenant's; no owner gets a request.
func TestAnotherTenantsObjectsDoNotExist(t *testing.T) {
	k := newKit(t)
	client := k.http(k.token(k.A.ID, "tenant", "operator", "security", "viewer"), false)
	scan := func(what, body string) {
		t.Helper()
		for _, c := range append(canaries(k.B), k.Shared) {
			if strings.Contains(body, c) {
				t.Errorf("%s answers %q: %s", what, c, body)
			}
		}
	}
	named := 0
	for _, p := range policies(t, k) {
		if p.StreamsAnswers() {
			continue // TestTenantsAndFiltersSeeTheirOwn
		}
		input := p.Method().Input()
		scan(p.Procedure, k.post(client, p.Procedure, fill(input, "", "")).Body)
		nothing := nonexistent()
		for field, values := range foreign(k.B) {
			if input.Fields().ByName(protoreflect.Name(field)) == nil {
				continue
			}
			k.owners.take()
			for n, value := range values {
				named++
				theirs := k.post(client, p.Procedure, fill(input, field, value)).without(value)
				none := k.post(client, p.Procedure, fill(input, field, nothing[field][n])).without(nothing[field][n])
				if theirs != none {
					t.Errorf("%s %s=%s: %+v, and for nothing %+v", p.Procedure, field, value, theirs, none)
				}
				scan(p.Procedure, theirs.Body)
				want := http.StatusNotFound
				// refused for everyone who is bound to a tenant, before a name is resolved
				if !slices.Contains(p.Roles, "tenant") && !slices.Contains(p.Roles, "viewer") || field == "node" ||
					strings.Contains(p.Procedure, "Node") || ofMachines[string(p.Method().Parent().Name())] {
					want = http.StatusForbidden
				}
				if lists := strings.HasPrefix(string(input.Name()), "List") && theirs.Status == http.StatusOK; !lists &&
					theirs.Status != want {
					t.Errorf("%s %s=%s: %+v", p.Procedure, field, value, theirs)
				}
			}
			for _, a := range k.owners.take() {
				raw, err := json.Marshal(a.message)
				k.check(err)
				scan("a request to an owner", string(raw))
			}
		}
	}
	if named < 25 {
		t.Errorf("only %d names were tried", named)
	}
	// Conversely the same person sees their own tenant's objects.
	for procedure, m := range map[string]proto.Message{
		"ListWorkspaces": &readmodelv1.ListWorkspacesRequest{}, "ListInstances": &readmodelv1.ListInstancesRequest{},
		"ListTasks":  &readmodelv1.ListTasksRequest{},
		"ListClaims": &readmodelv1.ListClaimsRequest{}, "ListAllocations": &readmodelv1.ListAllocationsRequest{},
		"ListTenants": &readmodelv1.ListTenantsRequest{},
		"GetTimeline": &readmodelv1.GetTimelineRequest{Workspace: k.A.WorkspaceName},
	} {
		got := k.post(client, "/gpuaas.readmodel.v1.QueryService/"+procedure, m)
		if got.Status != http.StatusOK || !strings.Contains(got.Body, k.A.ID) && !strings.Contains(got.Body, k.A.TaskID) {
			t.Errorf("%s of one's own: %+v", procedure, got)
		}
	}
}

// A page token that was issued to an operator, or to the other tenant, returns none of their rows.
func TestPageTokensGrantNothing(t *testing.T) {
	k := newKit(t)
	operator, own := k.http(k.token("", "operator"), false), k.http(k.token(k.A.ID, "tenant", "viewer"), false)
	for _, list := range []string{
		"ListTenants", "ListWorkspaces", "ListInstances", "ListTasks", "ListClaims",
		"ListAllocations",
	} {
		procedure := "/gpuaas.readmodel.v1.QueryService/" + list
		descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("gpuaas.readmodel.v1." +
			list + "Request"))
		k.check(err)
		message, ok := descriptor.(protoreflect.MessageDescriptor)
		if !ok {
			t.Fatalf("%s is no message", list)
		}
		first := dynamicpb.NewMessage(message)
		first.Set(message.Fields().ByName("page_size"), protoreflect.ValueOfInt32(1))
		var page struct {
			NextPageToken string `json:"nextPageToken"`
		}
		k.check(json.Unmarshal([]byte(k.post(operator, procedure, first).Body), &page))
		if page.NextPageToken == "" {
			t.Errorf("%s: no second page", list)
			continue
		}
		got := k.post(own, procedure, fill(message, "page_token", page.NextPageToken))
		if got.Status != http.StatusOK {
			t.Errorf("%s: %+v", list, got)
		}
		for _, c := range append(canaries(k.B), k.Shared) {
			if strings.Contains(got.Body, c) {
				t.Errorf("%s answers %q: %s", list, c, got.Body)
			}
		}
	}
}
