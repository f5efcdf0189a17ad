package people

import "testing"

// TestRecheckReachesTheWatchesOfOneSubject: each of them once, however often the recheck fires, and none that was
// released.
func TestRecheckReachesTheWatchesOfOneSubject(t *testing.T) {
	s := NewSessions(nil)
	first, releaseFirst := s.Recheck("ana")
	second, releaseSecond := s.Recheck("ana")
	other, releaseOther := s.Recheck("bob")
	fired := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	s.recheck("ana")
	s.recheck("ana")
	if !fired(first) || !fired(second) || fired(other) || fired(first) {
		t.Error("not each of the subject's watches once")
	}
	releaseFirst()
	s.recheck("ana")
	if fired(first) || !fired(second) {
		t.Error("a watch that is over was told, or one that is not was not")
	}
	releaseSecond()
	releaseOther()
	if len(s.rechecks) != 0 {
		t.Errorf("kept: %v", s.rechecks)
	}
}
