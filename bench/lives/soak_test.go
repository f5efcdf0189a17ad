package lives

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestASoakIsMeasuredAfterItsWarmup(t *testing.T) {
	length := 45 * time.Minute
	for name, tc := range map[string]struct {
		size   func(minute float64) float64 // in MB
		passed bool
	}{
		"level":                {func(float64) float64 { return 100 }, true},
		"grows before":         {func(m float64) float64 { return 50 + 50*math.Min(m/14, 1) }, true},
		"swings":               {func(m float64) float64 { return 100 + 5*math.Sin(m) }, true},
		"shrinks":              {func(m float64) float64 { return 200 - m }, true},
		"grows by 0.9 percent": {func(m float64) float64 { return 100 + 0.9*(m-15)/30 }, true},
		"grows by 1.2 percent": {func(m float64) float64 { return 100 + 1.2*(m-15)/30 }, false},
		"leaks slowly":         {func(m float64) float64 { return 100 + m/10 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			var samples []sample
			for at := time.Duration(0); at <= length; at += 15 * time.Second {
				s := sample{At: at, Lives: 1}
				for i := range s.Values {
					s.Values[i] = 1 << 20
				}
				s.Values[2] = int64(tc.size(at.Minutes()) * 1e6)
				samples = append(samples, s)
			}
			result, err := SoakOptions{Length: length}.verdict(samples, 0)
			if err != nil || result.Passed != tc.passed {
				t.Errorf("growth %.3f %%, passed: %t, %v", result.Value, result.Passed, err)
			}
			if from := afterWarmup(samples, length)[0].At; from != Warmup {
				t.Errorf("judged from %s on", from)
			}
		})
	}
	if _, err := (SoakOptions{Length: length}).verdict(make([]sample, 2), 0); err == nil {
		t.Error("two samples were judged")
	}
	if from := afterWarmup([]sample{{At: 0}, {At: time.Second}, {At: 2 * time.Second}},
		3*time.Second)[0].At; from != time.Second {
		t.Errorf("a short soak is judged from %s on", from)
	}
}

func TestSizesOfASoakAreRead(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"agent.log", "launches.jsonl", "agent"} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, 4711), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := sizeOf(dir); err != nil || n != 2*4711 {
		t.Errorf("%d bytes, %v", n, err)
	}
	own, _, _, err := memory(os.Getpid())
	if err != nil || own < 1<<20 {
		t.Errorf("this process has %d bytes, %v", own, err)
	}
}
