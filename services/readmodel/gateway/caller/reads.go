package caller

import (
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Reads reads the projections in the scope of the person behind a call.
type Reads struct {
	Reader    *view.Reader
	Projector *project.Projector
}

// Read waits for minPos and calls fn with a snapshot for the person behind the call.
func (r Reads) Read(ctx context.Context, minPos string, fn func(ctx context.Context, s *view.Snapshot) error) error {
	scope, err := ScopeOf(ctx)
	if err != nil {
		return err
	}
	if err := r.Projector.WaitFor(ctx, minPos); err != nil {
		return err
	}
	return r.Reader.Read(ctx, scope, fn)
}

// Find returns the object that get finds by a name or id, for the person behind the call. If there is none, Find waits
// for the projection to catch up and looks once more, because people name objects that they have just created.
func Find[T any](ctx context.Context, r Reads, get func(*view.Snapshot, context.Context, string) (T, error),
	ref string,
) (T, error) {
	var found T
	scope, err := ScopeOf(ctx)
	if err != nil {
		return found, err
	}
	find := func(ctx context.Context, s *view.Snapshot) error {
		var err error
		found, err = get(s, ctx, ref)
		return err
	}
	err = r.Reader.Read(ctx, scope, find)
	if !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return found, err
	}
	if err := r.Projector.CatchUp(ctx); err != nil {
		return found, err
	}
	err = r.Reader.Read(ctx, scope, find)
	return found, err
}

// Get returns the object that get finds by a name or id, for the person behind the call, after the projection has
// reached a position.
func Get[T any](ctx context.Context, r Reads, minPos string,
	get func(*view.Snapshot, context.Context, string) (T, error), ref string,
) (T, error) {
	var found T
	err := r.Read(ctx, minPos, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		found, err = get(s, ctx, ref)
		return err
	})
	return found, err
}

// pager is a request for a page of a list.
type pager interface {
	GetMinPos() string
	GetPageSize() int32
	GetPageToken() string
}

// List returns the page that fn reads for req, and the token of the next page.
func List[T any](ctx context.Context, r Reads, req pager,
	fn func(ctx context.Context, s *view.Snapshot, page list.Page) ([]T, string, error),
) ([]T, string, error) {
	var items []T
	var next string
	err := r.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		items, next, err = fn(ctx, s, list.Page{Size: req.GetPageSize(), Token: req.GetPageToken()})
		return err
	})
	return items, next, err
}
