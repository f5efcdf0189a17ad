package kit

import (
	"cmp"
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// Kinds of objects that commands take.
const (
	KindNode       = readmodelv1.ObjectKind_OBJECT_KIND_NODE
	kindWorkspace  = readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE
	KindTask       = readmodelv1.ObjectKind_OBJECT_KIND_TASK
	KindAllocation = readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION
	KindInstance   = readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE
	KindClaim      = readmodelv1.ObjectKind_OBJECT_KIND_CLAIM
	KindIncident   = readmodelv1.ObjectKind_OBJECT_KIND_INCIDENT
	KindFinding    = readmodelv1.ObjectKind_OBJECT_KIND_FINDING
	KindRun        = readmodelv1.ObjectKind_OBJECT_KIND_RUN
	kindTenant     = readmodelv1.ObjectKind_OBJECT_KIND_TENANT
)

// ID returns the id of the object that ref stands for: an id, a part of one, or a name. A whole id is not looked up,
// because the request that uses it fails if there is no such object.
func (s *Session) ID(ctx context.Context, kind readmodelv1.ObjectKind, ref string) (string, error) {
	if ids.Valid(ref) {
		return ref, nil
	}
	id, err := s.Find(ctx, kind, ref)
	if fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		return noID, nil
	}
	return id, err
}

// noID is an id that no object has. It replaces a reference that the person may not look up, so that the request that
// uses it is refused with the same text as with a whole id.
const noID = "00000000-0000-0000-0000-000000000000"

// Find is ID for requests that do not fail for an object that does not exist, such as a list: it looks up every
// reference.
func (s *Session) Find(ctx context.Context, kind readmodelv1.ObjectKind, ref string) (string, error) {
	found, err := s.Query.Resolve(ctx, &readmodelv1.ResolveRequest{Ref: ref, Kinds: []readmodelv1.ObjectKind{kind}})
	switch {
	case err == nil:
		return found.GetId(), nil
	case fault.Has(err, commonv1.Reason_REASON_NOT_FOUND):
		return "", fault.NoSuch(names.Of(kind), ref, fault.Cause(err))
	case fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED) && ids.Valid(ref): // an older server
		return ref, nil
	}
	return "", err
}

// WorkspaceID returns the id of the workspace by which a list is filtered; the empty reference stays empty.
func (s *Session) WorkspaceID(ctx context.Context, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	return s.Find(ctx, kindWorkspace, ref)
}

// TenantID returns the id of the tenant by which a list is filtered; the empty reference stays empty.
func (s *Session) TenantID(ctx context.Context, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	id, err := s.Find(ctx, kindTenant, ref)
	// an older server
	if fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) || fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED) {
		return ref, nil
	}
	return id, err
}

// TenantName returns the name of the tenant that ref stands for, or ref itself if the mesh does not resolve it.
func (s *Session) TenantName(ctx context.Context, ref string) string {
	found, err := s.Query.Resolve(ctx, &readmodelv1.ResolveRequest{Ref: ref, Kinds: []readmodelv1.ObjectKind{kindTenant}})
	if err != nil {
		return ref
	}
	return cmp.Or(found.GetName(), ref)
}
