package pg_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// The server refuses for want of a resource that a test may take away: the space for temporary files.
func TestARefusalForWantOfAResourceIsTypedAndRemembered(t *testing.T) {
	d := testkit.DB(t)
	var room pg.Exhaustion
	pool, err := pg.Open(t.Context(), pg.Config{
		URL: d.AdminURL(), MaxConns: 2, Exhaustion: &room,
		Settings: map[string]string{"temp_file_limit": "64kB", "work_mem": "64kB"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := room.Check(t.Context()); err != nil {
		t.Errorf("before anything was refused: %v", err)
	}
	//nolint:errorlint // the very same error
	if _, err := pool.Exec(t.Context(), "SELECT no_such_column"); err == nil || pg.Fault(err) != err ||
		room.Check(t.Context()) != nil {
		t.Errorf("a mistake in a statement is taken for want of a resource: %v", pg.Fault(err))
	}
	_, err = pool.Exec(t.Context(), "SELECT g FROM generate_series(1, 200000) AS g ORDER BY -g")
	typed := pg.Fault(err)
	if !fault.Has(typed, commonv1.Reason_REASON_UNAVAILABLE) || fault.RetryAfterOf(typed) == 0 || !errors.Is(typed, err) {
		t.Errorf("got %v of %v", typed, err)
	}
	if f, ok := fault.As(room.Check(t.Context())); !ok || f.Remedy == "" ||
		f.Reason != commonv1.Reason_REASON_UNAVAILABLE {
		t.Errorf("not remembered: %v", room.Check(t.Context()))
	}
}

func TestFaultOfADatabaseThatIsAway(t *testing.T) {
	_, err := pgx.Connect(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	if got := pg.Fault(err); !fault.Has(got, commonv1.Reason_REASON_UNAVAILABLE) {
		t.Errorf("got %v", got)
	}
	if pg.Fault(nil) != nil {
		t.Error("no error has a fault")
	}
	decided := fault.New(commonv1.Reason_REASON_CONFLICT, "")
	if got := pg.Fault(decided); !fault.Has(got, commonv1.Reason_REASON_CONFLICT) {
		t.Errorf("a decision was replaced: %v", got)
	}
}

// Every login role has the settings that pools set for services: a person who logs in by hand forgets transactions too.
func TestRolesHaveTheTimeoutOfIdleTransactions(t *testing.T) {
	d := testkit.DB(t)
	admin := connect(t, d.AdminURL())
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		settings := list(t, admin, "SELECT unnest(setconfig) FROM pg_db_role_setting JOIN pg_roles r ON r.oid = setrole "+
			"WHERE r.rolname = $1", role)
		if got := strings.Join(settings, " "); !strings.Contains(got,
			"idle_in_transaction_session_timeout="+pg.IdleInTxTimeout) {
			t.Errorf("%s has %q", role, got)
		}
	}
}
