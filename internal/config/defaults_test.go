package config_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/internal/config"
)

func TestOrReplacesWhatIsUnset(t *testing.T) {
	type limits struct {
		Streams int
		Rate    float64
	}
	type options struct {
		Name   string
		Every  time.Duration
		From   time.Time
		Limits limits
		Logger *slog.Logger
		Hosts  []string
		kept   int
	}
	logger := slog.New(slog.DiscardHandler)
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	defaults := options{
		Name: "default", Every: time.Second, From: from, Limits: limits{Streams: 8, Rate: 2}, Logger: logger,
		Hosts: []string{"a"}, kept: 7,
	}
	got := config.Or(options{Every: -time.Second, Limits: limits{Rate: 0.5}, Hosts: []string{"b"}, kept: 1}, defaults)
	want := options{
		Name: "default", Every: -time.Second, From: from, Limits: limits{Streams: 8, Rate: 0.5}, Logger: logger,
		Hosts: []string{"b"}, kept: 1,
	}
	equalLoggers := cmp.Comparer(func(a, b *slog.Logger) bool { return a == b })
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(options{}), equalLoggers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := config.Or(options{}, defaults).From; !got.Equal(from) {
		t.Errorf("from = %s, want %s", got, from)
	}
}
