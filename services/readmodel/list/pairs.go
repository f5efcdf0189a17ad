package list

import (
	"context"

	"github.com/gpuaas/mesh/internal/pg"
)

// Pair is a row of two texts: an id and what belongs to it.
type Pair struct {
	ID   string `db:"id"`
	Text string `db:"text"`
}

// Pairs runs a statement of pairs and returns them by id.
func Pairs(ctx context.Context, db pg.Querier, statement *pg.Statement, args ...any) (map[string]string, error) {
	rows, err := pg.All[Pair](ctx, db, statement, args...)
	if err != nil {
		return nil, err
	}
	found := make(map[string]string, len(rows))
	for _, row := range rows {
		found[row.ID] = row.Text
	}
	return found, nil
}
