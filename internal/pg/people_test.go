package pg_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A database that has sessions and no people gets the people whose sessions they are, and no session ends by it.
func TestSessionsBecomePeople(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	file, err := migrations.FS.ReadFile("00071_readmodel_people.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	if _, err := db.OwnerPool().Exec(ctx, down); err != nil {
		t.Fatal(err)
	}
	sessions := []struct {
		subject string
		roles   []string
		age     string
		life    string
		revoked bool
	}{
		{"dev", []string{"viewer"}, "3 hours", "1 day", false},
		{"dev", []string{"operator", "security", "viewer"}, "2 hours", "1 day", false},
		{"dev", []string{"security", "operator", "viewer"}, "1 hour", "1 day", false},
		{"gone", []string{"viewer"}, "1 hour", "-1 minute", false},
		{"ended", []string{"viewer"}, "1 hour", "1 day", true},
	}
	err = pg.InTx(ctx, db.OwnerPool(), func(ctx context.Context, tx pgx.Tx) error {
		for _, s := range sessions {
			_, err := tx.Exec(
				ctx,
				`INSERT INTO readmodel.person_session (session_id, token_sha256, subject, roles, created_at, expires_at, revoked_at)
				VALUES (gen_random_uuid(), sha256($1::text::bytea), $1, $2, mesh.clock() - $3::interval,
					mesh.clock() + $4::interval,
					CASE WHEN $5 THEN mesh.clock() END)`,
				s.subject,
				s.roles,
				s.age,
				s.life,
				s.revoked,
			)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.OwnerPool().Exec(ctx, up); err != nil {
		t.Fatal(err)
	}
	rows, err := db.Pool(
		pg.RoleReadmodel,
	).Query(
		ctx,
		`SELECT p.name || ' ' || array_to_string(p.roles, ',') || ' ' || count(s.*) FILTER (WHERE s.revoked_at IS NULL)
		FROM readmodel.person p JOIN readmodel.person_session s USING (person_id) GROUP BY p.person_id ORDER BY 1`,
	)
	if err != nil {
		t.Fatal(err)
	}
	people, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string{"dev operator,security,viewer 3"}, people); err != nil || diff != "" {
		t.Errorf("people (-want +got): %s %v", diff, err)
	}
	var live []string
	err = db.OwnerPool().QueryRow(ctx, `SELECT array_agg(subject ORDER BY subject) FROM readmodel.person_session
		WHERE revoked_at IS NULL AND expires_at > mesh.clock()`).Scan(&live)
	if err != nil || !slices.Equal(live, []string{"dev", "dev", "dev"}) {
		t.Errorf("live sessions: %v, %v", live, err)
	}
}
