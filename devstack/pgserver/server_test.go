package pgserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestMain doubles as the owner that dies in TestOwnerDies.
func TestMain(m *testing.M) {
	if dir := os.Getenv("EMBEDDED_TEST_OWNER"); dir != "" {
		s, err := pgserver.Start(context.Background(), pgserver.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			_, _ = fmt.Fprintln(os.Stdout, "error", err)
			os.Exit(3)
		}
		_, _ = fmt.Fprintln(os.Stdout, s.PID(), s.AdminURL())
		select {}
	}
	testkit.Main(m, testkit.CheckLeaks())
}

// testDir returns a directory whose parents the unprivileged uid may enter; t.TempDir's are 0700 for root.
func testDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpuaas-embedded-*") //nolint:usetesting // not under a 0700 parent
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func start(t *testing.T, cfg pgserver.Config) *pgserver.Server {
	t.Helper()
	cfg.Logger = testkit.Logger(t)
	s, err := pgserver.Start(testkit.Context(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

func query(t *testing.T, url, sql string) (string, error) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.Background()) }()
	var v string
	err = conn.QueryRow(t.Context(), sql).Scan(&v)
	return v, err
}

func run(t *testing.T, url, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func must(t *testing.T, url, sql string) string {
	t.Helper()
	v, err := query(t, url, sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func TestLifeOfAServer(t *testing.T) {
	testkit.IO(t)
	dir := filepath.Join(testDir(t), "pg")
	began := time.Now()
	s := start(t, pgserver.Config{Dir: dir})
	t.Logf("first start %s", time.Since(began))
	for setting, want := range map[string]string{
		"fsync": "on", "full_page_writes": "on", "listen_addresses": "127.0.0.1",
		"data_checksums": "on",
	} {
		if got := must(t, s.AdminURL(), "SHOW "+setting); got != want {
			t.Errorf("%s = %s", setting, got)
		}
	}
	if os.Getuid() == 0 {
		st, err := os.Stat(fmt.Sprintf("/proc/%d", s.PID()))
		if err != nil || st.Sys().(*syscall.Stat_t).Uid != 65534 {
			t.Errorf("postgres runs as %v, %v", st.Sys(), err)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "superuser.password")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("password file: %v, %v", st, err)
	}

	// No client gets in without the password, by socket as little as by TCP.
	admin, err := url.Parse(s.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	password, _ := admin.User.Password()
	if got := must(t, s.SocketURL("postgres", pgserver.Superuser, password), "SELECT 'in'"); got != "in" {
		t.Error(got)
	}
	for _, u := range []string{
		s.SocketURL("postgres", pgserver.Superuser, "x"),
		s.URL("postgres", pgserver.Superuser, ""),
	} {
		if _, err := query(t, u, "SELECT 'in'"); err == nil {
			t.Errorf("in without the password by %s", u)
		}
	}

	// A second owner is refused while the first lives, with an error that names the first.
	if _, err := pgserver.Start(t.Context(), pgserver.Config{Dir: dir, Logger: testkit.Logger(t)}); !errors.Is(err,
		pgserver.ErrInUse) ||
		!strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("a second owner got %v", err)
	}

	run(t, s.AdminURL(), "CREATE TABLE kept (v text); INSERT INTO kept VALUES ('row')")
	for name, end := range map[string]func() error{
		"kill -9": s.Kill9,
		"nothing": func() error { return nil },
	} {
		port, done := s.Port(), s.Done()
		if err := end(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := s.Restart(testkit.Context(t)); err != nil {
			t.Fatalf("restart after %s: %v", name, err)
		}
		t.Logf("restart after %s: %s", name, time.Since(began))
		select {
		case <-done:
		default:
			t.Errorf("%s: the first incarnation is not done", name)
		}
		if s.Port() != port || must(t, s.AdminURL(), "SELECT v FROM kept") != "row" {
			t.Errorf("%s: lost its port or its data", name)
		}
	}

	// Stop releases the directory, may be called twice, and the next owner finds the data.
	for range 2 {
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Restart(t.Context()); err == nil {
		t.Error("restarted a server whose directory was given free")
	}
	began = time.Now()
	again := start(t, pgserver.Config{Dir: dir})
	t.Logf("warm start %s", time.Since(began))
	if must(t, again.AdminURL(), "SELECT v FROM kept") != "row" {
		t.Error("the data is gone")
	}
}

// The owner is killed with -9: its server ends with it, and the next owner starts at once although the old one may
// still be shutting down.
func TestOwnerDies(t *testing.T) {
	testkit.IO(t)
	dir := filepath.Join(testDir(t), "pg")
	for round := range 2 {
		owner := exec.CommandContext(t.Context(), os.Args[0])
		owner.Env = append(os.Environ(), "EMBEDDED_TEST_OWNER="+dir)
		out, err := owner.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := owner.Start(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		pidText, admin, _ := strings.Cut(strings.TrimSpace(line), " ")
		pid, err := strconv.Atoi(pidText)
		if err != nil {
			t.Fatalf("owner said %q", line)
		}
		run(t, admin, fmt.Sprintf("CREATE TABLE kept%d (v text)", round))
		if round == 1 {
			// Both at once: the postmaster cannot even shut down, its backends are orphans.
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if err := owner.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = owner.Wait()
		began := time.Now()
		s := start(t, pgserver.Config{Dir: dir})
		t.Logf("start after the owner's death: %s", time.Since(began))
		if s.PID() == pid {
			t.Fatal("the dead owner's server was kept")
		}
		must(t, s.AdminURL(), fmt.Sprintf("SELECT count(*)::text FROM kept%d", round))
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A pid file that names a living stranger (pids are reused, in containers within seconds) must not keep us out, and the
// stranger must not be harmed.
func TestRecycledPIDInLockFiles(t *testing.T) {
	testkit.IO(t)
	dir := filepath.Join(testDir(t), "pg")
	s := start(t, pgserver.Config{Dir: dir})
	run(t, s.AdminURL(), "CREATE TABLE kept (v text)")
	stranger := exec.CommandContext(t.Context(), "/bin/sleep", "600")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	if err := s.Kill9(); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(dir, "data", "postmaster.pid")
	b, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\n")
	if err := os.WriteFile(pidFile, fmt.Appendf(nil, "%d\n%s", stranger.Process.Pid, rest), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	must(t, s.AdminURL(), "SELECT count(*)::text FROM kept")
	if err := stranger.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the stranger was harmed: %v", err)
	}
	if err := stranger.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = stranger.Wait()
}

// An initdb that was cut short leaves a directory that the next start makes anew.
func TestInterruptedInitdb(t *testing.T) {
	testkit.IO(t)
	dir := filepath.Join(testDir(t), "pg")
	if err := os.MkdirAll(filepath.Join(dir, "data.new", "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // as Start makes it
		t.Fatal(err)
	}
	start(t, pgserver.Config{Dir: dir})
}

func TestStartRefusals(t *testing.T) {
	testkit.IO(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	taken := l.Addr().(*net.TCPAddr).Port

	closed := filepath.Join(testDir(t), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	squatted := filepath.Join(testDir(t), "link")
	if err := os.Symlink("/tmp", squatted); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, want string
		cfg        pgserver.Config
		root       bool
		env        string
	}{
		{name: "no directory", want: "needs a directory"},
		{
			name: "fsync off", cfg: pgserver.Config{Dir: testDir(t), Settings: map[string]string{"fsync": "off"}},
			want: "fsync stays on",
		},
		{
			name: "port in use", cfg: pgserver.Config{Dir: testDir(t), Port: taken},
			want: fmt.Sprintf("postgres port %d is in use", taken),
		},
		{
			name: "not traversable", cfg: pgserver.Config{Dir: filepath.Join(closed, "pg")}, want: "may not enter " + closed,
			root: true,
		},
		{
			name: "foreign socket directory", cfg: pgserver.Config{Dir: testDir(t), SocketDir: squatted},
			want: "not ours alone",
		},
		{
			name: "long socket directory",
			cfg:  pgserver.Config{Dir: testDir(t), SocketDir: "/tmp/" + strings.Repeat("long", 30)}, want: "too long",
		},
		{
			name: "empty binary directory", cfg: pgserver.Config{Dir: testDir(t)}, env: "/var/empty",
			want: "GPUAAS_PG_BIN=/var/empty",
		},
		{
			name: "unknown setting", cfg: pgserver.Config{Dir: testDir(t), Settings: map[string]string{"no_such": "1"}},
			want: "no_such",
		},
	}
	for _, tt := range tests {
		if tt.root && os.Getuid() != 0 {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(pgserver.EnvBin, tt.env)
			tt.cfg.Logger = testkit.Logger(t)
			began := time.Now()
			s, err := pgserver.Start(testkit.Context(t), tt.cfg)
			if err == nil {
				_ = s.Stop(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if took := time.Since(began); took > 50*time.Second { // a start gets sixty
				t.Errorf("the refusal took %s", took)
			}
		})
	}
}

func TestFindNamesTheThreeWays(t *testing.T) {
	testkit.IO(t)
	// A uid that may enter nothing of the system's: every candidate is passed over with its reason.
	t.Setenv("PATH", t.TempDir())
	found, err := pgserver.Find(t.Context(), "", -1)
	if err == nil {
		t.Logf("found %s without PATH", found.Dir)
	} else {
		for _, want := range []string{"apt install postgresql", "make postgres", "--database-url"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing in %v", want, err)
			}
		}
	}
	for _, want := range []string{"apt install postgresql", "make postgres", "--database-url"} {
		if !strings.Contains(pgserver.ErrNoBinaries.Error(), want) {
			t.Errorf("%q is missing in %v", want, pgserver.ErrNoBinaries)
		}
	}
}

// TestAFullDiskIsNamed checks that a start on a full file system returns an error that names the cause, whether the
// cluster is made or comes back, and that with room again the cluster is as it was.
func TestAFullDiskIsNamed(t *testing.T) {
	testkit.IO(t)
	dir := testkit.SmallDiskAt(t, testDir(t), 192<<20)
	refill := testkit.Fill(t, dir)
	cfg := pgserver.Config{Dir: filepath.Join(dir, "postgres"), Logger: testkit.Logger(t)}
	if s, err := pgserver.Start(testkit.Context(t), cfg); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("started on a full disk: %v, %v", s, err)
	}
	refill()
	s := start(t, cfg)
	conn, err := pgx.Connect(t.Context(), s.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	// After the switch the next record, and so the end of the recovery, needs a new segment of 16 MiB.
	for _, sql := range []string{`CREATE TABLE kept AS SELECT 7 AS n`, `SELECT pg_switch_wal()`} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Kill9(); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(testkit.Context(t)); err != nil {
		t.Log(err)
	}
	refill = testkit.Fill(t, dir)
	if s, err := pgserver.Start(testkit.Context(t), cfg); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("came back on a full disk: %v, %v", s, err)
	}
	refill()
	s = start(t, cfg)
	if got, err := query(t, s.AdminURL(), `SELECT n::text FROM kept`); err != nil || got != "7" {
		t.Errorf("after the room is back: %q, %v", got, err)
	}
}
