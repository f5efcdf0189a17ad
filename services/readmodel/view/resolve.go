package view

import (
	"context"
	"fmt"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// candidates shown of an ambiguous name.
const candidates = 10

// Node answers one by id, or by the name of exactly one node that is not retired.
func (s *Snapshot) Node(ctx context.Context, nameOrID string) (*readmodelv1.Node, error) {
	if id := strings.ToLower(nameOrID); isUUID(id) {
		found, _, err := s.Nodes(ctx, NodeFilter{ID: id, IncludeRetired: true}, Page{Size: 1})
		if err != nil || len(found) == 1 {
			return first(found), err
		}
	}
	found, _, err := s.Nodes(ctx, NodeFilter{Name: nameOrID}, Page{Size: candidates})
	if err != nil {
		return nil, err
	}
	switch len(found) {
	case 0:
		return nil, notFound("node")
	case 1:
		return found[0], nil
	default:
		choices := make([]string, 0, len(found))
		for _, n := range found {
			choices = append(choices, n.GetNodeId())
		}
		return nil, ambiguous("node", nameOrID, choices)
	}
}

// Workspace answers one by id, by tenant/name, or by a bare name that exactly one workspace has. A name means the workspace that lives; only if none
// does, the last that was decommissioned.
func (s *Snapshot) Workspace(ctx context.Context, ref string) (*readmodelv1.Workspace, error) {
	if id := strings.ToLower(ref); isUUID(id) {
		found, _, err := s.Workspaces(ctx, WorkspaceFilter{ID: id}, Page{Size: 1})
		if err != nil || len(found) == 1 {
			return first(found), err
		}
	}
	f := WorkspaceFilter{Name: ref}
	if tenant, name, ok := strings.Cut(ref, "/"); ok {
		f.Tenant, f.Name = tenant, name
	}
	if f.Name == "" {
		return nil, notFound("workspace")
	}
	for _, live := range []bool{true, false} {
		f.NotOver = live
		found, _, err := s.Workspaces(ctx, f, Page{Size: maxPage})
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			continue
		}
		newest := map[string]*readmodelv1.Workspace{} // of each tenant
		for _, w := range found {
			if old := newest[w.GetTenantId()]; old == nil || old.GetWorkspaceId() < w.GetWorkspaceId() {
				newest[w.GetTenantId()] = w
			}
		}
		if len(newest) == 1 {
			for _, w := range newest {
				return w, nil
			}
		}
		choices := make([]string, 0, len(newest))
		for _, w := range newest {
			choices = append(choices, w.GetTenant()+"/"+w.GetName())
		}
		return nil, ambiguous("workspace", ref, choices)
	}
	return nil, notFound("workspace")
}

func first[T any](found []*T) *T {
	if len(found) == 0 {
		return nil
	}
	return found[0]
}

func ambiguous(what, name string, choices []string) error {
	slices.Sort(choices)
	choices = choices[:min(len(choices), candidates)]
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, fmt.Sprintf("more than one %s is named %q", what, name),
		fault.Remedy("name one of: "+strings.Join(choices, ", ")), fault.Unmet(choices...))
}
