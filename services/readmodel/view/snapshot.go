package view

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

const (
	// BeatFresh is how old a fresh beat of a replica may be.
	BeatFresh = replicas.SilentAfter
	// statementTimeout bounds one statement, in milliseconds, and readTimeout a whole read.
	statementTimeout = "5000"
	readTimeout      = 10 * time.Second
	onceTimeout      = 5 * time.Second // of a read that is no transaction
)

// Reader reads the projections.
type Reader struct {
	db   *pgxpool.Pool
	kept *bodies
}

// NewReader returns a new reader.
func NewReader(db *pgxpool.Pool) *Reader {
	return &Reader{db: db, kept: &bodies{}}
}

// Snapshot is the projection at one moment, for one scope.
type Snapshot struct {
	tx    pgx.Tx
	scope list.Scope
	kept  *bodies
	with  *pg.Batch // queries that are sent together with the next list; nil: none
	// Now is the database's time; every age in an answer is relative to it.
	Now time.Time
	// Position is the position of the projection.
	Position int64
}

type snapshotRow struct {
	Now      time.Time `db:"now"`
	Position int64     `db:"position"`
}

var takeSnapshot = pg.Define(pg.RoleReadmodel, "view.take_snapshot", `
	SELECT mesh.clock() AS now, COALESCE((SELECT c.pos FROM readmodel.event_cursor c WHERE c.name = $1), 0) AS position
	FROM set_config('statement_timeout', $2, true)`)

// Read calls fn with a snapshot. The snapshot must not be used after fn has returned.
func (r *Reader) Read(ctx context.Context, scope list.Scope, fn func(ctx context.Context, s *Snapshot) error) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err := pg.InSnapshot(ctx, r.db, func(ctx context.Context, tx pgx.Tx) error {
		at, err := pg.One[snapshotRow](ctx, tx, takeSnapshot, project.ConsumerName, statementTimeout)
		if err != nil {
			return fmt.Errorf("take a snapshot: %w", err)
		}
		return fn(ctx, &Snapshot{
			tx: tx, scope: scope, kept: r.kept, Now: at.Now, Position: at.Position,
		})
	})
	return refusal(err)
}

func (s *Snapshot) find() lookup.Finder { return lookup.In(s.tx, s.scope) }

// Resolve returns the one object that ref stands for, among the kinds, as a Finder does.
func (s *Snapshot) Resolve(
	ctx context.Context, ref string, kinds []readmodelv1.ObjectKind,
) (*readmodelv1.ResolveResponse, error) {
	return s.find().Resolve(ctx, ref, kinds)
}

// NameOwners returns the tenants of workspaces and nodes, by their ids, as a Finder does.
func (s *Snapshot) NameOwners(ctx context.Context, workspaceIDs, nodeIDs []string) (map[string]string, error) {
	return s.find().NameOwners(ctx, workspaceIDs, nodeIDs)
}

// refusal returns the fault for a read that failed; nil for nil.
func refusal(err error) error {
	switch {
	case err == nil:
		return nil
	case pg.IsConnError(err):
		return pg.Fault(err)
	case isCanceledByServer(err):
		return tookTooLong(err)
	}
	if _, ok := fault.As(err); ok || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("read projections: %w", err)
}

func tookTooLong(err error) error {
	return fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "the read took too long", fault.Cause(err))
}

// isCanceledByServer reports whether the database ended a statement, as it does at the time limit.
func isCanceledByServer(err error) bool {
	const queryCanceled = "57014"
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == queryCanceled
}
