package lives

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	clock = pg.Define(pg.RoleOwner, "lives.clock", `SELECT mesh.clock()`)
	// walkedSince is true once every walk began, and came to its end, after a moment.
	walkedSince = pg.Define(pg.RoleOwner, "lives.walked_since", `
		SELECT count(*) > 0 AND bool_and(r.began_at > $1 AND r.done_at >= r.began_at) FROM mesh.retention r`)
	listSizes = pg.Define(pg.RoleOwner, "lives.list_sizes", `
		SELECT n.nspname || '.' || c.relname AS name, pg_total_relation_size(c.oid) AS bytes,
			greatest(c.reltuples, 0)::bigint AS rows
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind = 'r' AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'`)
	// listFiles has each table without its indexes, and each index; the catalog's and those of long values as well.
	listFiles = pg.Define(pg.RoleOwner, "lives.list_files", `
		SELECT n.nspname || '.' || c.relname AS name, pg_relation_size(c.oid) AS bytes,
			greatest(c.reltuples, 0)::bigint AS rows
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'i', 't')`)
)

// size is the size of one table, with its indexes.
type size struct {
	Name  string `db:"name"`
	Bytes int64  `db:"bytes"`
	Rows  int64  `db:"rows"`
}

// sizes are those of all tables, by their names.
type sizes map[string]size

func read(ctx context.Context, conn *pgx.Conn) (sizes, error) { return readBy(ctx, conn, listSizes) }

func readBy(ctx context.Context, conn *pgx.Conn, statement *pg.Statement) (sizes, error) {
	list, err := pg.All[size](ctx, conn, statement)
	if err != nil {
		return nil, fmt.Errorf("read the sizes of tables: %w", err)
	}
	out := sizes{}
	for _, s := range list {
		out[s.Name] = s
	}
	return out, nil
}

// compact rewrites every table, so that only the remaining rows take space, and returns the sizes.
func compact(ctx context.Context, conn *pgx.Conn) (sizes, error) {
	list, err := read(ctx, conn)
	if err != nil {
		return nil, err
	}
	for name := range list {
		if _, err := conn.PgConn().Exec(ctx, "VACUUM (FULL, ANALYZE) "+name).ReadAll(); err != nil {
			return nil, fmt.Errorf("compact table %s: %w", name, err)
		}
	}
	return read(ctx, conn)
}
