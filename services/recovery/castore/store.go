package castore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
)

// Store is the authority's database, logged in as the authority.
type Store struct {
	db *pgxpool.Pool
	// slow is a pool without a statement timeout. It has a connection only while BuildIndexes builds an index.
	slow *pgxpool.Pool
	// atOnce is the size of a table in bytes up to which its cut builds the index itself.
	atOnce int64

	mu    sync.Mutex
	place *place // nil until the functions have been made
	// standing has the names of the kinds whose index was found finished.
	standing map[string]bool
}

// Open returns a store over a database that the authority has opened. It does not connect. The caller must close the
// store.
func Open(ctx context.Context, url string) (*Store, error) {
	db, err := pg.Open(ctx, pg.Config{
		URL: url, ApplicationName: "gpuaas-recovery-ca", MaxConns: 1, StatementTimeout: 2 * time.Minute,
	})
	if err != nil {
		return nil, fmt.Errorf("open authority's database: %w", err)
	}
	slow, err := pg.Open(ctx, pg.Config{
		URL: url, ApplicationName: "gpuaas-recovery-ca-indexes", MaxConns: 1,
		// The timeouts are set to zero in the session, since a role or a database may have timeouts of its own.
		StatementTimeout: -1, Settings: map[string]string{"statement_timeout": "0", "lock_timeout": "0"},
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("open authority's database: %w", err)
	}
	return &Store{db: db, slow: slow, atOnce: indexAtOnce, standing: map[string]bool{}}, nil
}

// Close closes the connections.
func (s *Store) Close() {
	s.slow.Close()
	s.db.Close()
}

// Cuts returns the cuts of this database. Revocations are cut before certificates, whose rows are needed to decide
// whether a revocation still counts.
func (s *Store) Cuts() []retention.Cut {
	cuts := make([]retention.Cut, 0, len(kinds))
	for _, k := range kinds {
		cuts = append(cuts, retention.Cut{
			Name: "authority_" + k.name, Key: policy.RetentionAuthoritySeconds,
			Elsewhere: func(ctx context.Context, until time.Time, most int) (int64, error) { return s.cut(ctx, k, until, most) },
		})
	}
	return cuts
}

func (s *Store) cut(ctx context.Context, k kind, until time.Time, most int) (int64, error) {
	at, err := s.prepare(ctx)
	if err != nil {
		return 0, fmt.Errorf("prepare authority's database: %w", err)
	}
	if err := s.awaitIndex(ctx, at, k); err != nil {
		return 0, err
	}
	n, err := pg.Value[int64](ctx, s.db, cutBatch.For(k), until, most)
	if err != nil {
		return 0, fmt.Errorf("cut %s of the authority: %w", k.name, err)
	}
	return n, nil
}

// prepare makes the cutting functions, once in the life of a process, and returns the place.
func (s *Store) prepare(ctx context.Context) (place, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.place != nil {
		return *s.place, nil
	}
	at, err := pg.One[place](ctx, s.db, findPlace.For(struct{}{}))
	if pg.IsNoRows(err) {
		return place{}, errors.New("the tables of the authority are not there")
	} else if err != nil {
		return place{}, fmt.Errorf("find tables: %w", err)
	}
	grant := "GRANT " + at.Role + " TO " + pgx.Identifier{s.db.Config().ConnConfig.User}.Sanitize()
	if _, err := pg.Exec(ctx, s.db, makeRole.For(at)); err != nil {
		if !at.HasRole {
			grant = "CREATE ROLE " + at.Role + " NOLOGIN; " + grant
		}
		return place{}, fmt.Errorf("make role: %w", remedy(err, grant))
	}
	if err := pg.InTx(ctx, s.db, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		at, err = makeAll(ctx, tx)
		return err
	}); err != nil {
		return place{}, remedy(err, grant+"; DROP SCHEMA mesh_ca CASCADE")
	}
	s.place = &at
	return at, nil
}

// makeAll makes the functions, unless those of this version or of a later one exist, and grants their rights.
func makeAll(ctx context.Context, tx pgx.Tx) (place, error) {
	if _, err := pg.Exec(ctx, tx, lockFunctions.For(struct{}{})); err != nil {
		return place{}, fmt.Errorf("lock functions: %w", err)
	}
	at, err := pg.One[place](ctx, tx, findPlace.For(struct{}{}))
	if err != nil {
		return at, fmt.Errorf("find tables: %w", err)
	}
	if at.Version < version {
		if _, err := pg.Exec(ctx, tx, makeFunctions.For(at)); err != nil {
			return at, fmt.Errorf("make functions: %w", err)
		}
		at.Version = version
	}
	if _, err := pg.Exec(ctx, tx, grantRights.For(at)); err != nil {
		return at, fmt.Errorf("grant rights: %w", err)
	}
	return at, nil
}

const insufficientPrivilege = "42501"

// remedy adds to an error of missing rights the SQL that an administrator has to run. The content of the schema mesh_ca
// is made anew.
func remedy(err error, sql string) error {
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == insufficientPrivilege {
		return fmt.Errorf("the login of the authority's database has not the right: run there as an administrator `%s`: %w",
			sql, err)
	}
	return err
}
