package people

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestACallWithoutTheDatabaseNamesIt has the statement that reads sessions fail in the ways in which a database is
// away: the refusal names the database and does not lead to a command that is refused too.
func TestACallWithoutTheDatabaseNamesIt(t *testing.T) {
	const token = "Bearer " + tokenPrefix + "0197c0de00007000800000000000000a_" +
		"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
	for _, c := range []struct {
		name         string
		err          error
		public, hint string
	}{
		{"gone", fmt.Errorf("read: %w", io.ErrUnexpectedEOF), "the database is not available", "bring the database back"},
		{"starting", &pgconn.PgError{Code: "57P03"}, "the database is not available", "bring the database back"},
		{
			"silent", fmt.Errorf("read: %w", context.DeadlineExceeded), "the database does not answer",
			"bring the database back",
		},
		{"full", &pgconn.PgError{Code: "53100"}, "the database has no disk space left", "free space"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := NewSessions(nil)
			s.rows.read = func(context.Context, []string) (map[string]sessionRow, error) { return nil, c.err }
			_, err := s.FromHeader(t.Context(), http.Header{"Authorization": {token}})
			refusal, ok := fault.As(err)
			if !ok || refusal.Reason != commonv1.Reason_REASON_UNAVAILABLE || refusal.Public != c.public ||
				!strings.HasPrefix(refusal.Remedy, c.hint) {
				t.Errorf("%v; want unavailable, %q, %q", err, c.public, c.hint)
			}
		})
	}
}
