package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/plans"
)

// complete is the file that stands in the directory of a fleet once all of it is loaded.
const complete = "complete"

// freshFor is how long a fleet in the cache may be used: terms and leases in it fall due with time.
const freshFor = 20 * time.Hour

// ErrInUse is the error of Run if another run uses a fleet of the cache.
var ErrInUse = errors.New("another run uses this fleet of the cache")

// loader loads fleets of a template, which it makes for the first one.
type loader struct {
	o        Options
	template *plans.Template
}

// load loads a fleet and returns how long that took.
func (l *loader) load(ctx context.Context, db *bench.Database, size plans.Size) (string, error) {
	if l.template == nil {
		source := plans.Source{
			Agent: l.o.Agent, Version: l.o.Version, Ended: l.o.HistoryDays > 0, Instances: size.Instances,
			Logger: l.o.Logger,
		}
		var err error
		if l.template, err = plans.Make(ctx, source); err != nil {
			return "", err
		}
	}
	began := time.Now()
	if err := l.template.Load(ctx, db.MeshURL(), size); err != nil {
		return "", err
	}
	return fmt.Sprintf("in %.0f s", time.Since(began).Seconds()), nil
}

// visit is called with the database of a fleet, its size, and how it was made.
type visit func(ctx context.Context, db *bench.Database, size plans.Size, load string) error

// eachFleet visits each fleet. Without a cache all are loaded into one database in turn; with one each has a directory
// of its own, which a later run finds.
func (o Options) eachFleet(ctx context.Context, sizes []plans.Size, fn visit) error {
	l := &loader{o: o}
	if o.Cache != "" {
		return l.cached(ctx, sizes, fn)
	}
	if err := room(os.TempDir(), needed(sizes[len(sizes)-1])); err != nil {
		return err
	}
	db, err := bench.StartDatabaseToLoad(ctx, o.Logger)
	if err != nil {
		return fmt.Errorf("start the bench's database: %w", err)
	}
	for _, size := range sizes {
		var how string
		if how, err = l.load(ctx, db, size); err == nil {
			err = describe(ctx, db, size, how, fn)
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, db.Close()) //nolint:contextcheck // ended though the caller gave up
}

// cached visits fleets whose databases stay.
func (l *loader) cached(ctx context.Context, sizes []plans.Size, fn visit) error {
	c, err := openCache(l.o.Cache)
	if err != nil {
		return err
	}
	now := time.Now()
	if err := c.clear(sizes, now); err != nil {
		return err
	}
	if err := room(c.dir, c.missing(sizes, now)); err != nil {
		return err
	}
	for _, size := range sizes {
		if err := l.visitCached(ctx, c, size, fn); err != nil {
			return err
		}
	}
	return nil
}

func (l *loader) visitCached(ctx context.Context, c *cache, size plans.Size, fn visit) error {
	dir, there, unlock, err := c.place(size, time.Now())
	if err != nil {
		return err
	}
	defer unlock()
	db, err := bench.OpenDatabaseToLoad(ctx, l.o.Logger, dir)
	if err != nil {
		return fmt.Errorf("start the bench's database: %w", err)
	}
	how := "from the cache"
	if !there {
		if how, err = l.load(ctx, db, size); err == nil {
			err = finish(dir)
		}
	}
	if err == nil {
		err = describe(ctx, db, size, how, fn)
	}
	return errors.Join(err, db.Close()) //nolint:contextcheck // ended though the caller gave up
}

// describe visits a fleet with a text that describes its size and how it was made.
func describe(ctx context.Context, db *bench.Database, size plans.Size, how string, fn visit) error {
	bytes, err := databaseBytes(ctx, db)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("%d/%d %s: %.2f GB", size.Nodes, size.Workspaces, how, float64(bytes)/1e9)
	return fn(ctx, db, size, text)
}

// cache is a directory with the databases of fleets. Each has a directory, named by its contents and the build that
// made it; a run has a lock on the file beside it. To remove a fleet is to remove its directory.
type cache struct {
	dir   string
	build string
}

func openCache(dir string) (*cache, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil { // the server's user passes through
		return nil, fmt.Errorf("make the cache of fleets: %w", err)
	}
	build, err := thisBuild()
	return &cache{dir: dir, build: build}, err
}

// thisBuild returns a text that identifies this program and its schema.
func thisBuild() (string, error) {
	sum := sha256.New()
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	file, err := os.Open(self) // this very program
	if err != nil {
		return "", fmt.Errorf("read this program: %w", err)
	}
	defer file.Close()
	if _, err := io.Copy(sum, file); err != nil {
		return "", fmt.Errorf("read this program: %w", err)
	}
	entries, err := fs.ReadDir(migrations.FS, ".")
	if err != nil || len(entries) == 0 {
		return "", fmt.Errorf("read the migrations: %w", err)
	}
	schema, _, _ := strings.Cut(entries[len(entries)-1].Name(), "_")
	return schema + "-" + hex.EncodeToString(sum.Sum(nil))[:12], nil
}

func (c *cache) path(size plans.Size) string {
	return filepath.Join(c.dir, fmt.Sprintf("fleet-%d-%d-%d-%d-%t-%t-%s",
		size.Nodes, size.Workspaces, size.Ended, size.Days, size.Events, size.Instances, c.build))
}

// has reports whether a fleet is completely loaded and new enough.
func (c *cache) has(size plans.Size, now time.Time) bool {
	at, err := os.Stat(filepath.Join(c.path(size), complete))
	return err == nil && now.Sub(at.ModTime()) < freshFor
}

// missing returns the bytes of the fleets that have to be loaded.
func (c *cache) missing(sizes []plans.Size, now time.Time) uint64 {
	var bytes uint64
	for _, size := range sizes {
		if !c.has(size, now) {
			bytes += needed(size)
		}
	}
	return bytes
}

// clear removes the files in the places of fleets that have to be loaded, so that their space counts as free.
func (c *cache) clear(sizes []plans.Size, now time.Time) error {
	for _, size := range sizes {
		if c.has(size, now) {
			continue
		}
		_, _, unlock, err := c.place(size, now)
		if err != nil {
			return err
		}
		unlock()
	}
	return nil
}

// place locks a fleet and returns its directory and whether the fleet is there. A fleet whose load did not complete, or
// that is too old, is removed first.
func (c *cache) place(size plans.Size, now time.Time) (string, bool, func(), error) {
	dir := c.path(size)
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", false, nil, fmt.Errorf("lock a fleet of the cache: %w", err)
	}
	unlock := func() { _ = lock.Close() }
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		unlock()
		return "", false, nil, fmt.Errorf("%w: %s", ErrInUse, dir)
	}
	there := c.has(size, now)
	if !there {
		err = os.RemoveAll(dir)
	}
	if err == nil {
		err = os.MkdirAll(dir, 0o711) // the server's user passes through
	}
	if err != nil {
		unlock()
		return "", false, nil, fmt.Errorf("make room for a fleet in the cache: %w", err)
	}
	return dir, there, unlock, nil
}

// finish marks a fleet as loaded.
func finish(dir string) error {
	if err := pki.WriteFile(filepath.Join(dir, complete), nil); err != nil {
		return fmt.Errorf("mark a fleet as loaded: %w", err)
	}
	return nil
}

// needed returns the bytes that a fleet takes, with the log of its load.
func needed(size plans.Size) uint64 {
	// neither is negative
	return uint64(size.Workspaces)*bytesOf(size.Events) + uint64(size.Ended)*bytesOfEnded
}

// ErrNoRoom is the error of Run if the disk has no room for the fleet.
var ErrNoRoom = errors.New("there is no room on the disk for a fleet of this size")

// room refuses fleets for which a directory has no room.
func room(dir string, need uint64) error {
	var at syscall.Statfs_t
	if err := syscall.Statfs(dir, &at); err != nil {
		return fmt.Errorf("look for room in %s: %w", dir, err)
	}
	free := at.Bavail * uint64(at.Bsize) // it is not negative
	if need > free {
		return fmt.Errorf("%w: %s has %d bytes, and %d are needed", ErrNoRoom, dir, free, need)
	}
	return nil
}
