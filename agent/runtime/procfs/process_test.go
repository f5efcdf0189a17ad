package procfs

import "testing"

func TestParseStat(t *testing.T) {
	// A program may call itself anything, parentheses and spaces included.
	fields := "S 7 42 43 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 1"
	got, err := parseStat(42, []byte("42 (a) R 1 (b c) "+fields+"\n"))
	if err != nil || got.Start != 987654 || got.Parent != 7 || got.Session != 43 || got.Zombie {
		t.Errorf("parseStat = %+v, %v", got, err)
	}
	for _, bad := range []string{"", "42", "42 (x", "42 (x) S 1", "42 (x) S a b c 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 z"} {
		if _, err := parseStat(42, []byte(bad)); err == nil {
			t.Errorf("parseStat(%q) is not refused", bad)
		}
	}
}
