package lock

import (
	"errors"
	"log/slog"
	"testing"
	"time"
)

func TestBreaker(t *testing.T) {
	ctx, boom := t.Context(), errors.New("x")
	b := &breaker{logger: slog.New(slog.DiscardHandler), least: time.Second, most: 4 * time.Second}
	now := time.Unix(0, 0)
	for range 2 {
		if !b.allow(now) {
			t.Fatal("closed at the start")
		}
	}
	b.failed(ctx, now, boom)
	b.failed(ctx, now, boom) // another call that was under way fails too
	for i, pause := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second} {
		if b.allow(now.Add(pause - 1)) {
			t.Errorf("round %d: a try before %v", i, pause)
		}
		now = now.Add(pause)
		if !b.allow(now) {
			t.Errorf("round %d: no try after %v", i, pause)
		}
		if b.allow(now) {
			t.Errorf("round %d: two tries at once", i)
		}
		b.failed(ctx, now, boom)
	}
	now = now.Add(4 * time.Second)
	if !b.allow(now) {
		t.Fatal("no try")
	}
	b.undecided()
	if !b.allow(now) {
		t.Fatal("the try of a caller that gave up was the last one")
	}
	b.succeeded(ctx)
	for range 2 {
		if !b.allow(now) {
			t.Error("open after a success")
		}
	}
	b.failed(ctx, now, boom)
	if !b.allow(now.Add(time.Second)) {
		t.Error("the pause was not forgotten")
	}
}
