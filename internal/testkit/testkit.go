package testkit

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/devstack/redisserver"
	"github.com/gpuaas/mesh/internal/names"
)

// IO marks a test that needs processes, sockets or a database: under -short it does not run.
func IO(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.SkipNow()
	}
}

// Context returns a context that ends a moment before the test's own deadline, so that a hanging test reports where it
// hung.
func Context(tb testing.TB) context.Context {
	tb.Helper()
	ctx := tb.Context()
	if d, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		if deadline, ok := d.Deadline(); ok {
			c, cancel := context.WithDeadline(ctx, deadline.Add(-5*time.Second))
			tb.Cleanup(cancel)
			return c
		}
	}
	return ctx
}

// Logger returns a logger that writes to the test's own log.
func Logger(tb testing.TB) *slog.Logger {
	tb.Helper()
	w := &testWriter{t: tb}
	tb.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// testWriter drops lines after the test's end: logging then would panic.
type testWriter struct {
	mu sync.Mutex
	t  testing.TB
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Logf("%s", p[:max(len(p)-1, 0)])
	}
	return len(p), nil
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t = nil
}

// Patience is how long a test waits for anything on a machine that is busy with other packages.
const Patience = time.Minute

// Eventually calls check until it returns nil, and fails the test with its last error after limit. Where the time is no
// promise of the product, limit is Patience. It checks every few milliseconds at first and less often the longer it
// waits, since most checks read a database: the check notices its result at most a tenth of the waited time late.
func Eventually(tb testing.TB, limit time.Duration, check func() error) {
	tb.Helper()
	began := time.Now()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		next.Reset(Pause(time.Since(began)))
		select {
		case <-deadline.C:
			tb.Fatalf("not within %s: %v", limit, err)
		case <-tb.Context().Done():
			tb.Fatalf("the test ended while waiting: %v", err)
		case <-next.C:
		}
	}
}

// Pause returns how long to wait between two checks after having waited so long: a tenth of that, from 5 to 100
// milliseconds.
func Pause(waited time.Duration) time.Duration {
	return min(max(waited/10, 5*time.Millisecond), 100*time.Millisecond)
}

// Redis starts a redis-server of this test's own.
func Redis(tb testing.TB) *redisserver.Server {
	tb.Helper()
	s, err := redisserver.Start(Context(tb), redisserver.Config{Logger: Logger(tb)})
	if err != nil {
		tb.Fatalf("start redis: %v", err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			tb.Errorf("stop redis: %v", err)
		}
	})
	if !s.Real() {
		tb.Fatal("this test needs a redis-server on PATH (apt install redis-server)")
	}
	return s
}

// Option changes what Main does.
type Option func(*mainOptions)

type mainOptions struct {
	leaks  bool
	atOnce int
}

// CheckLeaks fails the run if goroutines are left after all tests.
func CheckLeaks() Option { return func(o *mainOptions) { o.leaks = true } }

// AtOnce lets so many parallel tests run at once, for tests that mostly wait: more than there are processors. A
// -parallel on the command line wins.
func AtOnce(tests int) Option { return func(o *mainOptions) { o.atOnce = tests } }

// heapPercent is by how much the heap of a test process may grow until it is collected. Most of what tests allocate is
// gone at once, and marking under the race detector costs a quarter of their processor time at the usual 100.
const heapPercent = 400

// Main runs the tests of a package, stops the Postgres they started, and exits. Without it the server ends with the
// process and its directory is swept up by a later run. The heap grows to five times its live size until it is
// collected, unless GOGC is set.
func Main(m *testing.M, opts ...Option) {
	if _, set := os.LookupEnv("GOGC"); !set {
		debug.SetGCPercent(heapPercent)
	}
	var o mainOptions
	for _, opt := range opts {
		opt(&o)
	}
	if o.atOnce > 0 {
		if err := flag.Set("test.parallel", strconv.Itoa(o.atOnce)); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if err := stopShared(); err != nil {
		slog.New(slog.NewTextHandler(os.Stderr, nil)).Error("stop test postgres", slog.Any("error", err))
		code = max(code, 1)
	}
	if o.leaks && code == 0 {
		if err := goleak.Find(); err != nil {
			slog.New(slog.NewTextHandler(os.Stderr, nil)).Error("goroutines left behind", slog.Any("error", err))
			code = 1
		}
	}
	os.Exit(code)
}

// WithoutValue lets this process read as a build that does not know a value of an enum, until the test ends. Tests that
// run beside it read so as well.
func WithoutValue(tb testing.TB, value protoreflect.Enum) {
	tb.Helper()
	tb.Cleanup(names.Without(value))
}
