package profiles_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

// TestAQuietBookReadsAfterEvents: while a connection passes on events the book does not read again and again, and it
// reads after one.
func TestAQuietBookReadsAfterEvents(t *testing.T) {
	s := newSite(t)
	numbered := testkit.ListeningSignal(t, s.db)
	pool, counts := testkit.CountedPool(t, s.db, pg.RoleRecovery)
	book, err := profiles.NewBook(profiles.Deps{
		Logger: testkit.Logger(t), Pool: pool, Default: "site", TrustDomain: rpctest.TrustDomain, Numbered: numbered,
		RefreshEvery: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() { done <- book.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	read := func() int { return counts.Calls("profiles.read_head") }
	testkit.Eventually(t, testkit.Patience, func() error {
		if book.Authority() == nil {
			return errors.New("the book has not read yet")
		}
		return nil
	})
	for range 200 { // each takes longer than the least time between two reads
		if _, err := pool.Exec(ctx, "SELECT pg_sleep(0.001)"); err != nil {
			t.Fatal(err)
		}
	}
	if n := read(); n != 1 {
		t.Errorf("it has read %d times without an event", n)
	}
	if err := s.book.Configure(s.ctx, content("127.0.0.1:1", s.authorities.ServiceRoots.PEM())); err != nil {
		t.Fatal(err)
	}
	numbered.Notify()
	testkit.Eventually(t, testkit.Patience, func() error {
		if book.Default() == nil {
			return errors.New("the change is not read after its event")
		}
		return nil
	})
}
