package escalation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// mostPages is how many pages of each list are read at most. If there are more, the bundle lists the rest as missing.
const mostPages = 20

// askLimit is the time limit of a call to an owner.
const askLimit = 3 * time.Second

// Part is a service whose version and health the collector reads.
type Part struct {
	Name string
	Ask  func(ctx context.Context) (*commonv1.GetHealthResponse, error)
}

// Deps of a collector.
type Deps struct {
	Logger *slog.Logger
	Reader *view.Reader
	// Policy and Actions call the owners on behalf of the person of the context.
	Policy  func(ctx context.Context) (*recoveryv1.GetPolicyResponse, error)
	Actions func(ctx context.Context, workspaceID string) (*lifecyclev1.GetActionsResponse, error)
	Parts   []Part
}

// Collector makes bundles.
type Collector struct{ deps Deps }

// New returns a new collector.
func New(deps Deps) *Collector { return &Collector{deps: deps} }

// Request is what Write collects: the workspace, and the scope and subject of the person who asked.
type Request struct {
	Scope     list.Scope
	Subject   string // who asks
	Workspace *readmodelv1.Workspace
	At        time.Time
}

// gathering is the state of one bundle that is being collected: later sources use the results of earlier ones.
type gathering struct {
	*Collector
	req    Request
	bundle *bundle

	position int64 // of the last read
	runs     []*lifecyclev1.Run
	nodeIDs  []string
	nodes    []*readmodelv1.Node
	tasks    []*readmodelv1.Task
	trail    []*readmodelv1.AuditRow
	timeline []*readmodelv1.TimelineItem
	partial  *Gap // of the source that is being read
}

// source collects the content of one file.
type source struct {
	file string
	what string
	read func(ctx context.Context) (any, error)
}

// Write writes the bundle of one workspace to w. If it returns an error, w has got at most a part of a bundle.
func (c *Collector) Write(ctx context.Context, w io.Writer, req Request) error {
	ws := req.Workspace
	g := &gathering{Collector: c, req: req, bundle: newBundle(w, Manifest{
		Format: Format, WorkspaceID: ws.GetWorkspaceId(), Workspace: ws.GetTenant() + "/" + ws.GetName(),
		CollectedAt: req.At.UTC(), CollectedBy: req.Subject,
		CorrelationID: obs.From(ctx).CorrelationID,
	})}
	for _, s := range g.sources() {
		if err := g.collect(ctx, s); err != nil {
			return err
		}
	}
	return g.bundle.finish()
}

func (g *gathering) collect(ctx context.Context, s source) error {
	g.position, g.partial = 0, nil
	content, err := s.read(ctx)
	if ctx.Err() != nil {
		return fmt.Errorf("collect %s: %w", s.file, context.Cause(ctx))
	}
	if err != nil {
		gap, ok := errors.AsType[*absent](err)
		if !ok {
			g.deps.Logger.WarnContext(ctx, "part of an escalation not collected", slog.String("part", s.file), obs.Err(err))
			gap = &absent{Gap{Why: fault.From(err).Public}}
		}
		gap.What = cmp.Or(gap.What, s.what)
		g.bundle.lacks(gap.Gap)
		return nil
	}
	if g.partial != nil {
		g.bundle.lacks(*g.partial)
	}
	return g.bundle.put(s.file, content, g.position)
}

// absent is the error of a source that describes its gap itself.
type absent struct{ Gap }

func (a *absent) Error() string { return a.What + ": " + a.Why }

// read calls fn with a snapshot that no other source uses, so that a source that fails does not affect the others.
func (g *gathering) read(ctx context.Context, fn func(ctx context.Context, s *view.Snapshot) error) error {
	return g.deps.Reader.Read(ctx, g.req.Scope, func(ctx context.Context, s *view.Snapshot) error {
		g.position = s.Position
		return fn(ctx, s)
	})
}

// all reads every page of a list, at most mostPages of them.
func all[T any](ctx context.Context, g *gathering,
	fn func(ctx context.Context, s *view.Snapshot, page list.Page) ([]T, string, error),
) ([]T, error) {
	var out []T
	err := g.read(ctx, func(ctx context.Context, s *view.Snapshot) error {
		page := list.Page{Size: 1000}
		for range mostPages {
			part, next, err := fn(ctx, s, page)
			if err != nil {
				return err
			}
			out = append(out, part...)
			if page.Token = next; next == "" {
				return nil
			}
		}
		g.partial = &Gap{
			What: "the oldest of a long list",
			Why:  fmt.Sprintf("only the newest %d are in the bundle", len(out)),
		}
		return nil
	})
	return out, err
}

// listed returns a source that reads a list of the projection.
func listed[M proto.Message](g *gathering, keep *[]M,
	fn func(ctx context.Context, s *view.Snapshot, page list.Page) ([]M, string, error)) func(context.Context) (any,
	error) {
	return func(ctx context.Context) (any, error) {
		list, err := all(ctx, g, fn)
		if err != nil {
			return nil, err
		}
		if keep != nil {
			*keep = list
		}
		if g.partial != nil {
			g.partial.What = "the oldest of " + string(list[0].ProtoReflect().Descriptor().Name())
		}
		return items(list), nil
	}
}
