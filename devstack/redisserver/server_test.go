package redisserver_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/gpuaas/mesh/devstack/redisserver"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

func TestBothKindsServeExpireDieAndComeBack(t *testing.T) {
	testkit.IO(t)
	for _, imitation := range []bool{false, true} {
		t.Run(fmt.Sprintf("imitation=%v", imitation), func(t *testing.T) {
			ctx := testkit.Context(t)
			began := time.Now()
			s, err := redisserver.Start(ctx, redisserver.Config{ImitationOnly: imitation, Logger: testkit.Logger(t)})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("started in %s, real %v", time.Since(began), s.Real())
			t.Cleanup(func() {
				if err := s.Stop(context.Background()); err != nil {
					t.Error(err)
				}
			})
			if s.Real() == imitation {
				t.Fatalf("real is %v", s.Real())
			}
			client := dial(t, s.URL())
			if err := client.Set(ctx, "k", "v", time.Hour).Err(); err != nil {
				t.Fatal(err)
			}
			if v, err := client.Get(ctx, "k").Result(); err != nil || v != "v" {
				t.Fatalf("%q, %v", v, err)
			}
			if err := client.Set(ctx, "k", "v", 300*time.Millisecond).Err(); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, testkit.Patience, func() error {
				if n, err := client.Exists(ctx, "k").Result(); err != nil || n != 0 {
					return fmt.Errorf("still there: %d, %w", n, err)
				}
				return nil
			})
			// A client without the password is refused.
			stranger := redis.NewClient(&redis.Options{Addr: s.Addr(), MaxRetries: -1})
			defer func() { _ = stranger.Close() }()
			if err := stranger.Ping(ctx).Err(); err == nil || !strings.Contains(err.Error(), "NOAUTH") {
				t.Errorf("a stranger got %v", err)
			}

			// Done reports a killed server, and Restart serves an empty one at the same address.
			if err := client.Set(ctx, "k", "v", time.Hour).Err(); err != nil {
				t.Fatal(err)
			}
			addr, done := s.Addr(), s.Done()
			if err := s.Kill9(); err != nil {
				t.Fatal(err)
			}
			<-done
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			if n, err := dial(t, s.URL()).Exists(ctx, "k").Result(); err != nil || n != 0 || s.Addr() != addr {
				t.Errorf("after the restart: %d keys at %s, %v", n, s.Addr(), err)
			}
		})
	}
}

func dial(t *testing.T, url string) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestPortInUseIsNamed(t *testing.T) {
	testkit.IO(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := l.Addr().(*net.TCPAddr).Port
	for _, imitation := range []bool{false, true} {
		_, err := redisserver.Start(testkit.Context(t),
			redisserver.Config{Port: port, ImitationOnly: imitation, Logger: testkit.Logger(t)})
		if want := fmt.Sprintf("redis port %d is in use", port); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("imitation %v: got %v", imitation, err)
		}
	}
}

func TestNoServerOnPathFallsBack(t *testing.T) {
	testkit.IO(t)
	t.Setenv("PATH", t.TempDir())
	s, err := redisserver.Start(testkit.Context(t), redisserver.Config{Logger: testkit.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Stop(context.Background()) }()
	if s.Real() {
		t.Fatal("found a redis-server on an empty PATH")
	}
}
