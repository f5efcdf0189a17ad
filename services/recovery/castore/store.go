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

	mu       sync.Mutex
	prepared bool
}

// Open makes the store of a database that the authority has opened. It does not dial. The caller closes it.
func Open(ctx context.Context, url string) (*Store, error) {
	// An index over a database that has grown for long takes minutes.
	db, err := pg.Open(ctx, pg.Config{URL: url, ApplicationName: "gpuaas-recovery-ca", MaxConns: 1, StatementTimeout: 9 * time.Minute})
	if err != nil {
		return nil, fmt.Errorf("open authority's database: %w", err)
	}
	return &Store{db: db}, nil
}

// Close gives back the connection.
func (s *Store) Close() { s.db.Close() }

// Cuts returns what is cut here. Revocations go before the certificates that say whether they still count.
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
	if err := s.prepare(ctx); err != nil {
		return 0, fmt.Errorf("prepare authority's database: %w", err)
	}
	n, err := pg.Value[int64](ctx, s.db, cutBatch.For(k), until, most)
	if err != nil {
		return 0, fmt.Errorf("cut %s of the authority: %w", k.name, err)
	}
	return n, nil
}

// prepare makes what cuts, once in the life of a process: it is the same each time.
func (s *Store) prepare(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prepared {
		return nil
	}
	at, err := pg.One[place](ctx, s.db, findPlace.For(struct{}{}))
	if pg.IsNoRows(err) {
		return errors.New("the tables of the authority are not there")
	} else if err != nil {
		return fmt.Errorf("find tables: %w", err)
	}
	if err := s.makeRole(ctx, at); err != nil {
		return err
	}
	if err := pg.InTx(ctx, s.db, func(ctx context.Context, tx pgx.Tx) error {
		_, err := pg.Exec(ctx, tx, makeFunctions.For(at))
		return err //nolint:wrapcheck // wrapped below
	}); err != nil {
		return fmt.Errorf("make functions: %w", err)
	}
	for _, k := range kinds {
		if err := s.makeIndex(ctx, at.Schema, k); err != nil {
			return fmt.Errorf("make index of %s: %w", k.name, err)
		}
	}
	s.prepared = true
	return nil
}

const insufficientPrivilege = "42501"

func (s *Store) makeRole(ctx context.Context, at place) error {
	_, err := pg.Exec(ctx, s.db, makeRole.For(at))
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == insufficientPrivilege {
		return fmt.Errorf("the login of the authority's database may not make the role %[1]s: run there as an administrator "+
			"`CREATE ROLE %[1]s NOLOGIN; GRANT %[1]s TO %[2]s`: %[3]w",
			at.Role, pgx.Identifier{s.db.Config().ConnConfig.User}.Sanitize(), err)
	} else if err != nil {
		return fmt.Errorf("make role: %w", err)
	}
	return nil
}

// makeIndex makes the index that a cut finds its rows by, while the authority goes on to sign. One that was left
// unfinished is made anew.
func (s *Store) makeIndex(ctx context.Context, schema string, k kind) error {
	valid, err := pg.Value[bool](ctx, s.db, indexIsValid.For(struct{}{}), schema, k.index())
	if err == nil && valid {
		return nil
	}
	at := indexOf{schema: schema, kind: k}
	if err == nil {
		if _, err := pg.Exec(ctx, s.db, dropIndex.For(at)); err != nil {
			return fmt.Errorf("drop one that was left unfinished: %w", err)
		}
	} else if !pg.IsNoRows(err) {
		return fmt.Errorf("read indexes: %w", err)
	}
	_, err = pg.Exec(ctx, s.db, createIndex.For(at))
	return err //nolint:wrapcheck // wrapped by prepare
}
