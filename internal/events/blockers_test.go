package events_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestBlockersNamesWhoKeepsNumberingWaiting(t *testing.T) {
	d := testkit.DB(t)
	reader := d.Pool(pg.RoleReadmodel)
	if names, err := events.Blockers(t.Context(), reader); err != nil || len(names) > 0 {
		t.Fatalf("nothing waits: %v, %v", names, err)
	}
	held, err := d.Pool(pg.RoleOwner).Begin(t.Context())
	must(t, err)
	defer func() { _ = held.Rollback(context.Background()) }()
	_, err = held.Exec(t.Context(), "LOCK TABLE events.numbered IN ACCESS EXCLUSIVE MODE")
	must(t, err)

	wake := &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{
		Pool: d.Pool(pg.RoleSequencer), Wake: wake,
		Logger: testkit.Logger(t),
	}, events.SequencerConfig{})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sequencer.Run(ctx) }()
	defer func() {
		cancel()
		must(t, <-done)
	}()
	// The table of numbers is locked, so Blockers must not read it.
	testkit.Eventually(t, testkit.Patience, func() error {
		names, err := events.Blockers(t.Context(), reader)
		if err != nil {
			return err
		}
		if len(names) != 1 || !strings.HasPrefix(names[0], pg.RoleOwner+" (pid ") {
			return fmt.Errorf("named are %v", names)
		}
		return nil
	})
	if err := held.Rollback(t.Context()); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
