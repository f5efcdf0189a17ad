//go:build !release

package wallclock

import (
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "25h": 25 * time.Hour, "-90s": -90 * time.Second} {
		if got, err := parse(text); err != nil || got != want {
			t.Errorf("parse(%q) = %v, %v", text, got, err)
		}
	}
	if _, err := parse("a day"); err == nil {
		t.Error("a text that is no duration is taken")
	}
}

func TestNowWithoutAnOffsetIsTheHosts(t *testing.T) {
	if off := time.Until(Now()).Abs(); off > time.Minute {
		t.Errorf("%v off the host's clock", off)
	}
}
