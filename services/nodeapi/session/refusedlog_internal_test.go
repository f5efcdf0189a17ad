package session

import (
	"log/slog"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

func TestRefusedHandshakesDoNotFillTheLog(t *testing.T) {
	l := refusedHandshakes{}
	now := time.Now()
	want := func(reason pki.RejectReason, level slog.Level, since int) {
		t.Helper()
		if gotLevel, got := l.count(reason, now); gotLevel != level || got != since {
			t.Errorf("%s: level %s and %d since; want %s and %d", reason, gotLevel, got, level, since)
		}
	}
	want("expired", slog.LevelInfo, 0)
	for i := range 1000 {
		want("expired", slog.LevelDebug, i+1)
	}
	want("bad_san", slog.LevelInfo, 0) // each reason by itself
	now = now.Add(refusedLogEvery)
	want("expired", slog.LevelInfo, 1000)
	want("expired", slog.LevelDebug, 1)
}
