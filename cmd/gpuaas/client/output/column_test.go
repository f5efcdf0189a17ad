package output_test

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/controlplane"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/inventory"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/people"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/profiles"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/tokens"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/workspaces"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// declared checks the columns of one view against the message's descriptor.
func declared[T proto.Message](v output.View[T]) func(t *testing.T) {
	return func(t *testing.T) {
		t.Helper()
		var zero T
		desc := zero.ProtoReflect().Descriptor()
		keys := 0
		for _, c := range append(v.Columns, v.More...) {
			if c.Path == "" && c.Of == nil {
				t.Errorf("%s shows nothing", c.Title)
			}
			for path := range strings.FieldsSeq(strings.ReplaceAll(c.Path, "|", " ")) {
				if why := resolves(desc, path); why != "" {
					t.Errorf("%s: %s", c.Title, why)
				}
			}
			if c.Drop > 0 && c.Wide {
				t.Errorf("%s is both optional and wide", c.Title)
			}
		}
		places := map[int]string{}
		for _, c := range v.Columns {
			if c.Drop == 0 && !c.Wide && !c.Text {
				keys++
			}
			if other, taken := places[c.Drop]; taken && c.Drop > 0 {
				t.Errorf("%s and %s have the same place in the order", c.Title, other)
			}
			places[c.Drop] = c.Title
		}
		if keys == 0 {
			t.Error("no column is a key")
		}
		// A message without a set field is printed without a panic.
		pr := terminal(&bytes.Buffer{}, 80)
		if err := output.One(pr, v, zero.ProtoReflect().New().Interface().(T)); err != nil {
			t.Error(err)
		}
	}
}

func resolves(desc protoreflect.MessageDescriptor, path string) string {
	name, rest, deeper := strings.Cut(path, ".")
	field := desc.Fields().ByName(protoreflect.Name(name))
	switch {
	case field == nil:
		return string(desc.FullName()) + " has no field " + name
	case !deeper:
		return ""
	case field.Message() == nil || field.IsList():
		return string(field.FullName()) + " has no fields"
	}
	return resolves(field.Message(), rest)
}

// TestColumnsAreFields: every declared path is a field of the view's message, and no view is left out of this test.
func TestColumnsAreFields(t *testing.T) {
	views := map[string]func(*testing.T){
		"controlplane.ComponentColumns": declared(
			output.View[*readmodelv1.ComponentStatus]{Columns: controlplane.ComponentColumns}),
		"controlplane.KeyProblemColumns": declared(
			output.View[*recoveryv1.KeyProblem]{Columns: controlplane.KeyProblemColumns}),
		"controlplane.CheckView":             declared(controlplane.CheckView),
		"controlplane.AuthorityRotationView": declared(controlplane.AuthorityRotationView),
		"controlplane.IssuerColumns": declared(
			output.View[*recoveryv1.TrustedIssuer]{Columns: controlplane.IssuerColumns}),
		"controlplane.IssuersView": declared(controlplane.IssuersView),
		"controlplane.IngressColumns": declared(
			output.View[*recoveryv1.IngressTrust]{Columns: controlplane.IngressColumns}),
		"controlplane.TrustView":            declared(controlplane.TrustView),
		"controlplane.KeyView":              declared(controlplane.KeyView),
		"controlplane.PolicyView":           declared(controlplane.PolicyView),
		"controlplane.ReasonView":           declared(controlplane.ReasonView),
		"controlplane.RetentionView":        declared(controlplane.RetentionView),
		"controlplane.ProjectionTablesView": declared(controlplane.ProjectionTablesView),
		"controlplane.RollbackEvidenceColumns": declared(
			output.View[*recoveryv1.RollbackEvidence]{Columns: controlplane.RollbackEvidenceColumns}),
		"controlplane.RollbackView": declared(controlplane.RollbackView),
		"controlplane.RotationView": declared(controlplane.RotationView),
		"inventory.AllocationView":  declared(inventory.AllocationView),
		"inventory.ClaimView":       declared(inventory.ClaimView),
		"inventory.InstanceView":    declared(inventory.InstanceView),
		"inventory.TenantView":      declared(inventory.TenantView),
		"nodes.BundleView":          declared(nodes.BundleView),
		"nodes.EnrollView":          declared(nodes.EnrollView),
		"nodes.RecordView":          declared(nodes.RecordView),
		"nodes.MergedView":          declared(nodes.MergedView),
		"nodes.TaskView":            declared(nodes.TaskView),
		"nodes.VerdictsView":        declared(nodes.VerdictsView),
		"nodes.ActionView":          declared(nodes.ActionView),
		"nodes.View":                declared(nodes.View),
		"operations.DryRunView":     declared(operations.DryRunView),
		"operations.View":           declared(operations.View),
		"people.View":               declared(people.View),
		"profiles.View":             declared(profiles.View),
		"records.AuditView":         declared(records.AuditView),
		"records.BrakeView":         declared(records.BrakeView),
		"records.ConsumerView":      declared(records.ConsumerView),
		"records.EventView":         declared(records.EventView),
		"records.FindingView":       declared(records.FindingView),
		"records.IncidentView":      declared(records.IncidentView),
		"records.NotificationView":  declared(records.NotificationView),
		"records.ParkedView":        declared(records.ParkedView),
		"records.RecoveryView":      declared(records.RecoveryView),
		"tokens.ExtensionView":      declared(tokens.ExtensionView),
		"tokens.View":               declared(tokens.View),
		"workspaces.ActionView":     declared(workspaces.ActionView),
		"workspaces.RunView":        declared(workspaces.RunView),
		"workspaces.TimelineView":   declared(workspaces.TimelineView),
		"workspaces.View":           declared(workspaces.View),
	}
	for name, check := range views {
		t.Run(name, check)
	}
	files, err := filepath.Glob("../*/*.go")
	if err != nil {
		t.Fatal(err)
	}
	declaration := regexp.MustCompile(`(?m)^var (\w+) += (output\.View\[|\[\]output\.Column\[\*)`)
	found := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, declared := range declaration.FindAllStringSubmatch(string(source), -1) {
			name := filepath.Base(filepath.Dir(file)) + "." + declared[1]
			if found++; views[name] == nil {
				t.Errorf("%s: %s is not checked here", file, name)
			}
		}
	}
	if found != len(views) {
		t.Errorf("%d views are declared in the packages of the client, and %d are checked here", found, len(views))
	}
}

func TestResolves(t *testing.T) {
	desc := (&readmodelv1.Node{}).ProtoReflect().Descriptor()
	for path, good := range map[string]bool{
		"name": true, "identity.state": true, "identity.nothing": false,
		"nothing": false, "name.state": false, "session.diagnostics.code": false,
	} {
		if why := resolves(desc, path); (why == "") != good {
			t.Errorf("%s: %q", path, why)
		}
	}
}

// TestShortIDs: a table shows the last digits of ids, and more of them if two would look the same.
func TestShortIDs(t *testing.T) {
	for _, tt := range []struct{ give, want []string }{
		{[]string{uuidOne, uuidTwo}, []string{"1b6a9d31", "d2e3f405"}},
		{[]string{"node " + uuidOne, "box-1", ""}, []string{"node 1b6a9d31", "box-1", ""}},
		{[]string{uuidOne, uuidOne}, []string{"1b6a9d31", "1b6a9d31"}},
		{
			[]string{"01a202da-fe6f-713c-ac64-0f4e1b6a9d31", "01a202da-fe6f-713c-ac64-0f5e1b6a9d31"},
			[]string{"4e1b6a9d31", "5e1b6a9d31"},
		},
	} {
		if diff := cmp.Diff(tt.want, output.ShortIDs(tt.give)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", tt.give, diff)
		}
	}
}

// TestPipesHaveWholeIDs: in a pipe no id is shortened, whatever the width.
func TestPipesHaveWholeIDs(t *testing.T) {
	for _, l := range longLists() {
		var narrow, broad bytes.Buffer
		for width, out := range map[int]*bytes.Buffer{10: &narrow, 1000: &broad} {
			pr := terminal(out, width)
			pr.TTY = false
			if err := l.show(pr); err != nil {
				t.Fatal(err)
			}
		}
		if narrow.String() != broad.String() || strings.Contains(narrow.String(), "...") {
			t.Errorf("%s depends on the width:\n%s\n%s", l.name, narrow.String(), broad.String())
		}
		rows := strings.Split(strings.TrimSuffix(narrow.String(), "\n"), "\n")
		for _, row := range rows {
			if strings.Count(row, "\t") != strings.Count(rows[0], "\t") {
				t.Errorf("%s: %q has other fields than the header %q", l.name, row, rows[0])
			}
		}
	}
}
