//go:build !release

package failpoint

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestAPointFailsOnceOrAtEachPass(t *testing.T) {
	t.Parallel()
	s := &set{points: parse("once=error,each=errors")}
	for pass := range 3 {
		if err := s.hit("once"); errors.Is(err, ErrInjected) != (pass == 0) {
			t.Errorf("pass %d: %v", pass, err)
		}
		if err := s.hit("each"); !errors.Is(err, ErrInjected) {
			t.Errorf("pass %d: %v", pass, err)
		}
	}
}

func TestAPatternArmsEachPointUntilItIsReported(t *testing.T) {
	t.Parallel()
	report := filepath.Join(t.TempDir(), "hits")
	fresh := func() *set { return &set{points: parse("a.*=error,b.x=error:2"), report: report} }
	first := fresh()
	for _, tc := range []struct {
		name string
		hit  bool
	}{{"a.one", true}, {"a.one", false}, {"b.x", false}, {"b.x", true}, {"b.y", false}, {"a.two", true}} {
		if err := first.hit(tc.name); errors.Is(err, ErrInjected) != tc.hit {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	second := fresh()
	for name, hit := range map[string]bool{"a.one": false, "a.two": false, "a.three": true, "a": false} {
		if err := second.hit(name); errors.Is(err, ErrInjected) != hit {
			t.Errorf("the second process at %s: %v", name, err)
		}
	}
	if _, err := os.Stat(report); err != nil {
		t.Error(err)
	}
}
