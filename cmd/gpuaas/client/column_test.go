package client

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

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// declared checks the columns of one view against the message's descriptor.
func declared[T proto.Message](v view[T]) func(t *testing.T) {
	return func(t *testing.T) {
		t.Helper()
		var zero T
		desc := zero.ProtoReflect().Descriptor()
		keys := 0
		for _, c := range append(v.columns, v.more...) {
			if c.path == "" && c.of == nil {
				t.Errorf("%s shows nothing", c.title)
			}
			for path := range strings.FieldsSeq(strings.ReplaceAll(c.path, "|", " ")) {
				if why := resolves(desc, path); why != "" {
					t.Errorf("%s: %s", c.title, why)
				}
			}
			if c.drop > 0 && c.wide {
				t.Errorf("%s is both optional and wide", c.title)
			}
		}
		places := map[int]string{}
		for _, c := range v.columns {
			if c.drop == 0 && !c.wide && !c.text {
				keys++
			}
			if other, taken := places[c.drop]; taken && c.drop > 0 {
				t.Errorf("%s and %s have the same place in the order", c.title, other)
			}
			places[c.drop] = c.title
		}
		if keys == 0 {
			t.Error("no column is a key")
		}
		// A message without a set field is printed without a panic.
		pr := terminal(&bytes.Buffer{}, 80)
		if err := one(pr, v, zero.ProtoReflect().New().Interface().(T)); err != nil {
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
		"allocationView": declared(allocationView), "auditView": declared(auditView), "enrollView": declared(enrollView),
		"findingView": declared(findingView), "incidentView": declared(incidentView), "recoveryView": declared(recoveryView),
		"brakeView": declared(brakeView), "tenantView": declared(tenantView), "instanceView": declared(instanceView),
		"claimView": declared(claimView), "policyView": declared(policyView), "reasonView": declared(reasonView),
		"nodeView": declared(nodeView), "rollbackView": declared(rollbackView), "keyView": declared(keyView),
		"rotationView": declared(rotationView), "personView": declared(personView), "taskView": declared(taskView),
		"workspaceView": declared(workspaceView), "operationView": declared(operationView),
		"dryRunView": declared(dryRunView), "timelineView": declared(timelineView), "runView": declared(runView),
		"retentionView": declared(retentionView), "eventView": declared(eventView),
		"consumerView":            declared(consumerView),
		"actionView":              declared(actionView),
		"componentColumns":        declared(view[*readmodelv1.ComponentStatus]{columns: componentColumns}),
		"keyProblemColumns":       declared(view[*recoveryv1.KeyProblem]{columns: keyProblemColumns}),
		"rollbackEvidenceColumns": declared(view[*recoveryv1.RollbackEvidence]{columns: rollbackEvidenceColumns}),
	}
	for name, check := range views {
		t.Run(name, check)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range regexp.MustCompile(`(?m)^var (\w+) += (view\[|\[\]column\[\*)`).FindAllStringSubmatch(string(source), -1) {
			if views[found[1]] == nil {
				t.Errorf("%s: %s is not checked here", file, found[1])
			}
		}
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
		if diff := cmp.Diff(tt.want, shorten(tt.give)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", tt.give, diff)
		}
	}
}

// TestPipesHoldWholeIDs: in a pipe no id is shortened, whatever the width.
func TestPipesHoldWholeIDs(t *testing.T) {
	for _, l := range longLists() {
		var narrow, broad bytes.Buffer
		for width, out := range map[int]*bytes.Buffer{10: &narrow, 1000: &broad} {
			pr := terminal(out, width)
			pr.tty = false
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
