package silence_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/services/recovery/silence"
)

func TestDown(t *testing.T) {
	heard := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const threshold = 2 * time.Minute
	for _, tt := range []struct {
		name      string
		listening time.Time
		after     time.Duration // the first moment at which it is down
		never     bool
	}{
		{name: "listened to all the time", listening: heard.Add(-time.Hour), after: threshold},
		{name: "listening began before the amnesty", listening: heard.Add(-silence.Amnesty), after: threshold},
		{
			name: "listening began later", listening: heard.Add(time.Minute),
			after: time.Minute + silence.Amnesty + threshold,
		},
		{name: "no replica listens", never: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rule := silence.Rule{After: threshold, ListeningSince: tt.listening}
			if tt.never {
				if rule.Down(heard, heard.Add(24*time.Hour)) {
					t.Error("down, though no replica listens")
				}
				return
			}
			if rule.Down(heard, heard.Add(tt.after-time.Microsecond)) || !rule.Down(heard, heard.Add(tt.after)) {
				at, _ := rule.DownAt(heard)
				t.Errorf("down after %s, want %s", at.Sub(heard), tt.after)
			}
		})
	}
}
