package pg_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestOpenDoesNotDial(t *testing.T) {
	t.Parallel()
	pool, err := pg.Open(t.Context(),
		pg.Config{URL: "postgres://nobody:x@127.0.0.1:1/none?sslmode=disable", ConnectTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(t.Context(), "SELECT 1"); !pg.IsConnError(err) {
		t.Fatalf("a refused dial gave %v", err)
	}
	if _, err := pg.Open(t.Context(), pg.Config{URL: "postgres://%zz"}); err == nil {
		t.Fatal("a malformed url passed")
	}
}

// next returns the successor of n in this database, as mesh.next(n) gives it inside a statement.
func next(ctx context.Context, q pg.Querier, n int64) (int64, error) {
	var successor int64
	err := q.QueryRow(ctx, "SELECT mesh.next($1)", n).Scan(&successor)
	return successor, err
}

func TestNumbersAndClock(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	pool := d.Pool(pg.RoleLifecycle)
	for _, step := range []struct{ n, want int64 }{{0, 1}, {41, 42}, {1 << 50, 1<<50 + 1}} {
		if got, err := next(ctx, pool, step.n); err != nil || got != step.want || got != ids.NextWithEra(step.n, 0) {
			t.Errorf("next(%d) = %d, %v", step.n, got, err)
		}
	}
	for want := range int64(2) {
		if era, err := pg.Era(ctx, pool); err != nil || era != want {
			t.Fatalf("era %d, %v", era, err)
		}
		if want == 0 {
			if _, err := testkit.RaiseEra(ctx, d.OwnerPool(), "test"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got, err := next(ctx, pool, 41); err != nil || got != 1<<40 || got != ids.NextWithEra(int64(41), 1) {
		t.Errorf("next in era 1 = %d, %v", got, err)
	}
	for _, sql := range []string{
		"UPDATE mesh.era SET era = 0", "DELETE FROM mesh.era",
		"INSERT INTO mesh.era (era) VALUES (9)",
	} {
		if _, err := d.OwnerPool().Exec(ctx, sql); err == nil {
			t.Errorf("%s passed", sql)
		}
	}

	// Within a transaction the clock moves, and an index condition can use it.
	err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var moved bool
		if err := tx.QueryRow(ctx, "SELECT mesh.clock() > now()").Scan(&moved); err != nil || !moved {
			return fmt.Errorf("moved %v, %w", moved, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	owner := d.OwnerPool()
	if _, err := owner.Exec(ctx, `CREATE TABLE mesh.probe AS SELECT now() + n * interval '1 s' AS at
		FROM generate_series(1, 20000) n;
		CREATE INDEX ON mesh.probe (at); ANALYZE mesh.probe`); err != nil {
		t.Fatal(err)
	}
	plan := strings.Join(list(t, owner, "EXPLAIN SELECT FROM mesh.probe WHERE at <= mesh.clock()"), "\n")
	if !strings.Contains(plan, "Index Cond") {
		t.Errorf("the clock is no index condition:\n%s", plan)
	}
}

func TestInTxRetriesConflicts(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	if _, err := d.OwnerPool().Exec(ctx, `CREATE TABLE lifecycle.counter (id int PRIMARY KEY, n int);
		INSERT INTO lifecycle.counter VALUES (1, 0), (2, 0)`); err != nil {
		t.Fatal(err)
	}
	pool := d.Pool(pg.RoleLifecycle)
	// Two transactions that lock two rows in opposite order, each its second when both have their first: one of them is
	// made the victim, and runs again.
	var mu sync.Mutex
	var both sync.WaitGroup
	both.Add(2)
	calls := 0
	var g errgroup.Group
	for _, order := range [][2]int{{1, 2}, {2, 1}} {
		g.Go(func() error {
			return pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				mu.Lock()
				calls++
				first := calls <= 2
				mu.Unlock()
				for i, id := range order {
					if i == 1 && first {
						both.Done()
						both.Wait()
					}
					if _, err := tx.Exec(ctx, "UPDATE lifecycle.counter SET n = n + 1 WHERE id = $1", id); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := list(t, pool, "SELECT n::text FROM lifecycle.counter"); !slices.Equal(got, []string{"2", "2"}) || calls < 3 {
		t.Fatalf("counters %v after %d calls, want a deadlock and a retry", got, calls)
	}

	// An error that is no conflict is returned at once, unchanged, and the transaction leaves nothing.
	calls = 0
	own := errors.New("no")
	err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		if _, err := tx.Exec(ctx, "UPDATE lifecycle.counter SET n = 99"); err != nil {
			return err
		}
		return own
	})
	if !errors.Is(err, own) || calls != 1 {
		t.Fatalf("%v after %d calls", err, calls)
	}
	// The repetitions end.
	calls = 0
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")
		return err
	})
	if !pg.IsRetryable(err) || calls != 6 {
		t.Fatalf("%v after %d calls", err, calls)
	}
	func() {
		defer func() { _ = recover() }()
		_ = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE lifecycle.counter SET n = 99"); err != nil {
				return err
			}
			panic("in the middle")
		})
	}()
	if got := list(t, pool, "SELECT n::text FROM lifecycle.counter"); !slices.Equal(got, []string{"2", "2"}) {
		t.Fatalf("counters %v", got)
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Fatalf("%d connections not given back", n)
	}
}

func TestInTxHonoursTheContextUpToTheCommit(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	err := pg.InTx(ctx, d.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO lifecycle.event_cursor (name) VALUES ('x')")
		cancel()
		return err
	})
	if !errors.Is(err, context.Canceled) || errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("got %v", err)
	}
	if got := list(t, d.Pool(pg.RoleLifecycle), "SELECT name FROM lifecycle.event_cursor"); len(got) != 0 {
		t.Fatalf("committed after the end of its context: %v", got)
	}
}

// A proxy that swallows the answer to COMMIT: the row is there, and InTx must neither report a failure nor run again.
func TestLostCommitAnswerIsUnknown(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	proxy := newCommitProxy(t, d.URL(pg.RoleLifecycle))
	pool, err := pg.Open(ctx, pg.Config{URL: proxy.url})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	calls := 0
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		_, err := tx.Exec(ctx, "INSERT INTO lifecycle.event_cursor (name) VALUES ('lost answer')")
		proxy.cutAfterNextRequest()
		return err
	})
	if !errors.Is(err, pg.ErrCommitUnknown) || calls != 1 {
		t.Fatalf("%v after %d calls", err, calls)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := list(t, d.Pool(pg.RoleLifecycle), "SELECT name FROM lifecycle.event_cursor"); len(got) != 1 {
			return fmt.Errorf("rows %v", got)
		}
		return nil
	})
}

type commitProxy struct {
	url string
	mu  sync.Mutex
	cut bool
}

func (p *commitProxy) cutAfterNextRequest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
}

func (p *commitProxy) cutting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cut
}

func newCommitProxy(t *testing.T, target string) *commitProxy {
	t.Helper()
	cfg, err := pgx.ParseConfig(target)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &commitProxy{url: strings.Replace(target, fmt.Sprintf("127.0.0.1:%d", cfg.Port), l.Addr().String(), 1)}
	var conns errgroup.Group
	conns.Go(func() error {
		for {
			client, err := l.Accept()
			if err != nil {
				return nil //nolint:nilerr // closed
			}
			conns.Go(func() error { return p.serve(client, fmt.Sprintf("127.0.0.1:%d", cfg.Port)) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		if err := conns.Wait(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *commitProxy) serve(client net.Conn, target string) error {
	server, err := net.Dial("tcp", target)
	if err != nil {
		return err
	}
	answers := make(chan struct{})
	go func() {
		defer close(answers)
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if err != nil || p.cutting() {
				// The server has answered, so it has committed; the client's connection is cut.
				_ = client.Close()
				_ = server.Close()
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	_, _ = io.Copy(server, client)
	_ = server.Close()
	<-answers
	_ = client.Close()
	return nil
}

func TestErrorsAreClassified(t *testing.T) {
	t.Parallel()
	unique := fmt.Errorf("insert: %w", &pgconn.PgError{Code: "23505", ConstraintName: "name_taken"})
	tests := []struct {
		name                    string
		err                     error
		unique, retryable, conn bool
	}{
		{name: "nil"},
		{name: "unique", err: unique, unique: true},
		{name: "foreign key", err: &pgconn.PgError{Code: "23503"}},
		{name: "serialization", err: &pgconn.PgError{Code: "40001"}, retryable: true},
		{
			name: "two grants on one object", err: &pgconn.PgError{Code: "XX000", Routine: "simple_heap_update"},
			retryable: true,
		},
		{name: "a defect of the server", err: &pgconn.PgError{Code: "XX000", Routine: "elsewhere"}},
		{name: "deadlock", err: &pgconn.PgError{Code: "40P01"}, retryable: true},
		{name: "shutdown", err: &pgconn.PgError{Code: "57P01"}, conn: true},
		{name: "starting", err: &pgconn.PgError{Code: "57P03"}, conn: true},
		{name: "full", err: &pgconn.PgError{Code: "53300"}, conn: true},
		{name: "standby", err: &pgconn.PgError{Code: "25006"}, conn: true},
		{name: "statement timeout", err: &pgconn.PgError{Code: "57014"}},
		{name: "eof", err: fmt.Errorf("read: %w", io.ErrUnexpectedEOF), conn: true},
		{name: "net", err: &net.OpError{Op: "read", Err: errors.New("reset")}, conn: true},
		{
			name: "refused by the system", conn: true,
			err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)},
		},
		{name: "file", err: &fs.PathError{Op: "open", Path: "key", Err: syscall.EACCES}},
		{name: "own deadline", err: context.DeadlineExceeded},
		{name: "cancelled", err: fmt.Errorf("query: %w", context.Canceled)},
		{name: "ours", err: errors.New("something else")},
	}
	for _, tt := range tests {
		if got := pg.IsUnique(tt.err, ""); got != tt.unique {
			t.Errorf("%s: unique %v", tt.name, got)
		}
		if got := pg.IsRetryable(tt.err); got != tt.retryable {
			t.Errorf("%s: retryable %v", tt.name, got)
		}
		if got := pg.IsConnError(tt.err); got != tt.conn {
			t.Errorf("%s: conn %v", tt.name, got)
		}
	}
	if !pg.IsUnique(unique, "name_taken") || pg.IsUnique(unique, "other") {
		t.Error("the constraint's name is not looked at")
	}
}

func TestProvisionAndMigrateAtOnceAndAgain(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	name := d.Name() + "_p"
	admin := connect(t, d.AdminURL())
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), d.AdminURL())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(context.Background()) }()
		if _, err := conn.Exec(context.Background(),
			"DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	passwords := map[string]string{pg.RoleOwner: "test-" + pg.RoleOwner}
	for _, role := range pg.Roles() {
		passwords[role] = "test-" + role
	}
	p := schema.Provisioning{Database: name, WorkloadDatabase: "-", Passwords: passwords}
	ownerURL, err := pg.WithUser(d.AdminURL(), pg.RoleOwner, passwords[pg.RoleOwner], name)
	if err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	var mu sync.Mutex
	total := 0
	for range 3 {
		g.Go(func() error {
			// Advisory locks are a database's: all callers must come through the same one.
			if err := schema.Provision(ctx, d.AdminURL(), p); err != nil {
				return err
			}
			done, err := schema.Migrate(ctx, ownerURL, schema.MigrateOptions{})
			mu.Lock()
			total += len(done.Versions)
			mu.Unlock()
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	status, err := schema.Status(ctx, ownerURL)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range status {
		if !s.Applied || s.AppliedAt.IsZero() {
			t.Errorf("%+v", s)
		}
	}
	if total != len(status) || total < 3 {
		t.Fatalf("%d files applied, %d known", total, len(status))
	}
	serviceURL, err := pg.WithUser(ownerURL, pg.RoleNodeAPI, passwords[pg.RoleNodeAPI], "")
	if err != nil {
		t.Fatal(err)
	}
	service := connect(t, serviceURL)
	if err := pg.CheckMigrated(ctx, service); err != nil {
		t.Fatal(err)
	}
	owner := connect(t, ownerURL)
	if _, err := owner.Exec(ctx, "DELETE FROM mesh.goose_db_version WHERE version_id = 2"); err != nil {
		t.Fatal(err)
	}
	if err := pg.CheckMigrated(ctx, service); !errors.Is(err, pg.ErrNotMigrated) ||
		!strings.Contains(err.Error(), "00002_events.sql") {
		t.Fatalf("got %v", err)
	}
	// The password reaches the server as a verifier only.
	if got := list(t, admin, "SELECT rolname::text FROM pg_authid WHERE rolname = ANY($1) AND rolpassword NOT LIKE "+
		"'SCRAM-SHA-256$%'", pg.Roles()); len(got) > 0 {
		t.Errorf("passwords of %v are not verifiers", got)
	}
}

func TestProvisionRefusesBadPasswords(t *testing.T) {
	t.Parallel()
	err := schema.Provision(t.Context(), "postgres://unused",
		schema.Provisioning{Passwords: map[string]string{pg.RoleNodeAPI: "tab\there", pg.RoleLifecycle: ""}})
	for _, want := range []string{
		"role nodeapi", "role lifecycle", "no password for role recovery",
		"no password for role workload_admin",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
}

// A file that fails leaves nothing of itself, and the next run goes on from there.
func TestMigrationIsAllOrNothing(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	file := func(second string) fstest.MapFS {
		return fstest.MapFS{
			"99001_probe.sql": {
				Data: []byte("-- +goose Up\nCREATE TABLE mesh.half (a int);\n" + second + ";\n-- +goose Down\n"),
			},
		}
	}
	if _, err := schema.Migrate(ctx, d.URL(pg.RoleOwner), schema.MigrateOptions{Files: file("SELECT 1/0")}); err == nil {
		t.Fatal("a broken migration passed")
	}
	if got := list(t, d.OwnerPool(), "SELECT tablename::text FROM pg_tables WHERE tablename = 'half'"); len(got) != 0 {
		t.Fatal("half a migration stayed")
	}
	done, err := schema.Migrate(ctx, d.URL(pg.RoleOwner),
		schema.MigrateOptions{Files: file("SELECT 1"), Logger: testkit.Logger(t)})
	if err != nil || !slices.Equal(done.Versions, []int64{99001}) {
		t.Fatalf("%+v, %v", done, err)
	}
}

// TestEverySessionOfThePoolsIsTheProducts: by the setting triggers recognize that no person made a write.
func TestEverySessionOfThePoolsIsTheProducts(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	for _, role := range append(pg.ServiceRoles(), pg.RoleOwner) {
		var writer string
		if err := d.Pool(role).QueryRow(t.Context(), `SELECT current_setting($1, true)`,
			pg.WriterSetting).Scan(&writer); err != nil || writer != pg.WriterProduct {
			t.Errorf("%s writes as %q: %v", role, writer, err)
		}
	}
	var writer *string
	if err := connect(t, d.AdminURL()).QueryRow(t.Context(), `SELECT current_setting($1, true)`,
		pg.WriterSetting).Scan(&writer); err != nil || writer != nil {
		t.Errorf("a person writes as %v: %v", writer, err)
	}
}
