package events

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

var readUnread = pg.DefineShared(writers, "events.read_unread", `
	WITH n AS (SELECT COALESCE((SELECT x.open FROM events.numbered x WHERE x.last_pos <= $1 ORDER BY x.last_pos DESC LIMIT 1), '{[1,)}') AS open)
	SELECT `+pg.Columns[Record]("e")+` FROM n JOIN events.event e ON e.seq >= lower(n.open) AND e.seq <@ n.open
	WHERE e.aggregate_type = $2 AND e.aggregate_id = ANY ($3) ORDER BY e.seq`)

// Unread answers the committed events of aggregates that a reader who has come to a position has not read yet, numbered or not, in the order in which
// each aggregate's were committed, without a position. Some that it has read may stand among them.
func Unread(ctx context.Context, q pg.Querier, after int64, aggregateType string, aggregateIDs []string) ([]Record, error) {
	records, err := pg.All[Record](ctx, q, readUnread, after, aggregateType, aggregateIDs)
	if err != nil {
		return nil, fmt.Errorf("read events beyond a position: %w", err)
	}
	return records, nil
}
