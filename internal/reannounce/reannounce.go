// Package reannounce appends the live rows of a service to the event log once more, so that a consumer can rebuild its
// state from events after the original events of these rows were deleted.
//
// It changes no row. An announced event carries the whole row with its version, as the event of its last change did; of
// two events of one version a reader takes the later one. Each call is one transaction over at most Batch rows, and a
// caller can resume an interrupted walk where it left off.
package reannounce

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// Batch is how many rows are announced in one transaction.
const Batch = 500

// first is the id that a walk begins after.
const first = "00000000-0000-0000-0000-000000000000"

// Source is one kind of rows that a service announces.
type Source struct {
	// Name is the name of the rows, such as "tasks".
	Name string
	// Page returns the events of the next rows, no more rows than most, in the order of their ids, which are those of the
	// events' aggregates.
	Page func(ctx context.Context, tx pgx.Tx, after string, most int) ([]events.Event, error)
	// Once: the first page is the only one.
	Once bool
}

// Rows makes a Source of a statement that takes the id to go on after and how many rows to return.
func Rows[T any](name string, statement *pg.Statement, event func(T) (events.Event, error)) Source {
	return Source{Name: name, Page: func(ctx context.Context, tx pgx.Tx, after string, most int) ([]events.Event, error) {
		rows, err := pg.All[T](ctx, tx, statement, after, most)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		out := make([]events.Event, len(rows))
		for i, row := range rows {
			if out[i], err = event(row); err != nil {
				return nil, fmt.Errorf("read %s: %w", name, err)
			}
		}
		return out, nil
	}}
}

// Server implements AnnounceService over the rows of one service.
type Server struct {
	db        pg.Beginner
	committed func()
	sources   []Source
}

// NewServer makes a server. db logs in as the service, and committed is called after each batch.
func NewServer(db pg.Beginner, committed func(), sources ...Source) *Server {
	return &Server{db: db, committed: committed, sources: sources}
}

// AnnounceRows announces the next batch.
func (s *Server) AnnounceRows(ctx context.Context, req *commonv1.AnnounceRowsRequest) (*commonv1.AnnounceRowsResponse,
	error,
) {
	at, after, err := s.place(req.GetAfter())
	if err != nil {
		return nil, err
	}
	for ; at < len(s.sources); at, after = at+1, first {
		source, out := s.sources[at], &commonv1.AnnounceRowsResponse{}
		err := pg.InTx(ctx, s.db, func(ctx context.Context, tx pgx.Tx) error {
			page, err := source.Page(ctx, tx, after, Batch)
			if err != nil || len(page) == 0 {
				return err
			}
			out.Rows, out.Next = int64(len(page)), s.next(at, page[len(page)-1].AggregateID)
			out.Pos, err = events.Append(ctx, tx, page...)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("announce %s: %w", source.Name, err)
		}
		if out.GetRows() > 0 {
			s.committed()
			return out, nil
		}
	}
	return &commonv1.AnnounceRowsResponse{}, nil
}

// next returns where to go on after the event of an aggregate of a source; empty at the end.
func (s *Server) next(at int, aggregateID string) string {
	switch {
	case !s.sources[at].Once:
		return s.sources[at].Name + "/" + aggregateID
	case at+1 < len(s.sources):
		return s.sources[at+1].Name + "/" + first
	}
	return ""
}

// place returns the source and the id of a request.
func (s *Server) place(after string) (int, string, error) {
	if after == "" {
		return 0, first, nil
	}
	name, id, _ := strings.Cut(after, "/")
	for i, source := range s.sources {
		if source.Name == name && id != "" {
			return i, id, nil
		}
	}
	return 0, "", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "after is not where a batch ended",
		fault.Unmet("after: unknown place"))
}
