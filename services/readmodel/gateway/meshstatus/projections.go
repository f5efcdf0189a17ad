package meshstatus

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// rebuildLimit is how long a check or a rebuild may take. It keeps one snapshot of the database open for the whole
// time.
const rebuildLimit = 10 * time.Minute

// Projections serves ProjectionService.
type Projections struct{ deps ProjectionsDeps }

// ProjectionsDeps are the dependencies of Projections.
type ProjectionsDeps struct {
	Projector  *project.Projector
	Announcers []project.Owner // of the live rows that are projected
	DB         pg.Beginner     // logs in as readmodel
	Wake       *events.Signal  // notified of appended events
}

// NewProjections returns the server.
func NewProjections(deps ProjectionsDeps) *Projections { return &Projections{deps: deps} }

// tableSize is how large a table of the projections is.
type tableSize struct {
	Table string `db:"name"`
	Rows  int64  `db:"rows"` // by the statistics of the database, which counts none; -1: not known yet
	Bytes int64  `db:"bytes"`
}

var readTableSizes = pg.Define(pg.RoleReadmodel, "status.projection_sizes", `
	SELECT c.relname AS name, c.reltuples::bigint AS rows, pg_total_relation_size(c.oid) AS bytes
	FROM pg_class c WHERE c.relnamespace = 'readmodel'::regnamespace AND c.relkind = 'r' AND c.relname = ANY ($1)
	ORDER BY c.relname`)

// GetProjections returns how far the projections are behind, and their sizes.
func (p *Projections) GetProjections(ctx context.Context,
	_ *readmodelv1.GetProjectionsRequest,
) (*readmodelv1.GetProjectionsResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	lag, err := p.deps.Projector.Lag(ctx)
	if err != nil {
		return nil, err
	}
	var sizes []tableSize
	if err := pg.InTx(ctx, p.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		sizes, err = pg.All[tableSize](ctx, tx, readTableSizes, project.TableNames())
		return err
	}); err != nil {
		return nil, fmt.Errorf("read sizes of projections: %w", err)
	}
	out := &readmodelv1.GetProjectionsResponse{
		Position: lag.Cursor, EventsBehind: lag.Events + lag.Unnumbered, BehindSeconds: int64(lag.Oldest.Seconds()),
		ParkedEvents: lag.Parked,
	}
	for _, s := range sizes {
		out.Tables = append(out.Tables, &readmodelv1.ProjectionTable{Table: s.Table, Rows: s.Rows, Bytes: s.Bytes})
	}
	return out, nil
}

// VerifyProjections compares the projections with a fresh projection of the events.
func (p *Projections) VerifyProjections(ctx context.Context,
	_ *readmodelv1.VerifyProjectionsRequest,
) (*readmodelv1.VerifyProjectionsResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, rebuildLimit)
	defer cancel()
	report, err := p.deps.Projector.Verify(ctx)
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.VerifyProjectionsResponse{Report: reportProto(report)}
	for _, d := range report.Differences {
		out.Differences = append(out.Differences, &readmodelv1.ProjectionDifference{
			Table: d.Table, Missing: d.Missing, Surplus: d.Surplus, Example: d.Example,
		})
	}
	return out, nil
}

// RebuildProjections rebuilds the projections from the events.
func (p *Projections) RebuildProjections(ctx context.Context,
	_ *readmodelv1.RebuildProjectionsRequest,
) (*readmodelv1.RebuildProjectionsResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, rebuildLimit)
	defer cancel()
	err := pg.InTx(ctx, p.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		_, err := audit.Record(ctx, tx, audit.Entry{
			Action: "projections.rebuild", SubjectType: "projections", SubjectID: project.ConsumerName,
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("record the rebuild of the projections: %w", err)
	}
	p.deps.Wake.Notify()
	report, err := p.deps.Projector.Rebuild(ctx, p.deps.Announcers...)
	return &readmodelv1.RebuildProjectionsResponse{Report: reportProto(report)}, err
}

func reportProto(r project.Report) *readmodelv1.ProjectionReport {
	return &readmodelv1.ProjectionReport{
		Events: r.Events, Parked: int64(r.Parked), Unapplied: int64(r.Unapplied), Cut: r.Cut, Announced: r.Announced,
	}
}
