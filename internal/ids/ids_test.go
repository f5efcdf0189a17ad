package ids_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
)

func TestNewIsValidAndMonotone(t *testing.T) {
	last := ""
	for range 20_000 {
		id := ids.New()
		if !ids.Valid(id) {
			t.Fatalf("New() = %q: not valid", id)
		}
		if id <= last {
			t.Fatalf("New() = %q after %q: not increasing", id, last)
		}
		last = id
	}
}

func TestNewIsUniqueAcrossGoroutines(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				id := ids.New()
				mu.Lock()
				if seen[id] {
					t.Errorf("id %q twice", id)
				}
				seen[id] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func TestValid(t *testing.T) {
	good := ids.New()
	tests := []struct {
		name string
		in   string
		want bool
	}{
		{name: "fresh", in: good, want: true},
		{name: "empty", in: ""},
		{name: "upper case", in: strings.ToUpper("0197b3f0-0000-7abc-8000-0000000000ff")},
		{name: "version 4", in: "0197b3f0-0000-4abc-8000-0000000000ff"},
		{name: "wrong variant", in: "0197b3f0-0000-7abc-c000-0000000000ff"},
		{name: "braces", in: "{" + good + "}"},
		{name: "no dashes", in: strings.ReplaceAll(good, "-", "")},
		{name: "sql", in: "0197b3f0-0000-7abc-8000-0000000000' "},
		{name: "known good", in: "0197b3f0-0000-7abc-8000-0000000000ff", want: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := ids.Valid(tt.in); got != tt.want {
				t.Errorf("Valid(%q) = %v, want %v", tt.in, got, tt.want)
			}
		})
	}
}

func TestNextWithEra(t *testing.T) {
	tests := []struct {
		name string
		n    ids.Epoch
		era  int64
		want ids.Epoch
	}{
		{name: "first of a new mesh", n: 0, era: 0, want: 1},
		{name: "next", n: 41, era: 0, want: 42},
		{name: "raised era jumps", n: 41, era: 1, want: 1 << 40},
		{name: "in the era counts on", n: 1<<40 + 5, era: 1, want: 1<<40 + 6},
		{name: "restored below a later memory", n: 7, era: 3, want: 3 << 40},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ids.NextWithEra(tt.n, tt.era)
			if got != tt.want {
				t.Errorf("NextWithEra(%d, %d) = %d, want %d", tt.n, tt.era, got, tt.want)
			}
			if era := int64(got) >> ids.EraShift; era != tt.era {
				t.Errorf("%d is of era %d, want %d", got, era, tt.era)
			}
		})
	}
}
