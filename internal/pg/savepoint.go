package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// savepoint is a part of a transaction that may be undone alone. Savepoints of one name nest: the innermost is meant.
type savepoint struct {
	*pipelined
	name  string
	ends  int // how many functions of OnEnd were registered before it
	ended bool
}

// Commit implements pgx.Tx.
func (s *savepoint) Commit(ctx context.Context) error { return s.end(ctx, "release savepoint "+s.name) }

// Rollback implements pgx.Tx. The pending statements belong to the savepoint: they are dropped.
func (s *savepoint) Rollback(ctx context.Context) error {
	if s.ended || s.pipelined.conn == nil {
		return pgx.ErrTxClosed
	}
	s.pending = nil
	s.callOnEnd(s.ends, false)
	if err := s.end(ctx, "rollback to savepoint "+s.name); err != nil {
		return err
	}
	_, err := s.Exec(ctx, "release savepoint "+s.name)
	return err
}

func (s *savepoint) end(ctx context.Context, sql string) error {
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	_, err := s.Exec(ctx, sql)
	return err
}
