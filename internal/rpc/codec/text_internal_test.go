package codec

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// FuzzSuspicious: the quick scan of the bytes must not pass what the walk over the message would refuse.
func FuzzSuspicious(f *testing.F) {
	for _, s := range []string{"plain", "a\x00b", "a\u202eb", "\u200b", "naïve", "\\u0000", "\ufeff"} {
		f.Add(s, s, true)
	}
	f.Fuzz(func(t *testing.T, workspace, reason string, names bool) {
		m := &readmodelv1.OperateWorkspaceRequest{
			Workspace: strings.ToValidUTF8(workspace, ""),
			Reason:    strings.ToValidUTF8(reason, ""),
		}
		rules := TextRules{Names: names}
		problem := rules.check(m.ProtoReflect())
		for _, c := range []*codec{
			{name: "proto", rules: rules, unmarshal: proto.Unmarshal},
		} {
			raw, err := c.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			got := &readmodelv1.OperateWorkspaceRequest{}
			if err := c.Unmarshal(raw, got); err != nil {
				t.Fatal(err)
			}
			if (Problem(got) != nil) != (problem != "") {
				t.Errorf("%q %q: the codec finds %v, the walk %q", workspace, reason, Problem(got), problem)
			}
		}
	})
}

func TestTextRules(t *testing.T) {
	env := func(key, value string) proto.Message {
		return &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{
			Name: "web", Env: map[string]string{key: value},
			Args: []string{"x"},
		}}}
	}
	tests := []struct {
		name    string
		names   bool
		message proto.Message
		path    string // empty: accepted
	}{
		{name: "plain", names: true, message: &readmodelv1.GetWorkspaceRequest{Workspace: "acme/demo"}},
		{name: "accents", names: true, message: &readmodelv1.GetWorkspaceRequest{Workspace: "naïve-übung"}},
		{name: "NUL", message: &readmodelv1.GetWorkspaceRequest{Workspace: "a\x00b"}, path: "workspace"},
		{name: "NUL in a value", message: env("A", "x\x00"), path: `workloads[0].env["A"]`},
		{name: "NUL in a key", message: env("A\x00", "x"), path: `workloads[0].env["A\x00"]`},
		{
			name: "bidi in a name", names: true, message: &readmodelv1.GetWorkspaceRequest{Workspace: "a\u202eb"},
			path: "workspace",
		},
		{name: "zero width in a nested name", names: true, message: &lifecyclev1.WorkspaceSpec{
			Workloads: []*nodev1.Workload{{Name: "w\u200beb"}},
		}, path: "workloads[0].name"},
		{name: "bidi in a sentence", names: true, message: &readmodelv1.OperateWorkspaceRequest{Reason: "a\u202eb"}},
		{name: "bidi in a value", names: true, message: env("A", "\u202e")},
		{name: "bidi in a key", names: true, message: env("A\u202e", "x"), path: `workloads[0].env["A\u202e"]`},
		{name: "bidi between services", message: &readmodelv1.GetWorkspaceRequest{Workspace: "a\u202eb"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := TextRules{Names: tt.names}.check(tt.message.ProtoReflect())
			if (got == "") != (tt.path == "") || !strings.HasPrefix(got, tt.path) {
				t.Errorf("got %q, want a problem of %q", got, tt.path)
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	m := &readmodelv1.OperateWorkspaceRequest{
		Workspace: "acme/demo", Reason: "the tenant asked for it",
		IdempotencyKey: "0192f0c1-0000-7000-8000-000000000001",
	}
	raw, err := proto.Marshal(m)
	if err != nil {
		b.Fatal(err)
	}
	for name, decode := range map[string]func([]byte, any) error{
		"raw":   func(data []byte, m any) error { return proto.Unmarshal(data, m.(proto.Message)) },
		"codec": (&codec{name: "proto", rules: TextRules{Names: true}, unmarshal: proto.Unmarshal}).Unmarshal,
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := decode(raw, &readmodelv1.OperateWorkspaceRequest{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
