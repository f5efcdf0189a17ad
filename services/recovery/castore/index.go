package castore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// indexAtOnce is the size in bytes up to which the index of a table is built within seconds.
	indexAtOnce = 64 << 20
	// indexTimeout is longer than building an index takes on any database.
	indexTimeout = 30 * 24 * time.Hour
)

// jobName is the name of BuildIndexes as periodic work.
const jobName = "authority-indexes"

// errBuilt is returned while another session builds indexes.
var errBuilt = errors.New("another session makes indexes")

// Job returns BuildIndexes as periodic work.
func (s *Store) Job(every time.Duration) background.Job {
	return background.Job{Name: jobName, Every: every, Timeout: indexTimeout, Run: s.BuildIndexes}
}

// BuildIndexes builds the indexes by which cuts find their rows, while the authority goes on signing, and drops those
// of former versions. The index of a small table is left to its cut. A build may take hours, and one session at a time
// builds.
func (s *Store) BuildIndexes(ctx context.Context) error {
	at, err := s.prepare(ctx)
	if err != nil {
		return fmt.Errorf("prepare authority's database: %w", err)
	}
	if at.Version > version {
		return nil // the build of that version makes the indexes it needs
	}
	for _, k := range kinds {
		made, err := k.made(ctx, s.db, at)
		if err != nil {
			return err
		}
		if len(made) == 1 && made[0] == (madeIndex{Name: k.index(), Valid: true}) {
			continue
		}
		small, err := s.small(ctx, at, k)
		if err != nil {
			return err
		}
		if small && !k.stands(made) {
			continue
		}
		if err := makeIndex(ctx, s.slow, at, k); err != nil {
			return fmt.Errorf("make index of %s: %w", k.name, err)
		}
	}
	return nil
}

// awaitIndex returns an error until the index of a kind exists. It builds the index of a small table itself.
func (s *Store) awaitIndex(ctx context.Context, at place, k kind) error {
	s.mu.Lock()
	standing := s.standing[k.name] || at.Version > version
	s.mu.Unlock()
	if standing {
		return nil
	}
	made, err := k.made(ctx, s.db, at)
	if err != nil {
		return err
	}
	if !k.stands(made) {
		small, err := s.small(ctx, at, k)
		if err != nil {
			return err
		}
		if !small {
			return s.building(ctx, at, k)
		}
		if err := makeIndex(ctx, s.db, at, k); errors.Is(err, errBuilt) {
			return s.building(ctx, at, k)
		} else if err != nil {
			return fmt.Errorf("make index of %s: %w", k.name, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.standing[k.name] = true
	return nil
}

// small reports whether the index of a kind is made by its cut.
func (s *Store) small(ctx context.Context, at place, k kind) (bool, error) {
	size, err := pg.Value[int64](ctx, s.db, readSize.For(indexOf{schema: at.Schema, kind: k}))
	if err != nil {
		return false, fmt.Errorf("read size of %s: %w", k.table, err)
	}
	return size <= s.atOnce, nil
}

// building returns an error that describes the progress of building the index of a kind.
func (s *Store) building(ctx context.Context, at place, k kind) error {
	progress, err := pg.Value[string](ctx, s.db, readProgress.For(indexOf{schema: at.Schema, kind: k}))
	switch {
	case pg.IsNoRows(err):
		return fmt.Errorf("its rows are cut once the index %s is there, which the job %s of recovery makes next", k.index(),
			jobName)
	case err != nil:
		return fmt.Errorf("read progress of index %s: %w", k.index(), err)
	}
	return fmt.Errorf("its rows are cut once the index %s is there, which is being made: %s", k.index(), progress)
}

// made returns the indexes of a kind that exist, including those of other versions.
func (k kind) made(ctx context.Context, q pg.Querier, at place) ([]madeIndex, error) {
	list, err := pg.All[madeIndex](ctx, q, readIndexes.For(struct{}{}), at.Schema, k.table, k.indexes())
	if err != nil {
		return nil, fmt.Errorf("read indexes of %s: %w", k.table, err)
	}
	return list, nil
}

// stands reports whether the index of a kind is among made, and is finished.
func (k kind) stands(made []madeIndex) bool {
	return slices.Contains(made, madeIndex{Name: k.index(), Valid: true})
}

// makeIndex builds the index of a kind and then drops those of other versions, on one connection with a lock. An index
// that was left unfinished is built anew.
func makeIndex(ctx context.Context, db *pgxpool.Pool, at place, k kind) error {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("take a connection: %w", err)
	}
	defer conn.Release()
	locked, err := pg.Value[bool](ctx, conn, tryLockIndexes.For(struct{}{}))
	if err != nil {
		return fmt.Errorf("lock indexes: %w", err)
	}
	if !locked {
		return errBuilt
	}
	defer func() {
		// If the connection was lost, so was its lock.
		_, _ = pg.Exec(context.WithoutCancel(ctx), conn, unlockIndexes.For(struct{}{}))
	}()
	now, err := pg.One[place](ctx, conn, findPlace.For(struct{}{}))
	if err != nil {
		return fmt.Errorf("read version: %w", err)
	}
	if now.Version > version {
		return nil // a build of that version has come meanwhile, and makes its own
	}
	made, err := k.made(ctx, conn, at)
	if err != nil {
		return err
	}
	if !k.stands(made) {
		mine := indexOf{schema: at.Schema, name: k.index(), kind: k}
		if _, err := pg.Exec(ctx, conn, dropIndex.For(mine)); err != nil {
			return fmt.Errorf("drop one that was left unfinished: %w", err)
		}
		if _, err := pg.Exec(ctx, conn, createIndex.For(mine)); err != nil {
			return err
		}
	}
	for _, former := range made {
		if former.Name == k.index() {
			continue
		}
		if _, err := pg.Exec(ctx, conn, dropIndex.For(indexOf{schema: at.Schema, name: former.Name, kind: k})); err != nil {
			return fmt.Errorf("drop index %s of a former version: %w", former.Name, err)
		}
	}
	return nil
}
