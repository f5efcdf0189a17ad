package recovery

import (
	"testing"
	"time"
)

// TestAnUnverifiedContentIsTriedEverMoreSeldom: up to once a minute, and at once when it is another one.
func TestAnUnverifiedContentIsTriedEverMoreSeldom(t *testing.T) {
	t.Parallel()
	var r retry
	began := time.Now()
	if !r.due("one", began) {
		t.Error("a content is not tried at first")
	}
	now, tries := began, 0
	for now.Sub(began) < 10*time.Minute {
		now = now.Add(profileEvery)
		if r.due("one", now) {
			tries++
			r.failed("one", now)
		}
	}
	if tries < 12 || tries > 18 {
		t.Errorf("it was tried %d times in ten minutes", tries)
	}
	if r.due("one", now.Add(time.Second)) {
		t.Error("it is tried again at once")
	}
	if !r.due("two", now) {
		t.Error("another content waits")
	}
	r.failed("two", now)
	if !r.due("two", now.Add(profileEvery)) {
		t.Error("another content is not tried again at the next check")
	}
}
