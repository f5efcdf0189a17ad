package testkit

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Mentions returns the tables of a database, all schemas but Postgres' own, in which a text stands, with the number of
// rows: as it is, as hex (so bytea is written), or inside base64 at any offset. The connection must be able to read
// every table.
func Mentions(tb testing.TB, url, text string) []string {
	tb.Helper()
	ctx := Context(tb)
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	rows, err := conn.Query(ctx, `SELECT c.oid::regclass::text FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'm') AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') ORDER BY 1`)
	if err != nil {
		tb.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	if len(tables) < 2 {
		tb.Fatalf("there are no tables to search: %v", tables)
	}
	needles := spellings(text)
	var found []string
	for _, table := range tables {
		var n int64
		// The table's name comes from the catalogue.
		err := conn.QueryRow(ctx, `SELECT count(*) FROM `+table+` t
			WHERE EXISTS (SELECT FROM unnest($1::text[]) n WHERE strpos(t::text, n) > 0)`, needles).Scan(&n)
		if err != nil {
			tb.Fatalf("search %s: %v", table, err)
		}
		if n > 0 {
			found = append(found, fmt.Sprintf("%s: %d rows", table, n))
		}
	}
	return found
}

// spellings returns the forms that a text may have within another one.
func spellings(text string) []string {
	out := []string{text, hex.EncodeToString([]byte(text)), strings.ToUpper(hex.EncodeToString([]byte(text)))}
	for offset := range 3 {
		padded := append(make([]byte, offset), text...)
		whole := len(padded) / 3 * 3
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			coded := enc.EncodeToString(padded[:whole])
			if offset > 0 {
				coded = coded[4:] // the first group holds what stands before
			}
			out = append(out, coded)
		}
	}
	return out
}
